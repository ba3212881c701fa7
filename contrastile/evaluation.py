"""Evaluate a loss: make its plan, then compute it, under autograd for torch tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from contrastile import compute, problems, teachers, validation
from contrastile.backends.arrays import ArrayLibrary, library_of
from contrastile.backends.choice import choose, settled
from contrastile.backends.contract import Array, Options
from contrastile.backends.eager import outside_of_graphs
from contrastile.backends.registry import checked
from contrastile.plan import DEFAULTS, AnySettings, Plan, Settings, complete
from contrastile.schedules import local
from contrastile.schedules.handshake import Handshake

Builder = Callable[..., problems.LossProblem]
"""A function of a loss's own arguments and ``world=`` that builds its problem: see ``problems.BUILDERS``."""


def evaluate(build: Builder, settings: AnySettings, *args: Any, **kwargs: Any) -> Array:
    """The value, 0-d, of the loss that ``build(*args, **kwargs)`` builds; differentiable for torch tensors.

    Raises:
        BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see ``contrastile.clip_loss``.
    """
    # compiled graphs hold neither messages between ranks nor copies of blocks to a device
    get = settings.get
    if settings and not get("group") is get("device") is get("block") is None:
        return outside_of_graphs(_evaluate)(build, settings, args, kwargs)
    # a compiler must trace the same branch each time: no condition here may depend on imported modules
    if hasattr(args[0], "requires_grad"):
        from contrastile.autograd.prepared import CALLS

        loss = CALLS.loss(build, settings, args, kwargs, make, _evaluate)
        if loss is not None:
            return loss
    return _evaluate(build, settings, args, kwargs)


def evaluate_taught(
    name: str, settings: AnySettings, *args: Any, teacher: Any, teacher_share: float, **kwargs: Any
) -> Array:
    """The value of the loss ``name``, plus the part of each teacher: see ``contrastile.clip_loss``."""
    parts = teachers.parts(teacher, teacher_share)
    loss = evaluate(_with_teachers(problems.BUILDERS[name], settings, parts), settings, *args, **kwargs)
    for part in parts:
        loss = _added(loss, evaluate(teachers.BUILDERS[name], settings, *args, **kwargs, **part))
    return loss


def _with_teachers(build: Builder, settings: AnySettings, parts: Sequence[Any]) -> Builder:
    return partial(teachers.agreed, build, len(parts)) if parts and settings.get("group") is not None else build


def _added(x: Array, y: Array) -> Array:
    return _array(x + y, x, library_of(x))


def _array(x: Array, like: Array, arrays: ArrayLibrary) -> Array:
    """X as an array in the dtype of ``like``: operations of NumPy return no array for numbers, of CuPy no bfloat16."""
    return arrays.asarray(x, arrays.dtype(like), like)


def _evaluate(build: Builder, settings: AnySettings, args: Any, kwargs: Any) -> Array:
    plan, _ = make(build, settings, args, kwargs)
    if plan.library.name == "torch":
        from contrastile import autograd

        return autograd.evaluate(plan)
    value, *_ = compute.loss(plan)
    return _array(value, value, plan.library)


def make(build: Builder, settings: AnySettings, args: Any, kwargs: Any) -> tuple[Plan, problems.LossProblem]:
    """The plan of a loss, and the loss, which maps the plan's gradients to those of the arguments.

    Raises:
        TypeError, ValueError: an argument is wrong; in a group, on every rank.
        BackendUnavailableError: the group is torch.distributed's, and there is no torch.
    """
    values: dict[str, Any] = {**DEFAULTS, **settings}
    group, agreed = values["group"], {}
    if group is not None:
        # settings that must be equal on all ranks, as text: the ranks compare them before any check
        agreed = {"backend": str(values["backend"]), "tile": str(values["tile"]), "precision": str(values["precision"])}
    handshake = Handshake.of(group, values["exchange"], values["parameter_reduction"], **agreed)

    def check_and_build(world: Handshake) -> tuple[tuple[str, Options, Any], problems.LossProblem]:
        return settings_checked(complete(settings)), build(*args, **kwargs, world=world)

    # one function, so that every rank raises an error of either part
    (backend, options, blocks), loss = handshake.build(check_and_build)
    problem, library = loss.problem, loss.library
    blocking = validation.blocking(blocks, library, problem.rows, problem.columns)
    if blocking is not None:
        problem = replace(problem, blocking=blocking)
    dtype = library.dtype(problem.rows)
    if backend == "auto":
        place = library.place(problem.rows) if blocking is None else str(blocking.device)
        backend = choose(library.name, place, dtype, options.precision, guide=problem.row_guide is not None)
    return Plan(problem, backend, settled(options, backend, dtype), library), loss


