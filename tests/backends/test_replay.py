"""Steps that replay graphs, with a stand-in for CUDA graphs: which steps are captured, and the replays' bits."""

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
"""The number of calls before the first replay; the last of them is captured."""


class RepeatingGraph:
    """A graph whose replay computes the step again, from the captured inputs into the captured outputs."""

    def __init__(self) -> None:
        self.action: Callable[[], None] = lambda: None
        self.replays = 0

    def pool(self) -> int:
        return 5

    def replay(self) -> None:
        self.replays += 1
        self.action()


def record(device: Any, actions: Sequence[Callable[[], Sequence[Any]]], pool: Any) -> tuple[list[Any], list[Any]]:
    graphs, results, is_grad_enabled = [], [], torch.is_grad_enabled()
    for action in actions:
        graph = RepeatingGraph()
        outputs = action()

        def repeat(action: Any = action, outputs: Any = outputs) -> None:
            with torch.set_grad_enabled(is_grad_enabled):
                results = action()
            for output, result in zip(outputs, results, strict=True):
                if output is not None:
                    output.copy_(result)

        graph.action = repeat
        graphs.append(graph)
        results.append(outputs)
    return graphs, results


def features(seed: int, m: int, n: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=generator) for size in (m, n)]


def have_same_bits(tensors: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = zip(tensors, expected, strict=True)
    return all(a is b is None or (a is not None and torch.equal(a, b)) for a, b in pairs)


def clip_ids(i: Any, t: Any, s: Any, **options: Any) -> Any:
    return contrastile.clip_loss(i, t, s, ids=torch.arange(len(i)) % 2, weights=i.detach()[:, 0].abs(), **options)


def info_nce_queue(i: Any, t: Any, s: Any, **options: Any) -> Any:
    return contrastile.info_nce(i, t, s.detach(), negatives=t.detach() ** 2, margin=0.1, **options)


def sup_con(i: Any, t: Any, s: Any, **options: Any) -> Any:
    return contrastile.sup_con(i, torch.arange(len(i)) // 2, s, **options)


def sigmoid(i: Any, t: Any, s: Any, **options: Any) -> Any:
    return contrastile.sigmoid_loss(i, t, s, s.detach() - 9, **options)


def statistics_loss(i: Any, t: Any, s: Any, **options: Any) -> Any:
    statistics = contrastile.statistics(i, t, s, **options)
    return (statistics.rows.negatives - statistics.columns.positives[: len(i)] ** 2).sum()


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> steps.Steps:
    """Repeating graphs instead of CUDA graphs, for features on the host and ranks that are threads."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(steps, "record", record)
    monkeypatch.setattr(steps, "can_capture", lambda x: True)
    monkeypatch.setattr(InProcess, "captures", True)
    monkeypatch.setattr(steps, "STEPS", captured_steps := steps.Steps())
    # ranks of one process capture at the same time
    monkeypatch.setattr(captured_steps, "capturing", Mock(acquire=Mock(return_value=True)))
    return captured_steps


@pytest.mark.parametrize(("ranks", "exchange"), [(1, "ring"), *((2, name) for name in SCHEDULES)])
@pytest.mark.parametrize(
    "loss", [contrastile.clip_loss, clip_ids, info_nce_queue, contrastile.nt_xent, sup_con, sigmoid, statistics_loss]
)
def test_a_step_over_ranks_from_graphs_has_the_bits_of_a_launched_one(
    request: pytest.FixtureRequest, loss: Callable[..., Any], ranks: int, exchange: str
) -> None:
    """Ranks have 4 and 3 samples. All forward passes run first, then the backward passes in reverse order."""

    def program(comm: InProcess) -> list[Any]:
        results: list[Any] = []
        for seed in range(BEFORE + 2):
            shards = [x.split((4, 3))[comm.rank].clone().requires_grad_() for x in features(seed, 7, 7)]
            scale = torch.tensor(2.0 + seed, requires_grad=True)
            value = loss(*shards, scale, group=comm, exchange=exchange)
            results.append((value, [*shards, scale]))
        for value, _ in reversed(results):
            (-1.5 * value).backward()
        return [x for value, leaves in results for x in (value.detach(), *(leaf.grad for leaf in leaves))]

    expected = InProcessGroup[list[Any]](ranks).run(program)
    graphs = request.getfixturevalue("eager_graphs")
    for replayed, launched in zip(InProcessGroup[list[Any]](ranks).run(program), expected, strict=True):
        assert have_same_bits(replayed, launched)
    # three calls replay; the backward passes replay again for all but the last call, whose gradients are still there
    assert [x._forward.replays for x in graphs.captured.values()] == [BEFORE + 2] * ranks


@pytest.mark.parametrize(
    "change", ["shape", "dtype", "margin", "frozen", "reduction", "stream", "tf32", *settings.VARIABLES]
)
def test_changed_calls_are_other_steps(change: str, eager_graphs: steps.Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(comm: InProcess, seed: int, changes: Sequence[str]) -> None:
        options: dict[str, Any] = {"margin": 0.1 if "margin" in changes else 0.2}
        options |= {"parameter_reduction": "sum"} if "reduction" in changes else {}
        image, text = (x[: 4 if "shape" in changes else 5] for x in features(seed, 5, 5))
        if "dtype" in changes:
            image, text = image.double(), text.double()
        leaves = [x.requires_grad_() for x in ((image,) if "frozen" in changes else (image, text))]
        value = contrastile.clip_loss(image, text, 2.0, group=comm, **options)
        with monkeypatch.context() as launched:
            launched.setattr(steps, "can_capture", lambda x: False)
            expected = contrastile.clip_loss(image, text, 2.0, group=comm, **options)
        results, expected_results = ([x, *torch.autograd.grad(x, leaves)] for x in (value, expected))
        assert have_same_bits(results, expected_results)

    def program(comm: InProcess) -> None:
        for seed in range(BEFORE):
            call(comm, seed, ())
        assert len(eager_graphs.captured) == 1
        if change == "stream":
            monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 8)
        elif change == "tf32":
            monkeypatch.setattr(arguments, "product_rounding", lambda device: 2.0**-10)
        elif change in settings.VARIABLES:
            monkeypatch.setenv(change, "3")
        for seed in range(BEFORE):
            call(comm, seed, (change,))
        assert len(eager_graphs.captured) == 2

    InProcessGroup[None](1).run(program)


@pytest.mark.parametrize("others", ["never due", "cannot capture"])
def test_a_rank_replays_only_what_every_rank_replays(
    eager_graphs: steps.Steps, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    def capture(key: Any, *options: Any) -> Any:
        step = capture_step(key, *options)
        if others == "cannot capture" and key[1].rank == 1:
            eager_graphs.refuse(key)
            return None
        return step

    def can_capture(x: Any) -> bool:
        return others != "never due" or len(x) == 4

    capture_step = eager_graphs.capture
    monkeypatch.setattr(eager_graphs, "capture", capture)
    monkeypatch.setattr(steps, "can_capture", can_capture)

    def program(comm: InProcess) -> float:
        for seed in range(BEFORE + 2):
            shards = [x.split((4, 3))[comm.rank].clone().requires_grad_() for x in features(seed, 7, 7)]
            value = contrastile.clip_loss(*shards, 2.0, group=comm, exchange="gather")
            value.backward()
        return float(value.detach())

    values = InProcessGroup[float](2).run(program)
    assert values[0] == pytest.approx(float(contrastile.clip_loss(*features(BEFORE + 1, 7, 7), 2.0)))
    assert not eager_graphs.captured
