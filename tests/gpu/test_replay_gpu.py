"""Replayed steps of small problems on a GPU: streams, captures, compilers and errors. verify compares the results."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from capturing import capture, unit_features, value_and_gradients

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


step = partial(value_and_gradients, upstream=-2.5)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Enable graphs, and drop the graphs of other tests."""
    monkeypatch.delenv(settings.GRAPHS, raising=False)
    for steps in (STEPS, OPERATIONS):
        steps.captured.clear()
        steps.seen.clear()
    return STEPS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_has_graphs_of_its_own(backend: str, graphs: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = partial(contrastile.clip_loss, backend=backend)
    side = torch.cuda.Stream()
    for seed in range(TIMES):
        arguments = leaves(seed)
        with monkeypatch.context() as patch:
            patch.setenv(settings.GRAPHS, "0")
            expected = step(loss, arguments)
        results = step(loss, arguments)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            side_results = step(loss, arguments)
        torch.cuda.current_stream().wait_stream(side)
        for tensors in (results, side_results):
            assert all(map(torch.equal, tensors, expected))
    assert len(graphs.captured) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_caller_s_capture_and_inference_mode_use_no_graphs_of_the_package(backend: str, graphs: Steps) -> None:
    loss = partial(contrastile.clip_loss, backend=backend)
    arguments = leaves(0)
    expected = step(loss, arguments)
    graph, outputs = capture(lambda: step(loss, arguments))
    graph.replay()
    assert all(map(torch.equal, outputs, expected))
    with torch.inference_mode():
        values = [loss(*arguments) for _ in range(TIMES)]
    assert all(torch.equal(x, expected[0]) for x in values)
    assert not graphs.captured


@pytest.mark.filterwarnings("ignore")  # torch's compiler imports what torch has deprecated
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls_use_two_graphs_or_the_graphs_of_the_compiler(
    backend: str, mode: str, graphs: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    loss = partial(contrastile.clip_loss, backend=backend)
    compiled = torch.compile(lambda *tensors: loss(*tensors), fullgraph=True, dynamic=False, mode=mode)
    batches = [leaves(seed) for seed in range(TIMES)]
    with monkeypatch.context() as patch:
        patch.setenv(settings.GRAPHS, "0")
        expected = [step(loss, batch) for batch in batches]
    for batch, expected_tensors in zip(batches, expected, strict=True):
        torch.compiler.cudagraph_mark_step_begin()
        assert all(map(torch.equal, step(compiled, batch), expected_tensors))
    assert not graphs.captured
    assert len(OPERATIONS.captured) == (2 if mode == "default" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replayed_step_checks_its_saved_tensors(backend: str, graphs: Steps) -> None:
    loss = partial(contrastile.clip_loss, backend=backend)
    inputs = leaves(0)
    for _ in range(TIMES):
        value = loss(*inputs)
    assert len(graphs.captured) == 1
    with pytest.raises(RuntimeError, match="must not be differentiated itself"):
        torch.autograd.grad(torch.autograd.grad(loss(*inputs), inputs[0], create_graph=True)[0].sum(), inputs[1])
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()
    changed = loss(*inputs)
    with torch.no_grad():
        inputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        changed.backward()
