"""Steps from graphs, with a graph that is made up: what is captured, what a replay is given and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import contrastile
from contrastile.autograd import arguments, steps
from contrastile.backends import settings
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules.placement import SCHEDULES

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


def drawn(seed: int, m: int, n: int) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(k, 4, generator=draw) for k in (m, n)]


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a is b is None or (a is not None and torch.equal(a, b)) for a, b in pairs)


def of_ids(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.clip_loss(i, t, s, ids=torch.arange(len(i)) % 2, weights=i.detach()[:, 0].abs(), **how)


def with_a_queue(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.info_nce(i, t, s.detach(), negatives=t.detach() ** 2, margin=0.1, **how)


def labelled(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.sup_con(i, torch.arange(len(i)) // 2, s, **how)


def additive(i: Any, t: Any, s: Any, **how: Any) -> Any:
    return contrastile.sigmoid_loss(i, t, s, s.detach() - 9, **how)


def of_statistics(i: Any, t: Any, s: Any, **how: Any) -> Any:
    found = contrastile.statistics(i, t, s, **how)
    return (found.rows.negatives - found.columns.positives[: len(i)] ** 2).sum()


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> steps.Steps:
    """Graphs whose replays compute again, for features on the host and ranks that are threads."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(steps, "record", recorded)
    monkeypatch.setattr(steps, "can_capture", lambda x: True)
    monkeypatch.setattr(InProcess, "captures", True)
    monkeypatch.setattr(steps, "STEPS", found := steps.Steps())
    # ranks of one process capture at once
    monkeypatch.setattr(found, "capturing", Mock(acquire=Mock(return_value=True)))
    return found


@pytest.mark.parametrize(("ranks", "exchange"), [(1, "ring"), *((2, how) for how in SCHEDULES)])
@pytest.mark.parametrize(
    "loss", [contrastile.clip_loss, of_ids, with_a_queue, contrastile.nt_xent, labelled, additive, of_statistics]
)
def test_a_step_over_ranks_from_graphs_has_the_bits_of_a_launched_one(
    request: pytest.FixtureRequest, loss: Callable[..., Any], ranks: int, exchange: str
) -> None:
    """Ranks of 4 and 3 samples; calls in turn, of which only the last is differentiated at once."""

    def program(comm: InProcess) -> list[Any]:
        results: list[Any] = []
        for seed in range(BEFORE + 2):
            given = [x.split((4, 3))[comm.rank].clone().requires_grad_() for x in drawn(seed, 7, 7)]
            scale = torch.tensor(2.0 + seed, requires_grad=True)
            value = loss(*given, scale, group=comm, exchange=exchange)
            results.append((value, [*given, scale]))
        for value, _ in reversed(results):
            (-1.5 * value).backward()
        return [x for value, given in results for x in (value.detach(), *(each.grad for each in given))]

    expected = InProcessGroup[list[Any]](ranks).run(program)
    graphs = request.getfixturevalue("eager_graphs")
    for ours, launched in zip(InProcessGroup[list[Any]](ranks).run(program), expected, strict=True):
        assert same(ours, launched)
    # a loss whose gradients come from the replay before is replayed once
    assert [x.replays for x in graphs.captured.values()] == [BEFORE + 2] * ranks


@pytest.mark.parametrize(
    "other", ["shape", "dtype", "margin", "frozen", "reduction", "stream", "tf32", *settings.VARIABLES]
)
def test_what_differs_is_another_step(other: str, eager_graphs: steps.Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(comm: InProcess, seed: int, differs: Sequence[str]) -> None:
        how: dict[str, Any] = {"margin": 0.1 if "margin" in differs else 0.2}
        how |= {"parameter_reduction": "sum"} if "reduction" in differs else {}
        image, text = (x[: 4 if "shape" in differs else 5] for x in drawn(seed, 5, 5))
        if "dtype" in differs:
            image, text = image.double(), text.double()
        leaves = [x.requires_grad_() for x in ((image,) if "frozen" in differs else (image, text))]
        value = contrastile.clip_loss(image, text, 2.0, group=comm, **how)
        with monkeypatch.context() as launched:
            launched.setattr(steps, "can_capture", lambda x: False)
            expected = contrastile.clip_loss(image, text, 2.0, group=comm, **how)
        found, wanted = ([x, *torch.autograd.grad(x, leaves)] for x in (value, expected))
        assert same(found, wanted)

    def program(comm: InProcess) -> None:
        for seed in range(BEFORE):
            call(comm, seed, ())
        assert len(eager_graphs.captured) == 1
        if other == "stream":
            monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 8)
        elif other == "tf32":
            monkeypatch.setattr(arguments, "product_rounding", lambda device: 2.0**-10)
        elif other in settings.VARIABLES:
            monkeypatch.setenv(other, "3")
        for seed in range(BEFORE):
            call(comm, seed, (other,))
        assert len(eager_graphs.captured) == 2

    InProcessGroup[None](1).run(program)


@pytest.mark.parametrize("others", ["never due", "cannot capture"])
def test_a_rank_replays_only_what_every_rank_replays(
    eager_graphs: steps.Steps, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    def capture(key: Any, *how: Any) -> Any:
        found = captured(key, *how)
        if others == "cannot capture" and key[1].rank == 1:
            eager_graphs.refuse(key)
            return None
        return found

    def may(x: Any) -> bool:
        return others != "never due" or len(x) == 4

    captured = eager_graphs.capture
    monkeypatch.setattr(eager_graphs, "capture", capture)
    monkeypatch.setattr(steps, "can_capture", may)

    def program(comm: InProcess) -> float:
        for seed in range(BEFORE + 2):
            given = [x.split((4, 3))[comm.rank].clone().requires_grad_() for x in drawn(seed, 7, 7)]
            value = contrastile.clip_loss(*given, 2.0, group=comm, exchange="gather")
            value.backward()
        return float(value.detach())

    values = InProcessGroup[float](2).run(program)
    assert values[0] == pytest.approx(float(contrastile.clip_loss(*drawn(BEFORE + 1, 7, 7), 2.0)))
    assert not eager_graphs.captured
