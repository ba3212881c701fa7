# pyright: reportIncompatibleMethodOverride=false
"""The arguments of all ranks, differentiable: see ``contrastile.schedules.replicate``.

Of the whole loss's gradients each rank keeps those of its own rows, times ``Placement.factor``. The factor enters above
the loss, where nothing is rounded yet, and leaves the gradients of scale and bias again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile.schedules import replicate, scalars
from contrastile.schedules.placement import Placement


class Collected(torch.autograd.Function):
    """Every rank's rows of some tensors, and numbers that every rank holds."""

    @staticmethod
    def forward(
        ctx: Any, placement: Placement, counts: Sequence[Sequence[int]], names: Sequence[str], *tensors: Tensor
    ) -> Any:
        """The tensors of all ranks, as many as there are counts, then the numbers of these names."""
        own, numbers = tensors[: len(counts)], dict(zip(names, tensors[len(counts) :], strict=True))
        unread = [name for name, x in numbers.items() if placement.unread and x.device.type not in scalars.READABLE]
        wholes, compared = replicate.collect(
            placement, [x.detach() for x in own], counts, {name: numbers[name].detach() for name in unread}
        )
        found = *wholes, *(compared.get(name, x.view_as(x)) for name, x in numbers.items())
        ctx.size = placement.size
        ctx.places = [slice(sum(c[: placement.rank]), sum(c[: placement.rank + 1])) for c in counts]
        # a frozen tower costs no gradient of all ranks' rows
        wanted = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(x for x, want in zip(found, wanted, strict=True) if not want))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        """This rank's rows, and the numbers' gradients, which every rank holds whole."""
        count = len(ctx.places)
        rows = [None if g is None else g[where] for g, where in zip(upstream, ctx.places, strict=False)]
        return None, None, None, *rows, *(None if g is None else g / ctx.size for g in upstream[count:])


class Amplified(torch.autograd.Function):
    """A loss whose gradients are multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        """The loss, which the caller may change in place: a view could not be."""
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """What arrives, times the factor."""
        return upstream[0] * ctx.factor, None


def collected(placement: Placement, args: Sequence[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A loss's arguments of all ranks: two per-sample ones, then numbers; those given by name are per-sample too.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    # one block of columns has no negatives but an empty sequence
    names = [name for name, x in named.items() if isinstance(x, Tensor)]
    own = [*args[:2], *(named[name] for name in names)]
    counts = replicate.sizes(placement, 2, names)
    numbers = {name: x for name, x in zip(scalars.NAMES, args[2:], strict=False) if isinstance(x, Tensor)}
    function: Any = Collected
    wholes = iter(function.apply(placement, counts, [*numbers], *own, *numbers.values()))
    given = [next(wholes) for _ in args[:2]]
    vectors = {name: next(wholes) for name in names}
    return [*given, *(next(wholes) if isinstance(x, Tensor) else x for x in args[2:])], {**named, **vectors}


def amplified(placement: Placement, loss: Tensor) -> Tensor:
    """The loss, whose features' gradients are those that the trainer's reduction makes right."""
    function: Any = Amplified
    found: Tensor = loss if placement.factor == 1 else function.apply(loss, placement.factor)
    return found
