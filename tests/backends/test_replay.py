"""Blocks from graphs, with a graph that is made up: what is captured, what a replay is given and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import contrastile
from contrastile.autograd import steps
from contrastile.backends import replay, settings
from contrastile.backends.contract import Block, Finished, Options, Pairs, SideWeights, Weights
from contrastile.backends.registry import load
from contrastile.backends.replay import Graphs
from contrastile.comm.inprocess import InProcess, InProcessGroup

BEFORE = 3
"""Calls until one is replayed: the last of them is captured."""


class Repeating:
    """A graph whose replay computes again, from where it reads to where it writes."""

    def __init__(self) -> None:
        self.action: Callable[[], None] = lambda: None
        self.replays = 0

    def pool(self) -> int:
        return 5

    def replay(self) -> None:
        self.replays += 1
        self.action()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(replay, "record", recorded)
    return Graphs()


def recorded(where: Any, actions: Sequence[Callable[[], Sequence[Any]]], pool: Any) -> tuple[list[Any], list[Any]]:
    graphs, results, grad = [], [], torch.is_grad_enabled()
    for action in actions:
        graph = Repeating()
        found = action()

        def again(action: Any = action, found: Any = found) -> None:
            with torch.set_grad_enabled(grad):
                results = action()
            for place, x in zip(found, results, strict=True):
                if place is not None:
                    place.copy_(x)

        graph.action = again
        graphs.append(graph)
        results.append(found)
    return graphs, results


def compute(arrays: Sequence[Any]) -> list[Any]:
    x, y, *rest = arrays
    shift = sum(each.sum() for each in rest if each is not None)
    return [x @ y.T + shift, x.sum(1), y.sum(1), None, x.double().sum()]


def drawn(seed: int, m: int = 5, n: int = 3) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(k, 4, generator=draw) for k in (m, n)]


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a is b is None or (a is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("other", ["what", "shape", "dtype", "none", "alias", "stream", *settings.VARIABLES])
def test_what_differs_is_another_call(other: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(seed: int, different: bool) -> None:
        arrays, what = [*drawn(seed, 5, 5), torch.ones(2)], "what"
        x, y, z = arrays
        changed = {"shape": [x[:4], y, z], "dtype": [x, y, z.double()], "none": [x, y, None], "alias": [x, x, z]}
        if different and other == "what":
            what = "other"
        elif different and other in changed:
            arrays = changed[other]
        elif different and other == "stream":
            monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 8, raising=False)
        elif different:
            monkeypatch.setenv(other, "3")
        assert same(graphs.call(what, arrays, compute), compute(arrays))

    for seed in range(BEFORE):
        call(seed, False)
    assert len(graphs.captured) == 1
    for seed in range(BEFORE):
        call(seed, True)
    assert len(graphs.captured) == 2


def test_more_call_signatures_in_turn_than_graphs_are_not_captured_for_ever(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kinds = [], replay.MOST + 3

    def counted(*given: Any) -> Any:
        made.append(1)
        return recorded(*given)

    monkeypatch.setattr(replay, "record", counted)
    counts = []
    for _ in range(20):
        for what in range(kinds):
            arrays = drawn(what)
            assert same(graphs.call(what, arrays, compute), compute(arrays))
        counts.append(len(made))
    # once every graph is of a kind that stays, nothing is captured any more
    assert counts[-1] == counts[BEFORE] == kinds
    assert len(graphs.captured) == replay.MOST
    assert min(captured.replays for captured in graphs.captured.values()) > replay.WORTH


def test_what_cannot_be_captured_is_computed_and_not_tried_again(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def failing(*_: Any) -> None:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "record", failing)
    for seed in range(2 * BEFORE):
        arrays = drawn(seed)
        assert same(graphs.call("what", arrays, compute), compute(arrays))
    assert len(tried) == 1
    assert not graphs.captured


def test_primitives_between_messages_are_replayed(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_backend = load("torch")
    finished_blocks: list[Any] = []

    def finished(block: Any, weights: Any, upstream: Any, columns: Any, options: Any) -> Any:
        finished_blocks.append(block)
        return Finished(block.rows * upstream, block.columns * 2, weights.rows.weight.double().sum())

    backend = replay.replayed(replace(torch_backend, finished=finished))
    monkeypatch.setattr(replay, "GRAPHS", graphs)
    monkeypatch.setattr(replay, "fits", lambda rows, columns: True)
    monkeypatch.setattr(replay, "can_capture", lambda x: True)
    for seed in range(BEFORE + 2):
        rows, columns = drawn(seed)[:2]
        block = Block(rows, columns, torch.tensor(2.0), pairs=Pairs(positives=torch.arange(5) % 3))
        found = backend.lse(block, True, Options())
        expected = torch_backend.lse(block, True, Options())
        assert same(*([*x.rows, *(x.columns or ())] for x in (found, expected)))
        weights = Weights(SideWeights(*found.rows[:2], rows[:, 0], rows[:, 1]))
        assert backend.finished is not None
        done = backend.finished(block, weights, torch.tensor(3.0), "gradient", Options())
        assert same([done.rows, done.columns, done.inner], [rows * 3, columns * 2, rows[:, 0].double().sum()])
    assert [x.replays for x in graphs.captured.values()] == [3, 3]
    before = len(finished_blocks)
    backend.finished(block, replace(weights, kept=rows), torch.tensor(3.0), "gradient", Options())
    assert finished_blocks[before:] == [block]


def test_a_backend_of_other_arrays_becomes_one_of_torchs_over_the_same_memory() -> None:
    backend = replay._over_torch(load("numpy"))
    rows, columns = torch.randn(2, 5, 3, dtype=torch.float64).unbind()
    block = Block(rows, columns, torch.tensor(2.0, dtype=torch.float64), None, Pairs(torch.arange(5)))
    found = backend.lse(block, True, Options())
    logits = 2 * rows @ columns.T
    others = logits.masked_fill(torch.eye(5, dtype=torch.bool), -torch.inf)
    assert found.columns is not None
    torch.testing.assert_close(found.rows.negative_lse.sum(1), others.logsumexp(1))
    torch.testing.assert_close(found.columns.positive_lse.sum(1), logits.diagonal())
    into = torch.ones(5, 3, dtype=torch.float64)
    ones = torch.ones(5, dtype=torch.float64)
    backend.gradients(block, Weights(SideWeights(*found.rows[:2], ones, ones)), into, None, Options())
    probability = logits.softmax(1) - torch.eye(5)
    torch.testing.assert_close(into, 1 + probability @ columns)


@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_a_replayed_step_has_the_bits_of_a_launched_one(monkeypatch: pytest.MonkeyPatch, upstream: float) -> None:
    monkeypatch.setattr(steps, "record", recorded)
    held, given = ([*map(torch.Tensor.requires_grad_, drawn(seed, 5, 5)), torch.tensor(3.0)] for seed in (0, 1))
    step = steps.Step((0, 0), None, held, [True, True, False], lambda args: contrastile.clip_loss(*args))
    with torch.no_grad():
        value, number = step.loss(given)
        found = step.gradients(number, given, torch.tensor(upstream))
    expected = contrastile.clip_loss(*given)
    assert same([value, *found], [expected, *torch.autograd.grad(upstream * expected, given[:2]), None])


def clip(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.clip_loss(i, t, s, **how)


def of_ids(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.clip_loss(i, t, s, ids=torch.arange(len(i)) % 2, weights=i.detach()[:, 0].abs(), **how)


def with_a_queue(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.info_nce(i, t, s.detach(), negatives=t.detach() ** 2, margin=0.1, **how)


def views(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.nt_xent(i, t, s, **how)


def labelled(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.sup_con(i, torch.arange(len(i)) // 2, s, **how)


def additive(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.sigmoid_loss(i, t, s, s.detach() - 9, **how)


@pytest.mark.parametrize("loss", [clip, of_ids, with_a_queue, views, labelled, additive])
def test_a_replicated_step_from_graphs_has_the_bits_of_a_launched_one(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, loss: Callable[..., Any]
) -> None:
    """Ranks of 4 and 3 samples; three calls in turn, of which only the last is differentiated at once."""

    def program(comm: InProcess) -> list[Any]:
        results: list[Any] = []
        for seed in range(BEFORE + 2):
            given = [x.split((4, 3))[comm.rank].clone().requires_grad_() for x in drawn(seed, 7, 7)]
            scale = torch.tensor(2.0 + seed, requires_grad=True)
            value = loss(*given, scale, group=comm, exchange="replicate")
            results.append((value, [*given, scale]))
        for value, _ in reversed(results):
            (-1.5 * value).backward()
        return [x for value, given in results for x in (value.detach(), *(each.grad for each in given))]

    expected = InProcessGroup[list[Any]](2).run(program)
    monkeypatch.setattr(steps, "STEPS", found := steps.Steps())
    monkeypatch.setattr(steps, "record", recorded)
    monkeypatch.setattr(steps, "can_capture", lambda x: True)
    monkeypatch.setattr(replay, "fits", lambda rows, columns: True)
    for ours, launched in zip(InProcessGroup[list[Any]](2).run(program), expected, strict=True):
        assert same(ours, launched)
    assert found.captured
