"""Evaluating a loss: choosing the backend, and handing the problem to autograd or to the schedule itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contrastile import problems, validation
from contrastile.backends.arrays import ArrayLibrary, library_of, transfer
from contrastile.backends.contract import Backend, Options
from contrastile.backends.registry import choose, load
from contrastile.exchange import local
from contrastile.exchange.problem import Problem, convert

Array = Any


def evaluate(loss: problems.Loss, backend: str, tile: Any) -> Array:
    """The loss's value, 0-d; for torch tensors differentiable.

    Raises:
        BackendUnavailableError, UnsupportedProblemError: see ``contrastile.clip_loss``.
    """
    options = validation.options(tile)
    arrays = library_of(loss.problem.rows)
    name = _named(validation.backend(backend), arrays, loss.problem)
    if arrays.name == "torch":
        from contrastile import autograd

        return autograd.evaluate(loss.problem, name, options)
    return forward(loss.problem, load(name), options)[0]


def value_and_grad(
    loss: Callable[..., Array], *, backend: str = "auto", tile: Any = None
) -> Callable[..., tuple[Array, tuple[Array, ...]]]:
    """A function that gives a loss and its gradients at once, without autograd, for NumPy arrays or torch tensors.

    Args:
        loss: one of this package's losses, e.g. ``contrastile.clip_loss``.
        backend: see ``contrastile.clip_loss``.
        tile: see ``contrastile.clip_loss``.

    Returns:
        A function of the loss's own arguments that returns ``(value, gradients)``: one gradient for each positional
        feature argument, then for the scale (and the bias), in the arguments' order. Labels have none.

    Raises:
        ValueError: ``loss`` is not one of this package's losses.
    """
    build: Callable[..., problems.Loss] | None = getattr(
        problems, _BUILDERS.get(getattr(loss, "__name__", ""), ""), None
    )
    if build is None or getattr(loss, "__module__", "") != "contrastile.losses":
        raise ValueError(
            f"loss must be one of contrastile.{', contrastile.'.join(_BUILDERS)}, got {loss!r}; "
            "pass the function itself"
        )
    options, backend = validation.options(tile), validation.backend(backend)

    def both(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, ...]]:
        built = build(*(_detached(x) for x in args), **{name: _detached(x) for name, x in kwargs.items()})
        name = _named(backend, library_of(built.problem.rows), built.problem)
        value, gradients = forward_and_backward(built.problem, load(name), options)
        return value, built.pull_back(gradients)

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


def _detached(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_detached(each) for each in x]
    return x.detach() if hasattr(x, "detach") else x


def forward(problem: Problem, backend: Backend, options: Options) -> tuple[Array, local.Forward | None]:
    """The value in the caller's library, and what a backward needs, in the backend's."""
    inside, source = native(problem, backend)
    if problem.kind == "sigmoid":
        value, saved = local.sigmoid(inside, None, backend, options)[0], None
    else:
        saved = local.forward(inside, backend, options)
        value = saved.loss
    return transfer(value, backend.arrays, source, source.dtype(problem.scale)), saved


def forward_and_backward(problem: Problem, backend: Backend, options: Options) -> tuple[Array, local.Gradients]:
    """The value and all gradients, in the caller's library."""
    inside, source = native(problem, backend)
    sigmoid = problem.kind == "sigmoid"
    wanted = local.Wanted(True, (True,) * len(problem.columns), True, sigmoid)
    if sigmoid:
        value, sums = local.sigmoid(inside, wanted, backend, options)
        assert sums is not None
        found = local.finish(inside.rows, inside.scale, sums, None, wanted, backend.arrays)
    else:
        saved = local.forward(inside, backend, options)
        value = saved.loss
        one = backend.arrays.full((), 1.0, backend.arrays.dtype(inside.scale), inside.rows)
        found = local.backward(inside, saved, one, wanted, backend, options)
    features, scalar = source.dtype(problem.rows), source.dtype(problem.scale)

    def outside(x: Array | None, dtype: str) -> Array | None:
        return transfer(x, backend.arrays, source, dtype)

    return outside(value, scalar), local.Gradients(
        outside(found.rows, features),
        tuple(outside(x, features) for x in found.columns),
        outside(found.scale, scalar),
        outside(found.bias, scalar),
    )


def native(problem: Problem, backend: Backend) -> tuple[Problem, ArrayLibrary]:
    """The problem in the backend's library, and the library it came from.

    Raises:
        UnsupportedProblemError: the backend does not run where the features are.
    """
    source = library_of(problem.rows)
    backend.check_device(source.device(problem.rows))
    return convert(problem, source, backend.arrays), source
