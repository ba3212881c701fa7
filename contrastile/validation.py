"""Checks of the arguments. An error states the rule, the value and the fix.

Shapes, dtypes and devices are always checked. Values (a finite scale, positives in range) are checked in eager calls on
the host, where reading them costs nothing. Elsewhere a bad value makes the loss NaN, and no check waits for a device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, TypeVar

from contrastile.backends import eager
from contrastile.backends.arrays import FLOATS, ArrayLibrary, library_of
from contrastile.backends.contract import PRECISIONS, Array, Match, Options
from contrastile.schedules.problem import BLOCK, Blocking

T = TypeVar("T")

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
# prefixes of the names of real dtypes in NumPy, CuPy and torch
_REAL = ("float", "bfloat16", "int", "uint", "bool", ">f", ">i", ">u")
LARGEST = {"float32": (2 - 2.0**-23) * 2.0**127, "float64": sys.float_info.max}


def values_are_readable(arrays: ArrayLibrary, x: Array) -> bool:
    """Whether an element of x can be read now: x is on the host, and the call is plain eager (``eager.direct``)."""
    if arrays.name != "torch":
        return arrays.device(x) == "cpu"
    import torch

    return x.device.type == "cpu" and eager.direct(torch, (x,))


def features(
    alone: bool = True, /, *, may_be_empty: Collection[str] = (), **named: Array
) -> tuple[ArrayLibrary, tuple[Array, ...]]:
    """Check feature matrices, which must agree: their array library, and the matrices in the dtype of the loss.

    As in a matrix product, ``torch.autocast`` casts them to its dtype, except float64 matrices.

    Args:
        alone: whether to refuse a matrix without rows, which a rank of a group may hold.
        may_be_empty: names of the matrices that may have no rows even so.
        **named: (samples, width) floating-point matrices by the caller's names for them.

    Raises:
        TypeError: not arrays, different libraries, different or non-floating dtypes, not dense, masked.
        ValueError: not matrices, empty, different widths or different devices.
        RuntimeError: called inside torch.jit.trace.
    """
    first_name, first_array = next(iter(named.items()))
    arrays = library_of(first_array)
    if arrays.name == "torch" and eager.recorded():
        raise RuntimeError(
            "a loss must be called outside of torch.jit.trace, which cannot record its arguments, got a call inside; "
            "use torch.compile or torch.export"
        )
    matrices: list[Array] = []
    for name, x in named.items():
        if not arrays.owns(x):
            raise TypeError(
                f"{first_name} and {name} must be arrays of one library, "
                f"got {type(first_array).__name__} and {type(x).__name__}; convert one of them"
            )
        _dense(name, x, "matrix", arrays)
        if arrays.dtype(x) not in FLOATS:
            raise TypeError(
                f"{name} must be floating point ({', '.join(FLOATS)}), got {arrays.dtype(x)}; convert it to float32"
            )
        shape = tuple(x.shape)
        if len(shape) != 2:
            raise ValueError(
                f"{name} must be a matrix (samples, width), got shape {shape}; reshape it to two dimensions"
            )
        if (alone and shape[0] == 0 and name not in may_be_empty) or shape[1] == 0:
            raise ValueError(
                f"{name} must have at least one sample and one feature, got shape {shape}; skip empty batches"
            )
        matrices.append(_as_multiplied(arrays, _resolved(arrays, x)))
        first, x = matrices[0], matrices[-1]
        if x is first:
            continue
        if arrays.dtype(x) != arrays.dtype(first):
            raise TypeError(
                f"{first_name} and {name} must have the same dtype, got {arrays.dtype(first)} and {arrays.dtype(x)}; "
                "convert one of them"
            )
        if arrays.place(x) != arrays.place(first):
            raise ValueError(
                f"{first_name} and {name} must be on the same device, got {arrays.place(first)} and {arrays.place(x)}; "
                "move one of them"
            )
        if shape[1] != first.shape[1]:
            raise ValueError(
                f"{first_name} and {name} must have the same width, got {first.shape[1]} and {shape[1]}; "
                "project both to one embedding space"
            )
    return arrays, tuple(matrices)


def _dense(name: str, x: Array, noun: str, arrays: ArrayLibrary) -> None:
    """Raise TypeError for a nested, quantized, sparse, masked or distributed array, or np.matrix."""
    kind = ""
    if arrays.name == "torch":
        if hasattr(x, "device_mesh"):
            raise TypeError(
                f"{name} must be a {noun} of this process, got a DTensor; give x.full_tensor(), or x.to_local() with "
                "group= where it is sharded by rows"
            )
        if x.is_nested or x.is_quantized:
            kind = "a nested tensor" if x.is_nested else "a quantized tensor"
        elif str(x.layout) != "torch.strided":
            kind = f"layout {x.layout}"
        if kind:
            method = "dequantize" if x.is_quantized else "to_dense"
            raise TypeError(f"{name} must be a dense {noun}, got {kind}; convert it, e.g. by {method}()")
    elif hasattr(x, "mask") and hasattr(x, "filled"):
        raise TypeError(f"{name} must be a {noun} without a mask, got {type(x).__name__}; leave masked samples out")
    elif hasattr(x, "getA1"):
        raise TypeError(f"{name} must be a plain array, got np.matrix, whose * is another; convert it by np.asarray()")


def _resolved(arrays: ArrayLibrary, x: Array) -> Array:
    """X with torch's lazy negation resolved."""
    if arrays.name != "torch":
        return x
    import torch

    # compiled graphs resolve negations themselves
    return x if torch.compiler.is_compiling() or not x.is_neg() else x.resolve_neg()


