"""The torch operators: opcheck, compilation, export and autocast.

Under autocast the loss casts features to autocast's dtype, as a matrix product does. Nothing else changes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import contrastile
from contrastile import autograd, nn, problems
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Options
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.plan import Plan
from contrastile.schedules import local

B, D = 23, 17
Loss = Callable[..., Tensor]


def features(rows: int = B, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(rows, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=1).to(dtype).requires_grad_()


def number(x: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(x, dtype=dtype, requires_grad=True)


def leaves(dtype: torch.dtype, rows: int = 11) -> list[Tensor]:
    return [*(features(rows, seed=seed, dtype=dtype) for seed in (0, 1)), number(14.25, dtype)]


def clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return contrastile.clip_loss(image, text, scale, ids=torch.arange(len(image)) // 2)


def info_nce(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    options = {"negatives": [key.flip(1)[:5], key[:3]], "positives": torch.arange(len(query)).flip(0)}
    return contrastile.info_nce(query, key, scale, **options)


def sup_con(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return contrastile.sup_con(torch.cat([a, b]), torch.arange(2 * len(a)) % 5, scale)


def sigmoid(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return contrastile.sigmoid_loss(image, text, scale, -3.0)


def statistics_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """A loss of the user's own; rows without a positive are masked."""
    ids = {"row_ids": torch.arange(len(image)) % 7, "column_ids": torch.arange(len(text)) % 5}
    statistics = contrastile.statistics(image, text, scale, ids_are="positives", **ids)
    return torch.stack([(torch.where(p.isfinite(), 2 * n - p, 0.0) + 3 * d).mean() for n, p, d in statistics]).sum()


LOSSES = [clip, info_nce, contrastile.nt_xent, sup_con, sigmoid, statistics_loss]


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def value_and_gradients(loss: Loss, *arguments: Any) -> list[Tensor]:
    """The loss, and its gradients with respect to both feature matrices and the scale."""
    value = loss(*arguments)
    return [value.detach(), *gradients(value, *arguments[:3])]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.15 itself warns
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["clip", "info_nce", "sigmoid"])
def test_opcheck(kind: str, backend: str) -> None:
    image, text, scale = features(6), features(6, seed=1), number(4.0)
    built = {
        "clip": lambda: problems.clip(image, text, scale, ids=torch.arange(6) // 2),
        "info_nce": lambda: problems.info_nce(image, text, scale, negatives=[features(3, seed=2)]),
        "sigmoid": lambda: problems.sigmoid(image, text, scale, number(-1.0)),
    }[kind]()
    problem = built.problem
    plan = Plan(problem, backend, Options(), library_of(image))
    features_and_scale, vectors = (image, list(problem.columns), scale), list(problem.vectors)
    settings = *autograd.operators.settings_of(plan), local.Wanted.every(problem).flags
    arguments = *features_and_scale, problem.bias, vectors, *settings
    torch.library.opcheck(autograd.operators.loss, arguments)
    value, state = autograd.operators.loss(*arguments)
    arguments = torch.ones_like(value), state, *features_and_scale, vectors, *settings
    torch.library.opcheck(autograd.operators.gradients, tuple(detached(x) for x in arguments))


def detached(x: object) -> object:
    if isinstance(x, list):
        return [detached(item) for item in x]
    return x.detach() if isinstance(x, Tensor) else x


def test_a_scale_that_is_a_number_and_varies_compiles_without_a_graph_break() -> None:
    image, text = features(), features(seed=1)

    def loss(scale: float) -> Tensor:
        return contrastile.sigmoid_loss(image, text, scale, -1.5, backend="torch", keep=0)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    # from the second value on, torch makes the number a symbol
    for scale in (3.0, 4.0, 5.5, 0.1):
        assert torch.equal(compiled(scale), loss(scale))


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    """Assert equal bits, and equal dtypes of the values; expected gradients are cast to the dtype of the features."""
    assert results[0].dtype == expected[0].dtype
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(results, expected, strict=True))