def settings_checked(values: dict[str, Any]) -> tuple[str, Options, Any]:
    """The backend's name, which may be "auto", the options, and ``validation.blocks`` of the device and the block.

    Raises:
        TypeError, ValueError: a setting is wrong.
    """
    blocks = validation.blocks(values["device"], values["block"], values["group"])
    backend = checked(values["backend"])
    return backend, validation.options(values["tile"], values["precision"], values["workspace"], values["keep"]), blocks


def value_and_grad(
    loss: Callable[..., Array], **settings: Unpack[Settings]
) -> Callable[..., tuple[Array, tuple[Array, ...]]]:
    """A function that returns a loss and its gradients, without autograd, for arrays of any known library.

    Args:
        loss: one of this package's losses, e.g. ``contrastile.clip_loss``.
        **settings: see ``contrastile.plan.Settings``; the gradients equal those of autograd.

    Returns:
        A function of the loss's own arguments that returns ``(value, gradients)``: one gradient for each positional
        feature argument, then for the scale (and the bias), 0-d, in the arguments' order. Labels have no gradient.

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
    values = complete(settings)
    if values["group"] is None:
        settings_checked(values)
    # one object in every call, because it is part of a call's signature
    build = _BUILDERS[name]

    def evaluate_both(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, ...]]:
        # not an operator: a compiler would trace the backend itself
        return outside_of_graphs(_with_gradients_of_parts)(name, build, values, args, kwargs)

    return evaluate_both


def _with_gradients_of_parts(
    name: str, build: Builder, settings: AnySettings, args: Any, kwargs: Any
) -> tuple[Array, tuple[Array, ...]]:
    """The sums of ``with_gradients`` of a loss and of the parts of its teachers."""
    taught = kwargs.keys() & {"teacher", "teacher_share"} if name in teachers.BUILDERS else ()
    options = {"teacher": None, "teacher_share": 1.0} | {option: kwargs.pop(option) for option in taught}
    parts = teachers.parts(*options.values())
    value, gradients = with_gradients(_with_teachers(build, settings, parts), settings, args, kwargs)
    for part in parts:
        more, more_gradients = with_gradients(teachers.BUILDERS[name], settings, args, {**kwargs, **part})
        value, gradients = _added(value, more), tuple(map(_added, gradients, more_gradients))
    return value, gradients


def with_gradients(build: Builder, settings: AnySettings, args: Any, kwargs: Any) -> tuple[Array, tuple[Array, ...]]:
    """The loss's value and its gradients: see ``value_and_grad``."""
    args, kwargs = [detached(x) for x in args], {name: detached(x) for name, x in kwargs.items()}
    alone = settings.get("group") is None and kwargs.keys().isdisjoint(("scale", "bias"))
    if alone and args and getattr(args[0], "is_cuda", False):
        from contrastile import autograd

        result = autograd.value_and_gradients(partial(evaluate, build, settings, **kwargs), args)
        if result is not None:
            return result
    plan, loss = make(build, settings, args, kwargs)
    wanted = local.Wanted.every(plan.problem)
    value, *state = compute.loss(plan, wanted)
    gradients = loss.pull_back(local.Gradients.of(compute.gradients(plan, state, None, wanted)))
    return _array(value, value, plan.library), tuple(_array(x, x, plan.library) for x in gradients)


def _build_bound(name: str, *args: Any, **kwargs: Any) -> problems.LossProblem:
    """Build the problem of a loss; raise TypeError if the arguments are not the loss's own."""
    build = problems.BUILDERS[name]
    try:
        bound = inspect.signature(build).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"value_and_grad({name})(...) must be given the arguments of {name} that say what to compute, got "
            f"others ({error}); give backend, tile, precision, group and the like to value_and_grad itself"
        ) from None
    return build(*bound.args, **bound.kwargs)


_BUILDERS = {name: partial(_build_bound, name) for name in problems.BUILDERS}


def detached(x: Any) -> Any:
    """X, or the elements of a list or tuple, without gradients; objects that are no tensors stay as they are."""
    if isinstance(x, list | tuple):
        return [detached(element) for element in x]
    return x.detach() if hasattr(x, "detach") else x