def _as_multiplied(arrays: ArrayLibrary, x: Array) -> Array:
    """X in the dtype of torch's matrix products: autocast's dtype, if autocast is on for x's device."""
    kind = arrays.device(x)
    if arrays.name != "torch" or kind not in ("cpu", "cuda") or arrays.dtype(x) == "float64":
        return x
    import torch

    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Known:
    """The checks of a call whose signature an earlier call has checked: they check values alone.

    The methods have the names and parameters of this module's functions.

    Attributes:
        arrays: the features' library, torch.
        dtype: the torch dtype of the features in the loss.
        constants: arrays that depend on the signature alone, by name.
    """

    def __init__(self, arrays: ArrayLibrary, dtype: Any) -> None:
        self.arrays, self.dtype = arrays, dtype
        self.constants: dict[str, Any] = {}

    def features(
        self, alone: bool = True, /, *, may_be_empty: Collection[str] = (), **named: Array
    ) -> tuple[ArrayLibrary, tuple[Array, ...]]:
        """The library, and the matrices in the dtype of the loss."""
        dtype = self.dtype
        return self.arrays, tuple([x if x.dtype is dtype else x.to(dtype) for x in named.values()])

    def paired(self, *args: Any) -> None:
        """Check nothing: the shapes are known."""

    def scalar(self, name: str, x: Any, arrays: ArrayLibrary, dtype: str, like: Array) -> Array:
        """The number as a 0-d array; raise ValueError if it can be read and is not finite."""
        if isinstance(x, (int, float)):
            return scalar(name, x, arrays, dtype, like)
        if not x.is_cuda:
            _finite(name, x.item(), dtype)
        return arrays.asarray(x if x.ndim == 0 else x.reshape(()), dtype, like)

    def integers(self, name: str, x: Array, length: int, noun: str, arrays: ArrayLibrary, like: Array) -> Array:
        """The vector as int64."""
        return arrays.cast(x, dtype="int64")

    def floats(self, name: str, x: Array, *args: Any) -> Array:
        """The vector as float64."""
        return self.arrays.cast(x, "float64")

    def guide(self, matrices: Any, *args: Any) -> tuple[Array | None, Array | None]:
        """The guide's features in the features' dtype."""
        if matrices is None:
            return None, None
        first, second = self.features(**dict(zip(("rows", "columns"), matrices, strict=True)))[1]
        return first, second

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of ``make``, which depends on the signature alone: made once, and never written to."""
        constant: T = self.constants[name] if name in self.constants else self.constants.setdefault(name, make())
        return constant


def once(name: str, make: Callable[[], T]) -> T:
    """The result of ``make``: see ``Known.once``."""
    return make()


def paired(first_name: str, first: Array, second_name: str, second: Array, remedy: str) -> None:
    """Raise ValueError unless both matrices have the same number of rows; ``remedy`` says what to do."""
    if first.shape[0] != second.shape[0]:
        raise ValueError(
            f"{first_name} and {second_name} must have as many rows as each other, "
            f"got {first.shape[0]} and {second.shape[0]}; {remedy}"
        )


def scalar(name: str, x: Any, arrays: ArrayLibrary, dtype: str, like: Array) -> Array:
    """A number or one-element array as a 0-d array in the state dtype; a torch tensor keeps its gradient.

    Raises:
        TypeError: not a number.
        ValueError: not one element, no value (a meta tensor), or not finite in the state dtype.
    """
    # a tuple of types: torch 2.6 compiles no union of them
    if isinstance(x, (int, float)):
        _finite(name, x, dtype)
        return arrays.asarray(float(x), dtype, like)
    # NumPy's booleans are no instances of Real
    if isinstance(x, Real) or (type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_")):
        return scalar(name, _as_float(x), arrays, dtype, like)
    if not arrays.owns(x):
        rule = f"{name} must be a number, or a one-element array like the features"
        raise TypeError(f"{rule}, got {type(x).__name__}; pass a float")
    _dense(name, x, "number", arrays)
    if arrays.dtype(x).startswith("complex"):
        raise TypeError(f"{name} must be a real number, got {arrays.dtype(x)}; pass its real part")
    if not arrays.dtype(x).startswith(_REAL):
        raise TypeError(f"{name} must be a real number, got {arrays.dtype(x)}; pass a float")
    if arrays.device(x) == "meta" != arrays.device(like):
        raise ValueError(f"{name} must hold a value, got a meta tensor; move it to {arrays.place(like)}")
    x = _resolved(arrays, x)
    shape = tuple(x.shape)
    if math.prod(shape) != 1:
        raise ValueError(f"{name} must have one element, got shape {shape}; a {name} per sample is not supported")
    if values_are_readable(arrays, x):
        _finite(name, x.item(), dtype)
    return arrays.asarray(x if shape == () else x.reshape(()), dtype, like)


def _as_float(x: Any) -> float:
    """A number as a float; infinity where it is too large."""
    try:
        return float(x)
    except OverflowError:
        return math.inf


def _finite(name: str, x: float, dtype: str) -> None:
    """Raise ValueError unless a number is finite, also in this dtype."""
    # comparisons, because a compiler cannot trace math.isfinite of a varying number
    if not -LARGEST[dtype] <= x <= LARGEST[dtype]:
        shown = x if isinstance(x, float) else f"an integer of {x.bit_length()} bits"
        raise ValueError(f"{name} must be finite in {dtype}, got {shown}; clamp the learned value before it is used")


def integers(name: str, x: Array, length: int, noun: str, arrays: ArrayLibrary, like: Array) -> Array:
    """A vector of ``length`` integers as int64.

    Raises:
        TypeError: not an array, or not of integers.
        ValueError: another shape or another device.
    """
    if not arrays.owns(x):
        raise TypeError(f"{name} must be an integer array like the features, got {type(x).__name__}; convert it")
    if arrays.dtype(x) not in INTEGERS:
        raise TypeError(f"{name} must be integers ({', '.join(INTEGERS)}), got {arrays.dtype(x)}; convert it to int64")
    _one_for_each(name, x, length, noun, arrays, like)
    return arrays.cast(x, "int64")


def floats(name: str, x: Any, length: int, noun: str, arrays: ArrayLibrary, like: Array) -> Array:
    """A vector of ``length`` weights or limits, without a gradient, as float64.

    Raises:
        TypeError: not an array, or not of floating-point numbers.
        ValueError: another shape, another device, or a gradient.
    """
    if not arrays.owns(x) or arrays.dtype(x) not in FLOATS:
        kind = arrays.dtype(x) if arrays.owns(x) else type(x).__name__
        raise TypeError(f"{name} must be a floating-point array like the features, got {kind}; convert it to float32")
    _one_for_each(name, x, length, noun, arrays, like)
    if getattr(x, "requires_grad", False):
        raise ValueError(f"{name} must not require a gradient, got some that do; detach() them")
    return arrays.cast(x, "float64")


def guide(
    matrices: Any, sizes: Sequence[int], arrays: ArrayLibrary, like: Array, name: str = "guide"
) -> tuple[Array | None, Array | None]:
    """Another model's features of the rows and of the columns, in the features' dtype; (None, None) without any.

    Raises:
        TypeError: not two matrices of floating-point numbers like the features.
        ValueError: other lengths than ``sizes``, different widths, another device, or a gradient.
    """
    if matrices is None:
        return None, None
    count = len(matrices) if isinstance(matrices, (tuple, list)) else 1
    if count != 2:
        raise TypeError(f"{name} must be two matrices, of the rows and of the columns, got {count}; give both")
    named = {f"{name}[{i}]": x for i, x in enumerate(matrices)}
    if not all(map(arrays.owns, matrices)):
        raise TypeError(f"{name} must be arrays like the features, got {type(matrices[0]).__name__}; convert them")
    features(False, **named)
    for (part, x), size in zip(named.items(), sizes, strict=True):
        if x.shape[0] != size:
            raise ValueError(f"{part} must have {size} rows, got {x.shape[0]}; give each row and each column its own")
        _beside(part, x, arrays, like)
        if getattr(x, "requires_grad", False):
            raise ValueError(f"{part} must not require a gradient, got one that does; detach() it")
    # autocast casts the features alone
    rows, columns = (arrays.cast(_resolved(arrays, x), arrays.dtype(like)) for x in matrices)
    return rows, columns


def _one_for_each(name: str, x: Array, length: int, noun: str, arrays: ArrayLibrary, like: Array) -> None:
    """Raise unless x is a dense vector of this length on the features' device."""
    _dense(name, x, "vector", arrays)
    if tuple(x.shape) != (length,):
        raise ValueError(
            f"{name} must have shape ({length},), one for each {noun}, got {tuple(x.shape)}; give every {noun} one"
        )
    _beside(name, x, arrays, like)


