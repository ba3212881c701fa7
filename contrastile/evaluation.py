"""Evaluating a loss: make its plan, and compute that, under autograd for torch tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from contrastile import compute, problems, validation
from contrastile.backends.choice import choose, settled
from contrastile.backends.contract import Array, Options
from contrastile.backends.eager import outside_of_graphs
from contrastile.backends.registry import checked
from contrastile.plan import DEFAULTS, Given, Plan, Settings, complete
from contrastile.schedules import local
from contrastile.schedules.handshake import Handshake

Builder = Callable[..., problems.LossProblem]
"""Makes a problem of a loss's own arguments and ``world=``: see ``problems.BUILDERS``."""


def evaluate(build: Builder, settings: Given, *args: Any, **kwargs: Any) -> Array:
    """The value, 0-d, of the loss that ``build(*args, **kwargs)`` makes; for torch tensors differentiable.

    Raises:
        BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see ``contrastile.clip_loss``.
    """
    # a compiled graph can hold neither messages between ranks nor copies of blocks to a device
    get = settings.get
    if settings and not get("group") is get("device") is get("block") is None:
        return outside_of_graphs(_evaluate)(build, settings, args, kwargs)
    # a compiler must trace the same branch each time: nothing here may depend on what has been imported
    if hasattr(args[0], "requires_grad"):
        from contrastile.autograd.prepared import CALLS

        loss = CALLS.loss(build, settings, args, kwargs, make, _evaluate)
        if loss is not None:
            return loss
    return _evaluate(build, settings, args, kwargs)


def _evaluate(build: Builder, settings: Given, args: Any, kwargs: Any) -> Array:
    plan, _ = make(build, settings, args, kwargs)
    if plan.library.name == "torch":
        from contrastile import autograd

        return autograd.evaluate(plan)
    value, *_ = compute.loss(plan)
    return value


def make(build: Builder, settings: Given, args: Any, kwargs: Any) -> tuple[Plan, problems.LossProblem]:
    """The plan of a loss, and the loss, which knows how its gradients become those of the arguments.

    Raises:
        TypeError, ValueError: an argument is wrong; in a group, on every rank.
        BackendUnavailableError: the group is torch.distributed's, and there is no torch.
    """
    given: dict[str, Any] = {**DEFAULTS, **settings}
    group, agreed = given["group"], {}
    if group is not None:
        # what must be the same on every rank, as text: the ranks compare it before they check anything
        agreed = {"backend": str(given["backend"]), "tile": str(given["tile"]), "precision": str(given["precision"])}
    here = Handshake.of(group, given["exchange"], given["parameter_reduction"], **agreed)

    def checked_and_built(world: Handshake) -> tuple[tuple[str, Options, Any], problems.LossProblem]:
        return settings_checked(complete(settings)), build(*args, **kwargs, world=world)

    # together, so that what either raises on one rank is raised on all
    (backend, options, blocks), loss = here.build(checked_and_built)
    problem, library = loss.problem, loss.library
    blocking = validation.blocking(blocks, library, problem.rows, problem.columns)
    if blocking is not None:
        problem = replace(problem, blocking=blocking)
    dtype = library.dtype(problem.rows)
    if backend == "auto":
        place = library.place(problem.rows) if blocking is None else str(blocking.device)
        backend = choose(library.name, place, dtype, options.precision, guide=problem.row_guide is not None)
    return Plan(problem, backend, settled(options, backend, dtype), library), loss


def settings_checked(given: dict[str, Any]) -> tuple[str, Options, Any]:
    """The backend's name, which may be "auto", the options, and what ``validation.blocks`` makes of device and block.

    Raises:
        TypeError, ValueError: one of them is wrong.
    """
    blocks = validation.blocks(given["device"], given["block"], given["group"])
    backend = checked(given["backend"])
    return backend, validation.options(given["tile"], given["precision"], given["workspace"], given["keep"]), blocks


def value_and_grad(
    loss: Callable[..., Array], **settings: Unpack[Settings]
) -> Callable[..., tuple[Array, tuple[Array, ...]]]:
    """A function that returns a loss and its gradients, without autograd, for arrays of any known library.

    Args:
        loss: one of this package's losses, e.g. ``contrastile.clip_loss``.
        **settings: see ``contrastile.plan.Settings``; the gradients are those that autograd would give.

    Returns:
        A function of the loss's own arguments that returns ``(value, gradients)``: one gradient for each positional
        feature argument, then for the scale (and the bias), 0-d, in the arguments' order. Labels have none.

    Raises:
        ValueError: ``loss`` is not one of this package's losses.
        TypeError: the function is called with other arguments than the loss's own.
    """
    name = getattr(loss, "__name__", "")
    if name not in problems.BUILDERS or getattr(loss, "__module__", "") != "contrastile.losses":
        raise ValueError(
            f"loss must be one of contrastile.{', contrastile.'.join(problems.BUILDERS)}, got {loss!r}; "
            "pass the function itself"
        )
    given = complete(settings)
    if given["group"] is None:
        settings_checked(given)
    # the same in every call: a signature has it
    build = _BUILDERS[name]

    def both(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, ...]]:
        # no operator: a compiler would trace the backend itself
        return outside_of_graphs(computed)(build, given, args, kwargs)

    return both


def computed(build: Builder, settings: Given, args: Any, kwargs: Any) -> tuple[Array, tuple[Array, ...]]:
    """The loss's value and its gradients: see ``value_and_grad``."""
    args, kwargs = [detached(x) for x in args], {name: detached(x) for name, x in kwargs.items()}
    alone = settings.get("group") is None and kwargs.keys().isdisjoint(("scale", "bias"))
    if alone and args and getattr(args[0], "is_cuda", False):
        from contrastile import autograd

        both = autograd.value_and_gradients(partial(evaluate, build, settings, **kwargs), args)
        if both is not None:
            return both
    plan, stated = make(build, settings, args, kwargs)
    wanted = local.Wanted.every(plan.problem)
    value, *state = compute.loss(plan, wanted)
    found = compute.gradients(plan, state, None, wanted)
    return value, stated.pull_back(local.Gradients.of(found))


def _bound(name: str, *args: Any, **kwargs: Any) -> problems.LossProblem:
    """The problem of a loss, whose own arguments these must be."""
    build = problems.BUILDERS[name]
    try:
        given = inspect.signature(build).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"value_and_grad({name})(...) must be given the arguments of {name} that say what to compute, got "
            f"others ({error}); give backend, tile, precision, group and the like to value_and_grad itself"
        ) from None
    return build(*given.args, **given.kwargs)


_BUILDERS = {name: partial(_bound, name) for name in problems.BUILDERS}


def detached(x: Any) -> Any:
    """X without its gradient, or those in a sequence; what is no tensor as it is."""
    if isinstance(x, list | tuple):
        return [detached(each) for each in x]
    return x.detach() if hasattr(x, "detach") else x
