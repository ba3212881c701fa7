"""A loss under test: a callable, the claims of its author, and the one way in which the cases call it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from contrastile.backends.arrays import ArrayLibrary, CupyArrays, TorchArrays
from contrastile.backends.contract import Accuracy, Array, state_dtype
from contrastile.reporting import CannotRunError, one_line
from contrastile.verify.execution import putter
from contrastile.verify.losses.arguments import Arguments
from contrastile.verify.losses.claims import Claims
from contrastile.verify.rounding import UNIT
from contrastile.verify.truth import Outcome

_ARRAYS: dict[str, Callable[[Any], ArrayLibrary]] = {"numpy": ArrayLibrary, "cupy": CupyArrays, "torch": TorchArrays}


@dataclass(frozen=True)
class Result(Outcome):
    """A loss and its gradients; ``rows`` and ``columns`` belong to features and negatives. A missing one is None.

    Attributes:
        by_autograd: whether autograd computed the gradients; otherwise the loss returned them.
        unit: the unit roundoff of the dtype in which the loss came; 0 of a number.
    """

    by_autograd: bool = False
    unit: float = 0.0

    @property
    def gradients(self) -> list[Any]:
        """The gradients in the order of the arguments."""
        return [self.rows, *self.columns, self.scale, self.bias]


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss under test.

    Attributes:
        name: its name in the report, "module:attribute" if it can be imported.
        target: a callable, a torch module, or a class of torch modules or other factory of losses that takes ``rank``
            and ``world_size``, as open_clip's ``ClipLoss`` does. It is called as ``target(*features, scale)``;
            with labels before the scale, the bias after it, and keywords, where its objective and claims have them.
        claims: the claims under test.
        facts: of the backend that computes a loss of this package; None for the bounds of a plain computation.
        block: the number of rows and columns that it takes at a time; None for all.
    """

    name: str
    target: Any
    claims: Claims
    facts: Accuracy | None = None
    block: int | None = None

    @staticmethod
    def of(target: Any, claims: Claims | Mapping[str, Any] | None = None, name: str | None = None, **more: Any) -> Loss:
        """A loss from a callable, or from its name, and its claims.

        Args:
            target: a ``Loss``; "module:attribute"; or see ``Loss.target``.
            claims: None for the target's attribute ``claims``, or the defaults of ``Claims`` where it has none. A
                torch module whose constructor takes ``rank`` and ``world_size`` then claims 2 and 3 ranks.
            name: None for the target's own.
            **more: claims that replace the others.

        Raises:
            CannotRunError: the name does not exist, or importing it failed.
            TypeError, ValueError: see ``Claims.of``; or the target cannot be called.
        """
        if isinstance(target, str):
            name, target = name or target, load(target)
        if isinstance(target, Loss):
            return Loss(name or target.name, target.target, Claims.of(claims or target.claims, **more))
        if not callable(target):
            raise TypeError(f"a loss must be callable, got {type(target).__name__}; name a function or a class")
        stated = claims if claims is not None else getattr(target, "claims", None)
        if stated is None and takes_rank(target):
            stated = {"ranks": (2, 3)}
        return Loss(name or _name(target), target, Claims.of(stated, **more))

    @cached_property
    def arrays(self) -> ArrayLibrary:
        return _ARRAYS[self.claims.library](importlib.import_module(self.claims.library))

    @cached_property
    def call(self) -> Callable[..., Any]:
        return self.on_rank(0, 1)

    def on_rank(self, rank: int, world_size: int) -> Callable[..., Any]:
        """The function that computes the loss on this rank: the target, or the loss that the target creates."""
        function: Callable[..., Any] = self.target
        if takes_rank(self.target):
            function = self.target(rank=rank, world_size=world_size)
        elif isinstance(self.target, type):
            function = self.target()
        return function