@pytest.mark.usefixtures("primitives")
@pytest.mark.parametrize("loss", [clip, sigmoid])
def test_one_graph_holds_the_cast_and_no_grad_gives_the_same_value(loss: Loss) -> None:
    *inputs, scale = leaves(torch.float32)

    def autocast_loss(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(*x)

    torch.compiler.reset()
    compiled_loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compiled_autocast_loss = torch.compile(autocast_loss, fullgraph=True, backend="aot_eager")
    expected = value_and_gradients(autocast_loss, *inputs, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outer_value = compiled_loss(*inputs, scale)
    for value in (compiled_autocast_loss(*inputs, scale), outer_value):
        assert_same([value, *gradients(value, *inputs, scale)], expected)
    # without autocast the same compiled function casts nothing
    assert torch.equal(compiled_loss(*inputs, scale), loss(*inputs, scale))
    with torch.no_grad():
        value_without_grad = autocast_loss(*inputs, scale)
    assert torch.equal(value_without_grad, expected[0])
    assert not value_without_grad.requires_grad


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class GraphRecorder:
    """A compiler's backend that runs each graph unchanged and records it."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.modules.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        calls = [node.target for graph in self.modules for node in graph.graph.nodes if node.op == "call_function"]
        return [str(call) for call in calls if getattr(call, "namespace", "") == "contrastile"]


@pytest.mark.usefixtures("primitives")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", [*LOSSES, nn.ClipLoss(), nn.SigLipLoss()])
def test_the_compiler_sees_one_operator_in_one_graph_with_the_bits_of_the_loss(loss: Loss, dynamic: bool) -> None:
    graphs = GraphRecorder()
    compiled = torch.compile(loss, backend=graphs, dynamic=dynamic, fullgraph=True)
    for rows in (11, 16) if dynamic else (11,):
        inputs = leaves(torch.float64, rows)
        values = [compiled(*inputs), loss(*inputs)]
        assert torch.equal(*values)
        assert all(map(torch.equal, *(gradients(value, *inputs) for value in values)))
    assert len(graphs.modules) == 1
    assert graphs.operators() == ["contrastile.loss.default"]
    # the other nodes make or read tensors: the graph does not query the state of torch
    assert "_C" not in graphs.modules[0].code


def test_a_module_that_is_imported_later_does_not_compile_anything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, inputs = GraphRecorder(), leaves(torch.float64)
    compiled = torch.compile(clip, backend=graphs)
    compiled(*inputs)
    monkeypatch.setitem(sys.modules, "imported_later", ModuleType("imported_later"))
    compiled(*inputs)
    assert len(graphs.modules) == 1


@pytest.mark.usefixtures("primitives")
def test_value_and_grad_and_a_group_stay_outside_of_graphs() -> None:
    graphs, inputs = GraphRecorder(), [x.detach() for x in leaves(torch.float64)]
    result = torch.compile(lambda *x: contrastile.value_and_grad(contrastile.clip_loss)(*x), backend=graphs)(*inputs)
    value, gradients = contrastile.value_and_grad(contrastile.clip_loss)(*inputs)
    assert torch.equal(result[0], value)
    assert all(torch.equal(a, b) for a, b in zip(result[1], gradients, strict=True))

    def program(comm: InProcess) -> Tensor:
        def loss(*x: Tensor) -> Tensor:
            return 2 * contrastile.clip_loss(*x, group=comm)

        return torch.compile(loss, backend=graphs)(*inputs)

    assert torch.equal(InProcessGroup[Tensor](1).run(program)[0], 2 * value)
    assert graphs.operators() == []


def test_an_exported_loss_takes_other_batches() -> None:
    class Exported(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, s: Tensor) -> Tensor:
            # len(x) would be a constant of this batch
            return contrastile.clip_loss(x, y, s, ids=torch.arange(x.shape[0]) // 2)

    rows, arguments = {0: torch.export.Dim("rows", min=2, max=256)}, tuple(leaves(torch.float64))
    exported = torch.export.export(Exported(), arguments, dynamic_shapes=(rows, rows, None), strict=False)
    inputs = leaves(torch.float64, 16)
    assert torch.equal(exported.module()(*inputs), clip(*inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
def test_compiled_autograd_finds_the_gradients() -> None:
    inputs = leaves(torch.float64)
    expected = torch.func.grad(contrastile.clip_loss, argnums=(0, 1, 2))(*(x.detach() for x in inputs))
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: x.backward(), backend="eager")(contrastile.clip_loss(*inputs))
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, expected, strict=True))


@pytest.mark.slow
def test_the_first_call_of_a_process_may_be_compiled_code_with_a_graph_break() -> None:
    code = """
import torch, contrastile
w = torch.nn.Linear(8, 8)
def step(x):
    loss = contrastile.clip_loss(w(x), x, 1.5)
    loss.backward()
    print("broken")
    return loss
print(torch.compile(step, backend="eager")(torch.randn(16, 8)).isfinite().item())
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["broken", "True"]
