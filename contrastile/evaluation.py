"""Evaluating a loss: choosing the backend, and handing the problem to autograd or to the schedule itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from contrastile import problems, validation
from contrastile.backends.arrays import ArrayLibrary, library_of, transfer, working_for
from contrastile.backends.contract import Backend, Options
from contrastile.backends.eager import outside_of_graphs
from contrastile.backends.registry import checked, choose, load, require
from contrastile.schedules import local, schedule
from contrastile.schedules.handshake import Handshake
from contrastile.schedules.problem import Problem, convert

Array = Any
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """How a loss was asked for: see ``contrastile.clip_loss`` for each."""

    backend: str
    tile: Any
    precision: str
    group: Any
    exchange: str
    parameter_reduction: str

    def start(self, build: Callable[[Handshake], T]) -> tuple[str, Options, T]:
        """The backend's name, the options, and what ``build`` makes in the world of this call's group.

        Raises:
            TypeError, ValueError: an argument is none that there is; in a group, on every rank.
            BackendUnavailableError: the group is torch.distributed's, and there is no torch.
        """
        if isinstance(self.group, str):
            require(f"group={self.group!r}", "torch")

        def everything(here: Handshake) -> tuple[str, Options, T]:
            return *self.checked(), build(here)

        settings = {"backend": str(self.backend), "tile": str(self.tile), "precision": str(self.precision)}
        return Handshake.of(self.group, self.exchange, self.parameter_reduction, **settings).build(everything)

    def checked(self) -> tuple[str, Options]:
        """The backend's name and the options.

        Raises:
            TypeError, ValueError: see ``start``.
        """
        return checked(self.backend), validation.options(self.tile, self.precision)


def evaluate(build: Callable[[Handshake], problems.Loss], call: Call) -> Array:
    """The loss's value, 0-d; for torch tensors differentiable.

    Args:
        build: makes the problem, given the world it is a part of.
        call: how.

    Raises:
        BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see ``contrastile.clip_loss``.
    """
    # ranks talk to each other, which no graph can hold
    chosen = _evaluate if call.group is None else outside_of_graphs(_evaluate)
    return chosen(build, call)


def _evaluate(build: Callable[[Handshake], problems.Loss], call: Call) -> Array:
    backend, options, loss = call.start(build)
    arrays = library_of(loss.problem.rows)
    name = _named(backend, arrays, loss.problem)
    if arrays.name == "torch":
        from contrastile import autograd

        return autograd.evaluate(loss.problem, name, options)
    return forward(loss.problem, load(name), options)


def value_and_grad(
    loss: Callable[..., Array],
    *,
    backend: str = "auto",
    tile: Any = None,
    precision: str = "ieee",
    group: Any = None,
    exchange: str = "auto",
    parameter_reduction: str = "mean",
) -> Callable[..., tuple[Array, tuple[Array, ...]]]:
    """A function that gives a loss and its gradients at once, without autograd, for arrays of any known library.

    Args:
        loss: one of this package's losses, e.g. ``contrastile.clip_loss``.
        backend: see ``contrastile.clip_loss``.
        tile: see ``contrastile.clip_loss``.
        precision: see ``contrastile.clip_loss``.
        group: see ``contrastile.clip_loss``.
        exchange: see ``contrastile.clip_loss``.
        parameter_reduction: see ``contrastile.clip_loss``; the gradients are those that autograd would give.

    Returns:
        A function of the loss's own arguments that returns ``(value, gradients)``: one gradient for each positional
        feature argument, then for the scale (and the bias), in the arguments' order. Labels have none.

    Raises:
        ValueError: ``loss`` is not one of this package's losses.
        TypeError: the function is called with other arguments than the loss's own.
    """
    build: Callable[..., problems.Loss] | None = getattr(
        problems, _BUILDERS.get(getattr(loss, "__name__", ""), ""), None
    )
    if build is None or getattr(loss, "__module__", "") != "contrastile.losses":
        raise ValueError(
            f"loss must be one of contrastile.{', contrastile.'.join(_BUILDERS)}, got {loss!r}; "
            "pass the function itself"
        )
    call = Call(backend, tile, precision, group, exchange, parameter_reduction)
    if group is None:
        call.checked()
    name, own = loss.__name__, inspect.signature(build)

    def bound(world: Handshake, args: Any, kwargs: Any) -> problems.Loss:
        try:
            given = own.bind(*args, **kwargs, world=world)
        except TypeError as error:
            raise TypeError(
                f"value_and_grad({name})(...) must be given the arguments of {name} that say what to compute, got "
                f"others ({error}); give backend, tile, precision, group and the like to value_and_grad itself"
            ) from None
        built: problems.Loss = build(*given.args, **given.kwargs)
        return built

    def computed(args: Any, kwargs: Any) -> tuple[Array, tuple[Array, ...]]:
        positional, named = [_detached(x) for x in args], {name: _detached(x) for name, x in kwargs.items()}
        backend, options, built = call.start(lambda here: bound(here, positional, named))
        arrays = library_of(built.problem.rows)
        _holds_values(arrays, built.problem)
        chosen = _named(backend, arrays, built.problem)
        value, gradients = forward_and_backward(built.problem, load(chosen), options)
        return value, built.pull_back(gradients)

    def both(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, ...]]:
        # no operator: a compiler would trace the backend itself
        return outside_of_graphs(computed)(args, kwargs)

    return both


_BUILDERS = {
    "clip_loss": "clip",
    "info_nce": "info_nce",
    "nt_xent": "nt_xent",
    "sup_con": "sup_con",
    "sigmoid_loss": "sigmoid",
}


def _named(backend: str, arrays: ArrayLibrary, problem: Problem) -> str:
    """The backend's own name: what "auto" stands for on this problem, or the name that was given."""
    if backend != "auto":
        return backend
    return choose(arrays.name, arrays.device(problem.rows), arrays.dtype(problem.rows))


