"""A loss under test: somebody's callable, what is claimed for it, and the one way in which the cases call it."""

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
    """What a loss gave: in ``rows`` and ``columns`` the gradient of each of the features and negatives, None for none.

    Attributes:
        by_autograd: whether autograd gave the gradients; otherwise the loss returned them.
    """

    by_autograd: bool = False

    @property
    def gradients(self) -> list[Any]:
        """In the order of the arguments."""
        return [self.rows, *self.columns, self.scale, self.bias]


@dataclass(frozen=True, eq=False)
class Loss:
    """Somebody's loss.

    Attributes:
        name: what the report calls it: "module:attribute" where it can be imported.
        target: a callable, a torch module, or a class of torch modules or other factory of losses that takes ``rank``
            and ``world_size``, as open_clip's ``ClipLoss`` does. It is called as ``target(*features, scale)``;
            with labels before the scale, the bias after it, and keywords, where its objective and claims have them.
        claims: what is tested.
        facts: of the backend that computes it, where it is one of this package's; else its bounds are a plain
            computation's.
        block: rows and columns that it takes at a time; None for all.
    """

    name: str
    target: Any
    claims: Claims
    facts: Accuracy | None = None
    block: int | None = None

    @staticmethod
    def of(target: Any, claims: Claims | Mapping[str, Any] | None = None, name: str | None = None, **more: Any) -> Loss:
        """A loss from what an author hands over.

        Args:
            target: a ``Loss``; "module:attribute"; or see ``Loss.target``.
            claims: None for the target's attribute ``claims``, or the defaults of ``Claims`` where it has none. A
                torch module whose constructor takes ``rank`` and ``world_size`` then claims 2 and 3 ranks.
            name: None for the target's own.
            **more: claims that replace those.

        Raises:
            CannotRunError: there is nothing of this name, or importing it failed.
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
        """The function that computes it on this rank: the target, or what the target makes."""
        made: Callable[..., Any] = self.target
        if takes_rank(self.target):
            made = self.target(rank=rank, world_size=world_size)
        elif isinstance(self.target, type):
            made = self.target()
        return made


@dataclass(slots=True)
class Call:
    """A call with its arrays made.

    Attributes:
        loss: whose call it is.
        leaves: features and negatives, arrays of the loss's library, of which torch tensors may want gradients.
        count: how many of them are positional.
        passed: what is passed of them: equal values.
        labels: SupCon's, as a list.
        numbers: the scale and the bias, as they are passed.
        keywords: the arrays among the keyword arguments, without the negatives.
        joined: see ``Arguments``.
        sequence: of several negatives.
        returned: what the loss returned last.
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
        """What the loss, or another function, returns."""
        more = self.passed[self.count :]
        given_none = self.sequence is list and not more
        negatives = {} if given_none else {"negatives": more[0] if self.joined else self.sequence(more)}
        given = *self.passed[: self.count], *self.labels, *self.numbers
        integers = [*self.labels, *self.keywords.values()]
        before = [self._take(x).tobytes() for x in integers]
        self.returned = (function or self.loss.call)(*given, **self.keywords, **self.options, **negatives)
        if [self._take(x).tobytes() for x in integers] != before:
            raise AssertionError("labels, ids or positives must be left as they are, got other ones after the call")
        return self.returned

    def finish(self, returned: Any, upstream: Any = None, *, retain: bool = False) -> Result:
        """The value and the gradients: those that were returned, or autograd's, which adds to those before."""
        returned = list(returned.values()) if isinstance(returned, dict) else returned
        value, *gradients = returned if isinstance(returned, tuple | list) else (returned,)
        claims, leaves = self.loss.claims, len(self.leaves)
        if self.loss.facts is not None:
            dtypes = [self.loss.arrays.dtype(x) for x in (value, self.leaves[0])]
            assert dtypes[0] == state_dtype(dtypes[1]), f"of {dtypes[1]} features the loss is {dtypes[0]}"
        by_autograd = not gradients and claims.by_autograd
        if by_autograd:
            if not hasattr(value, "backward"):
                raise TypeError(f"a loss must return a torch tensor, got {type(value).__name__}; see claims for others")
            if any(getattr(x, "requires_grad", False) for x in (*self.leaves, *self.numbers)):
                of, arriving = (upstream * value, None) if isinstance(upstream, float) else (value, upstream)
                of.backward(arriving, retain_graph=retain)
            gradients = [getattr(x, "grad", None) for x in (*self.leaves, *self.numbers)]
        elif gradients:
            # of the negatives none is returned
            gradients = [*gradients[: self.count], *[None] * (leaves - self.count), *gradients[self.count :]]
        elif claims.feature_gradients or claims.scale_gradient:
            raise TypeError(
                f"a loss that returns its gradients must return (loss, gradients...), got {type(returned).__name__}"
            )
        gradients += [None] * (leaves + 2 - len(gradients))
        taken = [self._take(x) for x in gradients[:leaves]]
        # of columns of one row each, too
        rows, *columns = (None if x is None else x.reshape((-1, x.shape[-1])) for x in taken)
        scale, bias = (None if x is None else self._take(x).reshape(()) for x in gradients[leaves : leaves + 2])
        return Result(self._take(value), rows, tuple(columns), scale, bias, by_autograd=by_autograd)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Drop the gradients of the backward passes so far, to which the next would add."""
        for x in (*self.leaves, *self.numbers):
            if hasattr(x, "grad"):
                x.grad = None

    def given(self) -> list[Any]:
        """Everything that the last call gave: what it returned, the value first, and autograd's gradients."""
        returned = list(self.returned.values()) if isinstance(self.returned, dict) else self.returned
        given = list(returned) if isinstance(returned, tuple | list) else [returned]
        return given + [getattr(x, "grad", None) for x in (*self.leaves, *self.numbers)]

    def bits(self) -> list[bytes]:
        """Of ``given``."""
        return [self._take(x).tobytes() for x in self.given() if x is not None]

    def _take(self, x: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, int | float | np.generic | np.ndarray):
            return np.array(x, dtype=np.float64).reshape(np.shape(x))
        return np.array(self.loss.arrays.to_numpy(x), dtype=np.float64)


