"""A loss under test: somebody's callable, what is claimed for it, and the one way in which the cases call it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from contrastile.backends.arrays import ArrayLibrary, CupyArrays, NumpyArrays, TorchArrays
from contrastile.backends.contract import Array, state_dtype
from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.reporting import CannotRunError, one_line
from contrastile.verify.execution import on_device
from contrastile.verify.losses.claims import Claims

_ARRAYS: dict[str, Callable[[Any], ArrayLibrary]] = {"numpy": NumpyArrays, "cupy": CupyArrays, "torch": TorchArrays}


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a loss is called with, as NumPy arrays in float64.

    Attributes:
        features: (image, text), (query, key), (view_a, view_b), each (b, d); or SupCon's (features,).
        scale: a number that multiplies the dot products.
        labels: (b,) of SupCon, None elsewhere.
        bias: of the sigmoid loss, None elsewhere.
        ids: (b,) or None.
    """

    features: tuple[FloatArray, ...]
    scale: float
    labels: IntArray | None = None
    bias: float | None = None
    ids: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a loss gave: the value, and the gradient of each differentiable argument, None where there is none.

    Attributes:
        loss: 0-d.
        features: one gradient for each of ``Arguments.features``.
        scale: 0-d.
        bias: 0-d.
        by_autograd: whether autograd gave the gradients; otherwise the loss returned them.
    """

    loss: FloatArray
    features: tuple[FloatArray | None, ...]
    scale: FloatArray | None = None
    bias: FloatArray | None = None
    by_autograd: bool = False


@dataclass(frozen=True, eq=False)
class Loss:
    """Somebody's loss.

    Attributes:
        name: what the report calls it: "module:attribute" where it can be imported.
        target: a callable, a torch module, or a class of torch modules or other factory of losses that takes ``rank``
            and ``world_size``, as open_clip's ``ClipLoss`` does. It is called as ``target(*features, scale)``;
            with labels before the scale, the bias after it, and the keyword ``ids``, where its objective has them.
        claims: what is tested.
    """

    name: str
    target: Any
    claims: Claims

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
        """The library of its arrays."""
        return _ARRAYS[self.claims.library](importlib.import_module(self.claims.library))

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The function that computes it in a single process."""
        return self.on_rank(0, 1)

    def on_rank(self, rank: int, world_size: int) -> Callable[..., Any]:
        """The function that computes it on this rank: the target, or what the target makes."""
        made: Callable[..., Any] = self.target
        if takes_rank(self.target):
            made = self.target(rank=rank, world_size=world_size)
        elif isinstance(self.target, type):
            made = self.target()
        return made

    def evaluate(
        self,
        given: Arguments,
        dtype: str,
        device: str = "cpu",
        *,
        upstream: float | None = None,
        train: Sequence[bool] | None = None,
        layout: Callable[[Array], Array] | None = None,
    ) -> Result:
        """Value and gradients.

        Args:
            given: the arguments, exactly representable in ``dtype`` (features) and in float32 (numbers).
            dtype: of the features.
            device: kind of device.
            upstream: gradient with respect to the loss, through autograd; None for ``loss.backward()`` itself.
            train: which of the features need a gradient; None for all, where that is claimed.
            layout: makes of each array of features an equal one in another memory layout.
        """
        call = prepare(self, given, dtype, device, train=train, layout=layout)
        return call.finish(call(self.call), upstream)


@dataclass(slots=True)
class Call:
    """A call with its arrays made.

    Attributes:
        loss: whose call it is.
        features: arrays of the loss's library; torch tensors are leaves where a gradient is wanted.
        others: labels, scale and bias, in the order in which they are passed.
        keywords: the keyword arguments.
        numbers: the scale and the bias that a gradient is wanted of.
    """

    loss: Loss
    features: list[Array]
    passed: list[Array]
    others: list[Any]
    keywords: dict[str, Any]
    numbers: list[Array]

    def __call__(self, function: Callable[..., Any]) -> Any:
        """What the function returns."""
        return function(*self.passed, *self.others, **self.keywords)

    def finish(self, returned: Any, upstream: float | None = None) -> Result:
        """The value and the gradients: those that were returned, or autograd's."""
        returned = list(returned.values()) if isinstance(returned, dict) else returned
        several = isinstance(returned, tuple | list)
        value, *gradients = returned if several else (returned,)
        by_autograd = not gradients
        if gradients:
            gradients += [None] * (len(self.features) + 2 - len(gradients))
        elif not self.loss.claims.by_autograd:
            raise TypeError(
                f"a loss that returns its gradients must return (loss, gradients...), got {type(returned).__name__}"
            )
        else:
            gradients = self._differentiated(value, upstream)
        take = self._take
        count = len(self.features)
        scale, bias = map(take, gradients[count : count + 2])
        return Result(take(value), tuple(map(take, gradients[:count])), scale, bias, by_autograd)

    def _differentiated(self, value: Array, upstream: float | None) -> list[Array | None]:
        if not hasattr(value, "backward"):
            raise TypeError(f"a loss must return a torch tensor, got {type(value).__name__}; see claims for others")
        leaves = [x for x in (*self.features, *self.numbers) if x.requires_grad]
        if leaves:
            value.backward() if upstream is None else (upstream * value).backward()
        found = [x.grad for x in self.features]
        numbers = [x.grad for x in self.numbers]
        return [*found, *numbers, *[None] * (2 - len(numbers))]

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
) -> Call:
    """The arrays of a call: see ``Loss.evaluate``."""
    arrays, claims, like = loss.arrays, loss.claims, on_device(loss.arrays, device)

    def put(x: Any, kind: str) -> Array:
        return arrays.asarray(np.array(x, order="C"), kind, like)

    features = [put(x, dtype) for x in given.features]
    numbers = [x for x in (given.scale, given.bias) if x is not None]
    trained: list[Array] = []
    if claims.scale_gradient and claims.library == "torch":
        trained = [put(x, state_dtype(dtype)) for x in numbers]
    if claims.by_autograd:
        wanted = train if train is not None else [claims.feature_gradients] * len(features)
        features = [x.requires_grad_(want) for x, want in zip(features, wanted, strict=True)]
        trained = [x.requires_grad_(train is None) for x in trained]
    labels = [] if given.labels is None else [put(given.labels, "int64")]
    keywords = {} if given.ids is None else {"ids": put(given.ids, "int64")}
    passed = features if layout is None else [layout(x) for x in features]
    return Call(loss, features, passed, [*labels, *(trained or numbers)], keywords, trained)


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
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise CannotRunError(f"a loss must be named as module:attribute, got {name!r}")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        # importing other people's code may raise anything
        raise CannotRunError(f"loss {name!r} cannot be imported: {one_line(error)}") from error
    return found


def _name(target: Any) -> str:
    kind = target if hasattr(target, "__qualname__") else getattr(target, "func", type(target))
    return f"{kind.__module__}:{kind.__qualname__}"
