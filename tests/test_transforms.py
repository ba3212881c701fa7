"""torch.func over the losses: forward mode, and a transform within a graph, raise an error that names the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_autograd import Loss, clip, features, number, sigmoid
from torch import Tensor
from torch.autograd import forward_ad

import contrastile


def first_argument(loss: Loss) -> Callable[[Tensor], Tensor]:
    other, scale = features(7, seed=1).detach(), number(14.3).detach()
    return lambda x: loss(x, other, scale)


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))


# older versions replace the message of any error that leaves a ``with`` in a whole graph
UNTRACED = "|^(missing: WITH_EXCEPT_START|Observed exception)" if torch.__version__ < (2, 9) else ""


class Marked(Tensor):
    """A subclass of Tensor, which the losses pass to the operators."""


FORWARD: dict[str, Callable[[Any, Tensor], Any]] = {
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](x),
    "a dual tensor of a subclass": lambda f, x: dual(f, x.as_subclass(Marked)),
    "jvp of a compiled loss": lambda f, x: torch.func.jvp(torch.compile(f, backend="eager"), (x,), (x,)),
    # at a graph break torch would leave the level and drop the tangent
    "a dual tensor in a compiled function": lambda f, x: torch.compile(
        lambda y: dual(f, y), backend="eager", fullgraph=True
    )(x),
    "jvp around grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo's own warnings about code that it does not trace
@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize("loss", [clip, contrastile.nt_xent, sigmoid])
def test_forward_mode_is_refused_and_never_a_silent_zero(loss: Loss, mode: str) -> None:
    torch.compiler.reset()
    message = "contrastile::(loss must be differentiated in reverse|gradients must)"
    with pytest.raises(RuntimeError, match=f"{message}{UNTRACED}"):
        FORWARD[mode](first_argument(loss), features(7).detach())


@pytest.mark.parametrize("loss", [clip, sigmoid])
def test_a_transform_inside_one_graph_is_refused_by_name(loss: Loss) -> None:
    torch.compiler.reset()
    f, x = first_argument(loss), features(7).detach()
    message = "contrastile::loss must be called outside of torch.compile"
    with pytest.raises(Exception, match=f"{message}{UNTRACED}"):
        torch.compile(torch.func.grad(f), backend="eager", fullgraph=True)(x)