def _beside(name: str, x: Array, arrays: ArrayLibrary, like: Array) -> None:
    """Raise ValueError unless x is on the features' device."""
    if arrays.place(x) != arrays.place(like):
        raise ValueError(
            f"{name} must be on the features' device {arrays.place(like)}, got {arrays.place(x)}; move it there"
        )


def option(name: str, x: Any, least: float, most: float, default: str = "0") -> float:
    """A numeric option of a loss; the error message names ``default``, its default value.

    Raises:
        TypeError: not a number.
        ValueError: not in ``least``..``most``.
    """
    if not isinstance(x, Real) or isinstance(x, bool):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}; pass a float")
    number = _as_float(x)
    if not least <= number <= most:
        finite = "be finite" if least < 0 else "be positive and finite"
        rule = finite if most == LARGEST["float64"] else f"lie in {least:g}..{most:g}"
        raise ValueError(f"{name} must {rule}, got {number}; leave it out for {default}")
    return number


def flag(name: str, x: Any) -> bool:
    """An option that is True or False; raise TypeError if it is neither."""
    if x not in (True, False):
        raise TypeError(f"{name} must be True or False, got {x!r}; leave it out for the default")
    return bool(x)


def match(ids_are: Any) -> Match:
    """The meaning of equal ids in a backend's terms: "drop" or "target".

    Raises:
        ValueError: it is neither "false_negatives" nor "positives".
    """
    if ids_are not in ("false_negatives", "positives"):
        raise ValueError(
            f"ids_are must be 'false_negatives' or 'positives', got {ids_are!r}; say what columns of a row's id are"
        )
    return "target" if ids_are == "positives" else "drop"


