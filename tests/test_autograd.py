"""The torch operators: opcheck, compilation, autocast, and defaults of torch's that are not those of the features.

In autocast the loss takes features as a matrix product would, in autocast's dtype; all else is as without it.
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
    more = {"negatives": [key.flip(1)[:5], key[:3]], "positives": torch.arange(len(query)).flip(0)}
    return contrastile.info_nce(query, key, scale, **more)


def sup_con(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return contrastile.sup_con(torch.cat([a, b]), torch.arange(2 * len(a)) % 5, scale)


def sigmoid(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return contrastile.sigmoid_loss(image, text, scale, -3.0)


def of_statistics(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """A loss that nobody has, masked where a row has no positive."""
    ids = {"row_ids": torch.arange(len(image)) % 7, "column_ids": torch.arange(len(text)) % 5}
    found = contrastile.statistics(image, text, scale, ids_are="positives", **ids)
    return torch.stack([(torch.where(p.isfinite(), 2 * n - p, 0.0) + 3 * d).mean() for n, p, d in found]).sum()


LOSSES = [clip, info_nce, contrastile.nt_xent, sup_con, sigmoid, of_statistics]


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def stepped(loss: Loss, *given: Any) -> list[Tensor]:
    """The value, and the gradients of the towers and the scale."""
    value = loss(*given)
    return [value.detach(), *gradients(value, *given[:3])]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch 2.15 itself
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
        return [detached(each) for each in x]
    return x.detach() if isinstance(x, Tensor) else x


def test_a_scale_that_is_a_number_and_varies_compiles_without_a_graph_break() -> None:
    image, text = features(), features(seed=1)

    def loss(scale: float) -> Tensor:
        return contrastile.sigmoid_loss(image, text, scale, -1.5, backend="torch", keep=0)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    # from the second value on, torch takes the number for a symbol
    for scale in (3.0, 4.0, 5.5, 0.1):
        assert torch.equal(compiled(scale), loss(scale))


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    """The value bit by bit, in its dtype; gradients are the expected ones in the features' own dtype."""
    assert found[0].dtype == expected[0].dtype
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("primitives")
@pytest.mark.parametrize("loss", [clip, sigmoid])
def test_one_graph_holds_the_cast_and_no_grad_gives_the_same_value(loss: Loss) -> None:
    *inputs, scale = leaves(torch.float32)

    def inside(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(*x)

    torch.compiler.reset()
    around = torch.compile(loss, fullgraph=True, backend="aot_eager")
    within = torch.compile(inside, fullgraph=True, backend="aot_eager")
    expected = stepped(inside, *inputs, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outer = around(*inputs, scale)
    for value in (within(*inputs, scale), outer):
        same([value, *gradients(value, *inputs, scale)], expected)
    # the same compiled function, asked without autocast, casts nothing
    assert torch.equal(around(*inputs, scale), loss(*inputs, scale))
    with torch.no_grad():
        silent = inside(*inputs, scale)
    assert torch.equal(silent, expected[0])
    assert not silent.requires_grad


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A compiler's backend that runs each graph as it is, and keeps it."""

    def __init__(self) -> None:
        self.found: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.found.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        calls = [node.target for graph in self.found for node in graph.graph.nodes if node.op == "call_function"]
        return [str(call) for call in calls if getattr(call, "namespace", "") == "contrastile"]


@pytest.mark.usefixtures("primitives")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", [*LOSSES, nn.ClipLoss(), nn.SigLipLoss()])
def test_the_compiler_sees_one_operator_in_one_graph_whose_results_are_the_loss_s(loss: Loss, dynamic: bool) -> None:
    graphs = Graphs()
    compiled = torch.compile(loss, backend=graphs, dynamic=dynamic, fullgraph=True)
    for rows in (11, 16) if dynamic else (11,):
        inputs = leaves(torch.float64, rows)
        values = [compiled(*inputs), loss(*inputs)]
        assert torch.equal(*values)
        assert all(map(torch.equal, *(gradients(value, *inputs) for value in values)))
    assert len(graphs.found) == 1
    assert graphs.operators() == ["contrastile.loss.default"]
    # all else that is in the graph makes or reads tensors: nobody asks torch what is at work
    assert "_C" not in graphs.found[0].code


def test_a_module_that_is_imported_later_does_not_compile_anything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, inputs = Graphs(), leaves(torch.float64)
    compiled = torch.compile(clip, backend=graphs)
    compiled(*inputs)
    monkeypatch.setitem(sys.modules, "imported_later", ModuleType("imported_later"))
    compiled(*inputs)
    assert len(graphs.found) == 1


@pytest.mark.usefixtures("primitives")
def test_value_and_grad_and_a_group_stay_outside_of_graphs() -> None:
    graphs, inputs = Graphs(), [x.detach() for x in leaves(torch.float64)]
    found = torch.compile(lambda *x: contrastile.value_and_grad(contrastile.clip_loss)(*x), backend=graphs)(*inputs)
    value, expected = contrastile.value_and_grad(contrastile.clip_loss)(*inputs)
    assert torch.equal(found[0], value)
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected, strict=True))

    def rank(comm: InProcess) -> Tensor:
        def loss(*x: Tensor) -> Tensor:
            return 2 * contrastile.clip_loss(*x, group=comm)

        return torch.compile(loss, backend=graphs)(*inputs)

    assert torch.equal(InProcessGroup[Tensor](1).run(rank)[0], 2 * value)
    assert graphs.operators() == []


def test_an_exported_loss_takes_other_batches() -> None:
    class Exported(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, s: Tensor) -> Tensor:
            # a length would be a number of this batch
            return contrastile.clip_loss(x, y, s, ids=torch.arange(x.shape[0]) // 2)

    rows, given = {0: torch.export.Dim("rows", min=2, max=256)}, tuple(leaves(torch.float64))
    exported = torch.export.export(Exported(), given, dynamic_shapes=(rows, rows, None), strict=False)
    inputs = leaves(torch.float64, 16)
    assert torch.equal(exported.module()(*inputs), clip(*inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["broken", "True"]