@dataclass(slots=True)
class Call:
    """A call of a loss, with its arrays.

    Attributes:
        loss: the loss that is called.
        leaves: features and negatives, arrays of the loss's library. Torch tensors may require gradients.
        count: the number of leaves that are positional arguments.
        passed: the arrays that are passed for the leaves, of equal values.
        labels: SupCon's labels, as a list.
        numbers: the scale and the bias, as they are passed.
        keywords: the arrays among the keyword arguments, without the negatives.
        joined: see ``Arguments``.
        sequence: the type of the sequence of several negatives.
        returned: the last result of the loss.
    """

    loss: Loss
    leaves: list[Array]
    count: int
    passed: list[Array]
    labels: list[Array]
    numbers: list[Any]
    keywords: dict[str, Any]
    joined: bool
    options: Mapping[str, Any]
    sequence: Callable[..., Any] = list
    returned: Any = None

    def __call__(self, function: Callable[..., Any] | None = None) -> Any:
        """Call the loss, or another function, and return its result."""
        negatives = self.passed[self.count :]
        omits_negatives = self.sequence is list and not negatives
        keyword = {} if omits_negatives else {"negatives": negatives[0] if self.joined else self.sequence(negatives)}
        positional = *self.passed[: self.count], *self.labels, *self.numbers
        integers = [*self.labels, *self.keywords.values()]
        before = [self._to_float64(x).tobytes() for x in integers]
        self.returned = (function or self.loss.call)(*positional, **self.keywords, **self.options, **keyword)
        if [self._to_float64(x).tobytes() for x in integers] != before:
            raise AssertionError("labels, ids or positives must be left as they are, got other ones after the call")
        return self.returned

    def finish(self, returned: Any, upstream: Any = None, *, retain: bool = False) -> Result:
        """The value and the gradients: the returned ones, or autograd's, which accumulate over backward passes."""
        returned = list(returned.values()) if isinstance(returned, dict) else returned
        value, *gradients = returned if isinstance(returned, tuple | list) else (returned,)
        claims, n = self.loss.claims, len(self.leaves)
        if self.loss.facts is not None:
            dtypes = [self.loss.arrays.dtype(x) for x in (value, self.leaves[0])]
            assert dtypes[0] == state_dtype(dtypes[1]), f"of {dtypes[1]} features the loss is {dtypes[0]}"
            assert not any(isinstance(x, np.generic) for x in (value, *gradients)), "a NumPy number is no array"
        by_autograd = not gradients and claims.by_autograd
        if by_autograd:
            if not hasattr(value, "backward"):
                raise TypeError(f"a loss must return a torch tensor, got {type(value).__name__}; see claims for others")
            if any(getattr(x, "requires_grad", False) for x in (*self.leaves, *self.numbers)):
                output, gradient = (upstream * value, None) if isinstance(upstream, float) else (value, upstream)
                output.backward(gradient, retain_graph=retain)
            gradients = [getattr(x, "grad", None) for x in (*self.leaves, *self.numbers)]
        elif gradients:
            # A loss that returns its gradients returns none of the negatives.
            gradients = [*gradients[: self.count], *[None] * (n - self.count), *gradients[self.count :]]
        elif claims.feature_gradients or claims.scale_gradient:
            raise TypeError(
                f"a loss that returns its gradients must return (loss, gradients...), got {type(returned).__name__}"
            )
        gradients += [None] * (n + 2 - len(gradients))
        arrays = [self._to_float64(x) for x in gradients[:n]]
        # Blocks of negatives, (b, k, d), become matrices too.
        rows, *columns = (None if x is None else x.reshape((-1, x.shape[-1])) for x in arrays)
        scale, bias = (None if x is None else self._to_float64(x).reshape(()) for x in gradients[n : n + 2])
        dtype = self.loss.arrays.dtype(value) if self.loss.arrays.owns(value) else ""
        value, unit = self._to_float64(value), UNIT.get(dtype, 0.0)
        return Result(value, rows, tuple(columns), scale, bias, by_autograd=by_autograd, unit=unit)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Drop the gradients of earlier backward passes, because the next pass would add to them."""
        for x in (*self.leaves, *self.numbers):
            if hasattr(x, "grad"):
                x.grad = None

    def outputs(self) -> list[Any]:
        """All results of the last call: the returned ones, the value first, and autograd's gradients."""
        returned = list(self.returned.values()) if isinstance(self.returned, dict) else self.returned
        outputs = list(returned) if isinstance(returned, tuple | list) else [returned]
        return outputs + [getattr(x, "grad", None) for x in (*self.leaves, *self.numbers)]

    def bits(self) -> list[bytes]:
        """The bytes of each of the outputs."""
        return [self._to_float64(x).tobytes() for x in self.outputs() if x is not None]

    def _to_float64(self, x: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, int | float | np.generic | np.ndarray):
            return np.array(x, dtype=np.float64).reshape(np.shape(x))
        return np.array(self.loss.arrays.to_numpy(x), dtype=np.float64)