def positives(x: Array, columns: int, least: int = 0) -> str | None:
    """The reason why positives are wrong: one lies outside least..columns-1. Their values must be readable."""
    for extreme in (int(x.min()), int(x.max())) if x.shape[0] else ():
        if not least <= extreme < columns:
            return (
                f"positives must lie in {least}..{columns - 1} (there are {columns} columns), got {extreme}; "
                "index the keys, then the negatives, from 0"
            )
    return None


_DEFAULT = Options(precision="auto")


def options(tile: Any, precision: Any = "auto", workspace: Any = None, keep: Any = None) -> Options:
    """The options of a backend, from the settings of these names: see ``contrastile.plan.Settings``.

    ``choice.settled`` replaces a precision of "auto".

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is too small, the tile does not have two sides, or the precision is unknown.
    """
    if tile is None and workspace is None and keep is None and precision == "auto":
        return _DEFAULT
    if precision not in ("auto", *PRECISIONS):
        raise ValueError(
            f"precision must be one of auto, {', '.join(PRECISIONS)}, got {precision!r}; leave it out for float32's own"
        )
    return Options(_tile(tile), precision, _whole_number("workspace", workspace), _whole_number("keep", keep))


def blocks(device: Any, block: Any, group: Any) -> tuple[Any, int | None] | None:
    """The checked torch device (None for the features' device) and size of a block; None if neither is set.

    Raises:
        TypeError: block is no integer.
        ValueError: block is too small, the device does not exist, or there is a group.
    """
    if device is None and block is None:
        return None
    block = _whole_number("block", block, 1, "", 65536)
    if group is not None:
        raise ValueError(
            f"device and block must be left out with a group, got device={device!r} and block={block!r}; each rank "
            "computes where its features are"
        )
    return None if device is None else _device(device), block


