"""Small problems on a GPU: replayed steps have the bits of launched ones, whatever happens around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from capturing import captured, unit_features

import contrastile
from contrastile.autograd.steps import STEPS, Steps
from contrastile.backends import replay
from contrastile.backends.registry import available

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

BACKENDS = [name for name in ("triton", "cupy", "torch") if available()[name] is None]
M, D = 515, 88
TIMES = replay._BEFORE + 4


def leaves(seed: int, dtype: str = "bfloat16", towers: int = 2, m: int = M) -> list[Any]:
    """Unit features on the GPU, and a scale."""
    features = unit_features(towers, m, D, dtype, seed)
    return [x.requires_grad_() for x in (*features, torch.tensor(14.25 + seed, device="cuda"))]


def step(loss: Callable[..., Any], given: list[Any]) -> list[Any]:
    value = loss(*given)
    return [value.detach(), *torch.autograd.grad(-2.5 * value, given)]


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(map(torch.equal, found, expected))


def losses(backend: str) -> dict[str, tuple[Callable[..., Any], int]]:
    ids = torch.arange(M, device="cuda") // 2

    def with_ids(image: Any, text: Any, scale: Any) -> Any:
        return contrastile.clip_loss(image, text, scale, ids=ids, backend=backend)

    return {
        "clip": (lambda *given: contrastile.clip_loss(*given, backend=backend), 2),
        "ids": (with_ids, 2),
        "one direction": (lambda *given: contrastile.info_nce(*given, backend=backend), 2),
        "labels": (lambda x, scale: contrastile.sup_con(x, ids, scale, backend=backend), 1),
        "views": (lambda *given: contrastile.nt_xent(*given, backend=backend), 2),
        "sigmoid": (lambda *given: contrastile.sigmoid_loss(*given, -3.0, backend=backend), 2),
    }


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """None of other tests, and what is asked for is made."""
    monkeypatch.delenv(replay.SETTING, raising=False)
    for held in (STEPS.captured, STEPS.seen):
        held.clear()
    return STEPS


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", list(losses("torch")))
@pytest.mark.parametrize("backend", BACKENDS)
def test_replayed_steps_have_the_bits_of_launched_ones(
    backend: str, name: str, dtype: str, graphs: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, towers = losses(backend)[name]
    results = []
    for seed in range(TIMES):
        given = leaves(seed, dtype, towers)
        with monkeypatch.context() as patch:
            patch.setenv(replay.SETTING, "0")
            expected = step(loss, given)
        results.append((step(loss, given), expected))
    # what later replays left as it was
    assert all(same(*each) for each in results)
    assert len(graphs.captured) == 1
    assert None not in graphs.seen.values()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_has_graphs_of_its_own(backend: str, graphs: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = losses(backend)["clip"]
    side = torch.cuda.Stream()
    for seed in range(TIMES):
        given = leaves(seed)
        with monkeypatch.context() as patch:
            patch.setenv(replay.SETTING, "0")
            expected = step(loss, given)
        here = step(loss, given)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = step(loss, given)
        torch.cuda.current_stream().wait_stream(side)
        assert same(here, expected)
        assert same(there, expected)
    assert len(graphs.captured) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_captures_or_infers_is_left_alone(backend: str, graphs: Steps) -> None:
    loss, _ = losses(backend)["clip"]
    given = leaves(0)
    expected = step(loss, given)
    graph, found = captured(lambda: step(loss, given))
    graph.replay()
    assert same(found, expected)
    with torch.inference_mode():
        values = [loss(*given) for _ in range(TIMES)]
    assert all(torch.equal(x, expected[0]) for x in values)
    assert not graphs.captured


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_replayed_step_saved_is_checked_as_ever(backend: str, graphs: Steps) -> None:
    loss, _ = losses(backend)["clip"]
    given = leaves(0)
    for _ in range(TIMES):
        value = loss(*given)
    assert len(graphs.captured) == 1
    with pytest.raises(RuntimeError, match="must not be differentiated itself"):
        torch.autograd.grad(torch.autograd.grad(loss(*given), given[0], create_graph=True)[0].sum(), given[1])
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()
    changed = loss(*given)
    with torch.no_grad():
        given[0].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        changed.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_settings_and_numbers_are_another_step(backend: str, graphs: Steps) -> None:
    image, text, _ = leaves(0)
    kinds: list[tuple[float, dict[str, Any]]] = [(3.0, {}), (4.0, {}), (3.0, {"tile": 128}), (3.0, {"workspace": 3})]
    for _ in range(TIMES):
        values = [contrastile.clip_loss(image, text, scale, backend=backend, **more) for scale, more in kinds]
    assert len(graphs.captured) == len(kinds)
    assert not torch.equal(values[0], values[1])