def _holds_values(arrays: ArrayLibrary, problem: Problem) -> None:
    """Raise TypeError for tensors that have shapes alone: no operator is called here that a fake mode would see."""
    if arrays.name == "torch" and any(type(x).__name__ == "FakeTensor" for x in (problem.rows, problem.row_weight)):
        raise TypeError(
            "value_and_grad(...)(...) must be given tensors that hold values, got a FakeTensor; call the loss itself, "
            "which gives its shape"
        )


def _detached(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_detached(each) for each in x]
    return x.detach() if hasattr(x, "detach") else x


def forward(problem: Problem, backend: Backend, options: Options) -> Array:
    """The value in the caller's library."""
    with native(problem, backend) as (inside, source):
        if problem.kind == "sigmoid":
            value = schedule.sigmoid(inside, None, backend, options)[0]
        else:
            value = schedule.forward(inside, backend, options).loss
        return transfer(value, backend.arrays, source, source.dtype(problem.scale))


def forward_and_backward(problem: Problem, backend: Backend, options: Options) -> tuple[Array, local.Gradients]:
    """The value and all gradients, in the caller's library."""
    sigmoid = problem.kind == "sigmoid"
    wanted = local.Wanted(True, (True,) * len(problem.columns), True, sigmoid)
    with native(problem, backend) as (inside, source):
        if sigmoid:
            value, sums = schedule.sigmoid(inside, wanted, backend, options)
            assert sums is not None
            found = schedule.finish(inside.rows, inside.scale, inside.placement, sums, None, wanted, backend.arrays)
        else:
            saved = schedule.forward(inside, backend, options, keep=True)
            value = saved.loss
            one = backend.arrays.full((), 1.0, backend.arrays.dtype(inside.scale), inside.rows)
            found = schedule.backward(inside, saved, one, wanted, backend, options)
        features, scalar = source.dtype(problem.rows), source.dtype(problem.scale)

        def outside(x: Array | None, dtype: str) -> Array | None:
            return transfer(x, backend.arrays, source, dtype)

        return outside(value, scalar), local.Gradients(
            outside(found.rows, features),
            tuple(outside(x, features) for x in found.columns),
            outside(found.scale, scalar),
            outside(found.bias, scalar),
        )


@contextmanager
def native(problem: Problem, backend: Backend) -> Iterator[tuple[Problem, ArrayLibrary]]:
    """The problem in the backend's library and the library it came from; results are moved back before it closes.

    Raises:
        UnsupportedProblemError: the backend does not run where the features are.
    """
    source = library_of(problem.rows)
    backend.check_device(source.device(problem.rows))
    with _without_autocast(source, problem.rows), working_for(source, backend.arrays, problem.rows):
        yield convert(problem, source, backend.arrays), source


def _without_autocast(arrays: ArrayLibrary, x: Array) -> AbstractContextManager[Any]:
    """While open, no product is narrowed: the features have the dtype that they are to be multiplied in."""
    kind = arrays.device(x)
    if arrays.name == "torch" and sys.modules["torch"].is_autocast_enabled(kind):
        found: AbstractContextManager[Any] = sys.modules["torch"].autocast(kind, enabled=False)
        return found
    return nullcontext()