def blocking(
    device_and_block: tuple[Any, int | None] | None, arrays: ArrayLibrary, rows: Array, columns: Sequence[Array]
) -> Blocking | None:
    """How to cut the features into blocks, from the result of ``blocks``; None for one block on their own device.

    Raises:
        TypeError: the features are not torch tensors.
        ValueError: the features are on another device.
    """
    if device_and_block is None:
        return None
    if arrays.name != "torch":
        raise TypeError(
            f"features must be torch tensors with device= or block=, got {arrays.name} arrays; convert them"
        )
    device, block = device_and_block
    device = rows.device if device is None else device
    if rows.device.type != "cpu" and rows.device != device:
        raise ValueError(f"features must be on the host or on {device}, got {arrays.place(rows)}; leave device= out")
    if rows.device == device and (block is None or max(x.shape[0] for x in (rows, *columns)) <= block):
        return None
    return Blocking(BLOCK if block is None else block, device)


def _device(device: Any) -> Any:
    """An existing torch device, with its index."""
    import torch

    parsed = None
    with suppress(RuntimeError, TypeError):
        parsed = torch.device(device)
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a GPU, got {device!r}; pass e.g. device='cuda', or None")
    if parsed.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or (parsed.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be a GPU that torch sees, got {device!r}; run contrastile doctor")
    return parsed if parsed.index is not None else torch.device("cuda", torch.cuda.current_device())


def _whole_number(name: str, x: Any, least: int = 0, unit: str = " of MiB", example: int = 2048) -> int | None:
    if x is None:
        return None
    if not isinstance(x, Integral) or isinstance(x, bool):
        raise TypeError(f"{name} must be a whole number{unit}, got {x!r}; pass e.g. {name}={example}, or None")
    if x < least:
        raise ValueError(f"{name} must be at least {least}, got {x!r}; pass e.g. {name}={example}, or None")
    return int(x)


def _tile(tile: Any) -> tuple[int, int] | None:
    if tile is None:
        return None
    sides = (tile, tile) if isinstance(tile, Integral) else tuple(tile) if isinstance(tile, (tuple, list)) else (None,)
    if not all(isinstance(side, Integral) and not isinstance(side, bool) for side in sides):
        raise TypeError(f"tile must be an integer or (rows, columns), got {tile!r}; pass e.g. tile=512, or None")
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"tile must be (rows, columns), each at least 1, got {tile!r}; pass e.g. tile=512, or None")
    return int(sides[0]), int(sides[1])