def prepare(
    loss: Loss,
    arguments: Arguments,
    dtype: str,
    device: str = "cpu",
    *,
    train: Sequence[bool] | None = None,
    layout: Callable[[Array], Array] | None = None,
    number: Callable[[float], Any] | None = None,
    integers: str = "int64",
    step: int = 1,
) -> Call:
    """Create the arrays of a call.

    Args:
        loss: the loss to call.
        arguments: the arguments, exactly representable in ``dtype`` (features) and in float32 (numbers).
        dtype: of the features.
        device: kind of device.
        train: whether each of features, negatives, scale and bias needs a gradient; None for all that are claimed.
        layout: copies an array of features into another memory layout.
        number: converts scale and bias; None for 0-d tensors where their gradients are claimed.
        integers: dtype of ids, positives and labels.
        step: the stride, in elements, of ids, positives and labels in memory.
    """
    claims, put = loss.claims, putter(loss.arrays, device)
    leaves = [
        put(x, dtype) if layout is None else layout(put(x, dtype)) for x in (*arguments.features, *arguments.negatives)
    ]
    values = [x for x in (arguments.scale, arguments.bias) if x is not None]
    needs_tensors = claims.scale_gradient and claims.library == "torch"
    convert = number or (lambda x: put(x, state_dtype(dtype)) if needs_tensors else x)
    numbers = [convert(x) for x in values]
    if claims.by_autograd:
        claimed = [claims.feature_gradients] * len(leaves) + [claims.scale_gradient] * len(numbers)
        for x, is_trained in zip((*leaves, *numbers), claimed if train is None else train, strict=True):
            if is_trained and hasattr(x, "requires_grad_"):
                x.requires_grad_()
    labels = [] if arguments.labels is None else [put(np.repeat(arguments.labels, step), integers)[::step]]
    keywords = {name: put(np.repeat(x, step, axis=0), integers)[::step] for name, x in arguments.keywords.items()}
    if arguments.weights is not None:
        keywords["weights"] = put(arguments.weights, state_dtype(dtype))
    # The guide is passed in float64, near the numbers that it rounds to.
    guides = [x * (1.0 + UNIT[dtype] / 2 * np.sin(np.arange(x.size))).reshape(x.shape) for x in arguments.guide]
    options = {**arguments.options, "guide": [put(x, "float64") for x in guides]} if guides else arguments.options
    return Call(loss, leaves, len(arguments.features), leaves, labels, numbers, keywords, arguments.joined, options)


def takes_rank(target: Any) -> bool:
    """Whether the target takes ``rank`` and ``world_size``: it is then a factory of losses, and no loss itself."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
    if not {"rank", "world_size"} <= set(parameters):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    others = [x for name, x in parameters.items() if name not in ("rank", "world_size")]
    return all(x.kind in variadic or x.default is not inspect.Parameter.empty for x in others)


def load(name: str) -> Any:
    """The object that "module:attribute" names.

    Raises:
        CannotRunError: there is no such module or attribute, or importing it failed.
    """
    if not all(name.partition(":")):
        raise CannotRunError(f"a loss must be named as module:attribute, got {name!r}")
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        # Importing third-party code may raise any exception.
        raise CannotRunError(f"loss {name!r} cannot be imported: {one_line(error)}") from error


def _name(target: Any) -> str:
    named = target if hasattr(target, "__qualname__") else getattr(target, "func", type(target))
    return f"{named.__module__}:{named.__qualname__}"
