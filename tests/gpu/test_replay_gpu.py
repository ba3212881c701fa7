"""Small problems on a GPU: what happens around replayed steps, whose results ``contrastile verify`` holds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from capturing import captured, stepped, unit_features

import contrastile
from contrastile.autograd.operators import OPERATIONS
from contrastile.autograd.steps import STEPS, Steps
from contrastile.backends import replay, settings
from contrastile.backends.registry import available

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

BACKENDS = [name for name in ("triton", "cupy", "torch") if available()[name] is None]
M, D = 515, 88
TIMES = replay._CALLS_BEFORE_CAPTURE + 4


def leaves(seed: int) -> list[Any]:
    """Unit features on the GPU, and a scale."""
    features = unit_features(2, M, D, "bfloat16", seed)
    return [x.requires_grad_() for x in (*features, torch.tensor(14.25 + seed, device="cuda"))]


step = partial(stepped, upstream=-2.5)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """None of other tests, and what is asked for is made."""
    monkeypatch.delenv(settings.GRAPHS, raising=False)
    for held in (STEPS, OPERATIONS):
        held.captured.clear()
        held.seen.clear()
    return STEPS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_has_graphs_of_its_own(backend: str, graphs: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = partial(contrastile.clip_loss, backend=backend)
    side = torch.cuda.Stream()
    for seed in range(TIMES):
        given = leaves(seed)
        with monkeypatch.context() as patch:
            patch.setenv(settings.GRAPHS, "0")
            expected = step(loss, given)
        here = step(loss, given)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = step(loss, given)
        torch.cuda.current_stream().wait_stream(side)
        for found in (here, there):
            assert all(map(torch.equal, found, expected))
    assert len(graphs.captured) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_captures_or_infers_is_left_alone(backend: str, graphs: Steps) -> None:
    loss = partial(contrastile.clip_loss, backend=backend)
    given = leaves(0)
    expected = step(loss, given)
    graph, found = captured(lambda: step(loss, given))
    graph.replay()
    assert all(map(torch.equal, found, expected))
    with torch.inference_mode():
        values = [loss(*given) for _ in range(TIMES)]
    assert all(torch.equal(x, expected[0]) for x in values)
    assert not graphs.captured


@pytest.mark.filterwarnings("ignore")  # torch's compiler imports what torch has deprecated
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls_are_two_graphs_or_parts_of_the_compilers(
    backend: str, mode: str, graphs: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    loss = partial(contrastile.clip_loss, backend=backend)
    compiled = torch.compile(lambda *given: loss(*given), fullgraph=True, dynamic=False, mode=mode)
    given = [leaves(seed) for seed in range(TIMES)]
    with monkeypatch.context() as patch:
        patch.setenv(settings.GRAPHS, "0")
        expected = [step(loss, each) for each in given]
    for each, values in zip(given, expected, strict=True):
        torch.compiler.cudagraph_mark_step_begin()
        assert all(map(torch.equal, step(compiled, each), values))
    assert not graphs.captured
    assert len(OPERATIONS.captured) == (2 if mode == "default" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_replayed_step_saved_is_checked_as_ever(backend: str, graphs: Steps) -> None:
    loss = partial(contrastile.clip_loss, backend=backend)
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
