"""Blocks from graphs, with a graph that is made up: what is captured, what a replay is given and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import contrastile
from contrastile import plan
from contrastile.autograd import bodies
from contrastile.backends import eager, replay, settings
from contrastile.backends.contract import PRECISIONS
from contrastile.backends.registry import load
from contrastile.backends.replay import Graphs

BEFORE = 3
"""Calls until one is replayed: the last of them is captured."""


class Repeating:
    """A graph whose replay computes again, from where it reads to where it writes."""

    def __init__(self) -> None:
        self.action: Callable[[], None] = lambda: None
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.action()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeating)

    def record(self: Graphs, captured: Any, action: Callable[[], Sequence[Any]]) -> None:
        captured.hold(action())
        there = captured._there

        def again() -> None:
            captured.hold(action())
            for place, x in zip(there, captured._there, strict=True):
                place.copy_(x)
            captured._there = there

        captured.graph.action = again

    monkeypatch.setattr(Graphs, "_record", record)
    return Graphs()


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


def test_a_call_that_has_come_before_is_replayed_with_what_it_is_given(graphs: Graphs) -> None:
    results = []
    for seed in range(BEFORE + 3):
        arrays = drawn(seed)
        found = graphs.call("what", arrays, compute)
        assert same(found, compute(arrays))
        results.append((found, compute(arrays)))
        assert len(graphs.captured) == (seed + 1 >= BEFORE)
    (captured,) = graphs.captured.values()
    assert captured.graph.replays == 3
    # later replays leave what earlier ones gave
    assert all(same(*each) for each in results)
    assert len({x.data_ptr() for found, _ in results for x in found if x is not None and x.ndim == 2}) == len(results)


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


def test_constants_are_read_where_they_lie(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.full((2,), 3.0)
    monkeypatch.setattr(eager, "_ids", {id(held)})
    for seed in range(BEFORE + 1):
        arrays = [*drawn(seed), held]
        assert same(graphs.call("what", arrays, compute), compute(arrays))
    (captured,) = graphs.captured.values()
    assert len(captured.places.into) == 2
    assert captured.constants[0] is held


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

    class Counted(Repeating):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Counted)
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


def test_a_graph_that_has_paid_for_itself_may_be_captured_again(graphs: Graphs) -> None:
    for what in [*range(replay.MOST + 1), 0]:
        for seed in range(BEFORE + replay.WORTH):
            arrays = drawn(seed)
            assert same(graphs.call(what, arrays, compute), compute(arrays))
    assert len(graphs.captured) == replay.MOST
    assert next(reversed(graphs.captured))[0] == 0
    assert None not in graphs.seen.values()


def test_what_cannot_be_captured_is_computed_and_not_tried_again(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def failing(self: Graphs, *_: Any) -> None:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Graphs, "_record", failing)
    for seed in range(2 * BEFORE):
        arrays = drawn(seed)
        assert same(graphs.call("what", arrays, compute), compute(arrays))
    assert len(tried) == 1
    assert not graphs.captured


def test_packed_vectors_begin_where_16_bytes_do() -> None:
    vectors = [torch.arange(float(k)) for k in (5, 4, 0, 1)]
    packed = replay._Packed(vectors)
    parts = packed.parts(packed.whole.clone())
    assert all(map(torch.equal, parts, vectors))
    assert all((x.data_ptr() - parts[0].data_ptr()) % 16 == 0 for x in parts)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_a_loss_and_its_gradients_are_replayed_whole(
    frozen: tuple[int, ...], graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "GRAPHS", graphs)

    def step(seed: int, small: bool) -> list[Any]:
        monkeypatch.setattr(bodies, "fits", lambda rows, columns: small)
        leaves = [*drawn(seed, 5, 5), torch.tensor(3.0 + seed)]
        for i, x in enumerate(leaves):
            x.requires_grad_(i not in frozen)
        loss = contrastile.clip_loss(*leaves, backend="torch")
        if loss.requires_grad:
            (-2.5 * loss).backward()
        return [loss.detach(), *(x.grad for x in leaves)]

    found = [(step(seed, True), step(seed, False)) for seed in range(BEFORE + 2)]
    assert all(same(*each) for each in found)
    assert len(graphs.captured) == 1 + (len(frozen) < 3)
    assert all(each.graph.replays == 2 for each in graphs.captured.values())


def test_other_options_are_another_graph(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRAPHS", graphs)
    monkeypatch.setattr(bodies, "fits", lambda rows, columns: True)
    given: list[dict[str, Any]] = [{}, {"tile": 2}, {"workspace": 3}, {"keep": 3}, {"precision": "split"}]
    image, text = drawn(0, 5, 5)[:2]
    backend = replace(load("torch"), precisions=frozenset(PRECISIONS))
    monkeypatch.setattr(plan, "load", lambda name: backend)
    for options in given:
        for _ in range(BEFORE):
            contrastile.clip_loss(image, text, 3.0, backend="torch", **options)
    assert len(graphs.captured) == len(given)


def test_a_backend_that_does_not_say_it_may_be_is_not_replayed(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody_s = replace(load("torch"), replayable=False)
    monkeypatch.setattr(bodies, "GRAPHS", graphs)
    monkeypatch.setattr(bodies, "fits", lambda rows, columns: True)
    monkeypatch.setattr(plan, "load", lambda name: somebody_s)
    for seed in range(2 * BEFORE):
        leaves = [x.requires_grad_() for x in (*drawn(seed, 5, 5), torch.tensor(3.0))]
        contrastile.clip_loss(*leaves, backend="torch").backward()
    assert not graphs.captured
    assert not graphs.seen


def test_a_problem_of_which_something_is_kept_is_not_replayed(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def keeping(arrays: Sequence[Any]) -> list[Any]:
        return [*compute(arrays), torch.ones(1)]

    for seed in range(2 * BEFORE):
        graphs.call("what", drawn(seed), keeping, lambda found: found[-1].numel() > 0)
    assert not graphs.captured
    assert list(graphs.seen.values()) == [None]


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("why", ["", "on the host", "large", "wide", "inference", "captured", "setting"])
def test_a_problem_is_replayed_where_it_is_small_and_eager(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "captured")
    if why == "setting":
        monkeypatch.setenv(replay.SETTING, "0")
    if why in ("large", "wide"):
        monkeypatch.setattr(replay, "WORK" if why == "large" else "FEATURES", 59 if why == "large" else 31)
    rows = torch.ones(5, 4)
    with torch.inference_mode(why == "inference"):
        assert replay.fits(rows if why == "on the host" else rows.as_subclass(OnGpu), 3) == (not why)
