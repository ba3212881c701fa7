"""torch.compile over the losses: one operator, no graph break, and nothing of the front door's look-ups traced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_autograd import LOSSES, Loss, clip, features, gradients, number
from torch import Tensor

import contrastile
from contrastile.comm.inprocess import InProcess, InProcessGroup


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


def leaves(dtype: torch.dtype, rows: int = 11) -> list[Tensor]:
    matrices = (features(rows, seed=seed, dtype=dtype).detach().requires_grad_() for seed in (0, 1))
    return [*matrices, number(14.25, dtype)]


@pytest.mark.usefixtures("primitives")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_compiler_sees_one_operator_in_one_graph_whose_results_are_the_loss_s(loss: Loss, dynamic: bool) -> None:
    graphs = Graphs()
    compiled = torch.compile(lambda *x: loss(*x, "torch"), backend=graphs, dynamic=dynamic, fullgraph=True)
    for rows in (11, 16) if dynamic else (11,):
        inputs = leaves(torch.float64, rows)
        values = [compiled(*inputs), loss(*inputs, "torch")]
        assert torch.equal(*values)
        assert all(map(torch.equal, *(gradients(value, *inputs) for value in values)))
    assert len(graphs.found) == 1
    assert graphs.operators() == ["contrastile.loss.default"]
    # all else that is in the graph makes or reads tensors: nobody asks torch what is at work
    assert "_C" not in graphs.found[0].code


def test_a_module_that_is_imported_later_does_not_compile_anything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, inputs = Graphs(), leaves(torch.float64)
    compiled = torch.compile(lambda *x: clip(*x, "torch"), backend=graphs)
    compiled(*inputs)
    monkeypatch.setitem(sys.modules, "imported_later", ModuleType("imported_later"))
    compiled(*inputs)
    assert len(graphs.found) == 1


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
