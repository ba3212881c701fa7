"""Blocks from graphs, with a graph that is made up: what is captured, what a replay is given and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import contrastile
from contrastile import plan
from contrastile.autograd import bodies, prepared, steps
from contrastile.autograd.steps import Steps
from contrastile.backends import replay, settings
from contrastile.backends.contract import (
    PRECISIONS,
    Block,
    Finished,
    Options,
    Pairs,
    SideWeights,
    Weights,
)
from contrastile.backends.registry import load
from contrastile.backends.replay import Graphs
from contrastile.schedules import local

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
    for module in (replay, steps):
        monkeypatch.setattr(module, "record", recorded)
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
        if different and other == "what":
            what = "other"
        elif different and other == "shape":
            arrays[0] = arrays[0][:4]
        elif different and other == "dtype":
            arrays[2] = arrays[2].double()
        elif different and other == "none":
            arrays[2] = None
        elif different and other == "alias":
            arrays[1] = arrays[0]
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


def test_only_so_many_graphs_are_held_and_the_oldest_goes(graphs: Graphs) -> None:
    for what in range(replay.MOST + 1):
        for seed in range(BEFORE):
            graphs.call(what, drawn(seed), compute)
    kept: Any = graphs.captured
    assert [key[0] for key in kept] == list(range(1, replay.MOST + 1))
    for what in range(2 * replay._KNOWN):
        graphs.call(("once", what), drawn(0), compute)
    assert len(graphs.seen) == replay._KNOWN


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


class OnGpu:
    """The host's tensors pass for a GPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.small = Steps(), True
        patch = monkeypatch.setattr
        patch(steps, "STEPS", self.steps)
        patch(steps, "may_be_captured", lambda: True)
        patch(prepared, "is_plain", lambda: True)
        patch(steps, "on_gpu", lambda features: isinstance(features, torch.Tensor))
        patch(steps.Call, "device", lambda call: -1)
        patch(bodies, "fits", lambda rows, columns: self.small)
        # as torch's backend says of a GPU
        patch(local, "keeps", lambda *_: False)


@pytest.fixture
def gpu(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    return OnGpu(monkeypatch)


LABELS = torch.tensor([0, 1, 0, 2, 1])
Loss = Callable[..., Any]
LOSSES: dict[str, tuple[Loss, int]] = {
    "clip_loss": (contrastile.clip_loss, 2),
    "ids": (partial(contrastile.clip_loss, ids=LABELS), 2),
    "info_nce": (contrastile.info_nce, 2),
    "negatives": (lambda a, b, c, scale, **more: contrastile.info_nce(a, b, scale, negatives=[c, c * 2], **more), 3),
    "nt_xent": (contrastile.nt_xent, 2),
    "sup_con": (lambda a, scale, **more: contrastile.sup_con(a, LABELS, scale, **more), 1),
    "sigmoid_loss": (lambda a, b, scale, **more: contrastile.sigmoid_loss(a, b, scale, -scale, **more), 2),
}


def leaves(seed: int, towers: int, frozen: Sequence[int] = ()) -> list[Any]:
    found = [*drawn(seed, 5, 5), torch.flip(drawn(seed, 5, 5)[0], (0,))][:towers]
    return [x.requires_grad_(i not in frozen) for i, x in enumerate([*found, torch.tensor(3.0 + seed)])]


def gradients(loss: Any, given: Sequence[Any]) -> list[Any]:
    wanted = [x for x in given if x.requires_grad]
    return [loss.detach(), *(torch.autograd.grad(-2.5 * loss, wanted) if wanted else ())]


@pytest.mark.parametrize(
    ("name", "frozen"), [*((name, ()) for name in LOSSES), *(("clip_loss", x) for x in ((0,), (1,), (2,), (0, 1, 2)))]
)
def test_a_whole_step_is_replayed(name: str, frozen: tuple[int, ...], gpu: OnGpu) -> None:
    loss, towers = LOSSES[name]
    for seed in range(BEFORE + 2):
        results = []
        for gpu.small in (True, False):
            given = leaves(seed, towers, frozen)
            results.append(gradients(loss(*given, backend="torch" if gpu.small else "auto"), given))
        assert same(*results)
    (step,) = gpu.steps.captured.values()
    assert step.replays == 3
    assert (step._backward is step._forward) == (len(frozen) == 3)


def test_what_a_replayed_step_saved_is_checked_as_ever(gpu: OnGpu) -> None:
    for _ in range(BEFORE + 1):
        given = leaves(0, 2)
        loss = contrastile.clip_loss(*given, backend="torch")
    assert loss.grad_fn.name() == "ReplayedBackward"
    again = contrastile.clip_loss(*given, backend="torch")
    with pytest.raises(RuntimeError, match="must not be differentiated itself"):
        torch.autograd.grad(torch.autograd.grad(again, given[0], create_graph=True)[0].sum(), given[1])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    changed = contrastile.clip_loss(*given, backend="torch")
    with torch.no_grad():
        given[0].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        changed.backward()


def test_other_settings_are_another_step(gpu: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = [{}, {"tile": 2}, {"workspace": 3}, {"keep": 3}, {"precision": "split"}]
    image, text = drawn(0, 5, 5)[:2]
    backend = replace(load("torch"), precisions=frozenset(PRECISIONS))
    monkeypatch.setattr(plan, "load", lambda name: backend)
    for more in given:
        for _ in range(BEFORE):
            contrastile.clip_loss(image, text, 3.0, backend="torch", **more)
    # another number, another rule for autograd, autocast: each is another call
    for _ in range(BEFORE):
        contrastile.clip_loss(image, text, 4.0, backend="torch")
        contrastile.clip_loss(image.requires_grad_(), text, 3.0, backend="torch")
        image.requires_grad_(False)
    assert len(gpu.steps.captured) == len(given) + 2


@pytest.mark.parametrize("why", ["large", "not replayable", "kept", "list", "subclass", "negative"])
def test_what_is_not_replayed(why: str, gpu: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load("torch")
    if why == "not replayable":
        backend = replace(backend, replayable=False)
    if why == "kept":
        monkeypatch.setattr(local, "keeps", lambda *_: True)
    monkeypatch.setattr(plan, "load", lambda name: backend)
    gpu.small = why != "large"
    more: dict[str, Any] = {"tile": [2, 2]} if why == "list" else {"keep": 3}
    for seed in range(2 * BEFORE):
        given = leaves(seed, 2)
        image = given[0]
        if why == "subclass":
            image = image.as_subclass(type("Mine", (torch.Tensor,), {}))
        if why == "negative":
            image = torch._neg_view(image)
        contrastile.clip_loss(image, *given[1:], backend="torch", **more)
    assert not gpu.steps.captured
    counted = why in ("large", "not replayable", "kept")
    assert list(gpu.steps.seen.values()) == ([None] if counted else [])


def test_primitives_between_messages_are_replayed(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_backend = load("torch")
    finished_blocks: list[Any] = []

    def finished(block: Any, weights: Any, upstream: Any, columns: Any, options: Any) -> Any:
        finished_blocks.append(block)
        return Finished(block.rows * upstream, block.columns * 2, weights.rows.weight.double().sum())

    backend = replay.replayed(replace(torch_backend, finished=finished))
    monkeypatch.setattr(replay, "GRAPHS", graphs)
    monkeypatch.setattr(replay, "fits", lambda rows, columns: True)
    monkeypatch.setattr(replay, "may_be_captured", lambda: True)
    monkeypatch.setattr(replay, "_current_device", lambda: -1)
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