def prepare(
    loss: Loss,
    given: Arguments,
    dtype: str,
    device: str = "cpu",
    *,
    train: Sequence[bool] | None = None,
    layout: Callable[[Array], Array] | None = None,
    number: Callable[[float], Any] | None = None,
    integers: str = "int64",
    step: int = 1,
) -> Call:
    """The arrays of a call.

    Args:
        loss: whose call it is.
        given: the arguments, exactly representable in ``dtype`` (features) and in float32 (numbers).
        dtype: of the features.
        device: kind of device.
        train: which of features, negatives, scale and bias need a gradient; None for all that is claimed.
        layout: makes of each array of features an equal one in another memory layout.
        number: makes what is passed as scale and as bias; None for 0-d tensors where their gradients are claimed.
        integers: dtype of ids, positives and labels.
        step: of these in memory.
    """
    claims, put = loss.claims, putter(loss.arrays, device)
    leaves = [put(x, dtype) if layout is None else layout(put(x, dtype)) for x in (*given.features, *given.negatives)]
    values = [x for x in (given.scale, given.bias) if x is not None]
    tensors = claims.scale_gradient and claims.library == "torch"
    make = number or (lambda x: put(x, state_dtype(dtype)) if tensors else x)
    numbers = [make(x) for x in values]
    if claims.by_autograd:
        every = [claims.feature_gradients] * len(leaves) + [claims.scale_gradient] * len(numbers)
        for x, wanted in zip((*leaves, *numbers), every if train is None else train, strict=True):
            if wanted and hasattr(x, "requires_grad_"):
                x.requires_grad_()
    labels = [] if given.labels is None else [put(np.repeat(given.labels, step), integers)[::step]]
    keywords = {name: put(np.repeat(x, step, axis=0), integers)[::step] for name, x in given.keywords.items()}
    if given.weights is not None:
        keywords["weights"] = put(given.weights, state_dtype(dtype))
    # of a wider dtype, and near the numbers that it is rounded to
    near = [x * (1.0 + UNIT[dtype] / 2 * np.sin(np.arange(x.size))).reshape(x.shape) for x in given.guide]
    options = {**given.options, "guide": [put(x, "float64") for x in near]} if near else given.options
    return Call(loss, leaves, len(given.features), leaves, labels, numbers, keywords, given.joined, options)


def takes_rank(target: Any) -> bool:
    """Whether a call of it takes ``rank`` and ``world_size``: it then makes a loss for a rank, and is none itself."""
    try:
        names = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
    if not {"rank", "world_size"} <= set(names):
        return False
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    others = [x for name, x in names.items() if name not in ("rank", "world_size")]
    return all(x.kind in free or x.default is not inspect.Parameter.empty for x in others)


def load(name: str) -> Any:
    """What "module:attribute" names.

    Raises:
        CannotRunError: there is no such module or attribute, or importing it failed.
    """
    if not all(name.partition(":")):
        raise CannotRunError(f"a loss must be named as module:attribute, got {name!r}")
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        # importing other people's code may raise anything
        raise CannotRunError(f"loss {name!r} cannot be imported: {one_line(error)}") from error


def _name(target: Any) -> str:
    kind = target if hasattr(target, "__qualname__") else getattr(target, "func", type(target))
    return f"{kind.__module__}:{kind.__qualname__}"
