"""Cutting a batch into chunks along the first dimension of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import Tensor

Splitter = Callable[[Any, int], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Budget:
    """A chunk size in elements: a chunk holds as many samples as fit, at least one.

    Attributes:
        elements: how many elements of its largest tensor a chunk may hold: tokens of ``input_ids`` (b, length), values
            of images (b, channels, height, width).

    Raises:
        ValueError: ``elements`` is not positive.
    """

    elements: int

    def __post_init__(self) -> None:
        positive_integer("Budget's elements", self.elements)


Size = int | Budget


class Sliced:
    """Slices of every tensor of a batch; they are views. May be iterated several times.

    A batch without samples has one chunk, without samples.
    """

    def __init__(self, batch: Any, size: Size) -> None:
        self.batch = batch
        self.samples = samples(batch)
        if isinstance(size, Budget):
            self.size = max(1, size.elements // max(1, *(x.shape[1:].numel() for x in tensors(batch))))
        else:
            self.size = positive_integer("chunk", size)
        self.count = max(1, -(-self.samples // self.size))

    def __getitem__(self, j: int) -> Any:
        return apply(lambda x: x[j * self.size : (j + 1) * self.size], self.batch)

    def __iter__(self) -> Iterator[Any]:
        return (self[j] for j in range(self.count))

    def tensors(self) -> list[Tensor]:
        """The tensors of the batch."""
        return tensors(self.batch)

    def extend(self, count: int) -> None:
        """Add chunks without samples until there are ``count``."""
        self.count = count

    def samples_in(self, j: int) -> int:
        """Samples of chunk j."""
        return max(0, min(self.size, self.samples - j * self.size))


class Listed:
    """The chunks that a caller's splitter made. Dicts and lists are copied: an encoder may pop from its chunk."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        if len(chunks) == 0:
            raise ValueError("split must return at least one chunk, got none; return one without samples")
        self._chunks = chunks
        self.count = len(chunks)

    def __iter__(self) -> Iterator[Any]:
        return (copy.copy(x) if isinstance(x, Mapping | list) else x for x in self._chunks)

    def tensors(self) -> list[Tensor]:
        """The tensors of all chunks that are made of tensors, dicts, tuples and lists."""
        collected: list[Tensor] = []
        for chunk in self._chunks:
            with suppress(TypeError):
                collected += tensors(chunk)
        return collected

    def extend(self, count: int) -> None:
        """Raise ValueError if there are fewer than ``count``: only the splitter can make a chunk without samples."""
        if count > self.count:
            raise ValueError(
                f"under FSDP2 split must return as many chunks on every rank, got {self.count} where another rank has "
                f"{count}; add chunks without samples"
            )


def apply(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with ``function`` applied to every tensor that has a first dimension; other values stay as they are.

    Args:
        function: takes a tensor.
        batch: a tensor, or a mapping, tuple or list of tensors, numbers and None, nested in any way.

    Raises:
        TypeError: the batch holds anything else, or a list of strings.
    """
    if isinstance(batch, Tensor):
        return function(batch) if batch.ndim else batch
    if isinstance(batch, Mapping):
        mapping: Any = copy.copy(batch)
        for name, value in batch.items():
            mapping[name] = apply(function, value)
        return mapping
    if isinstance(batch, tuple | list) and not any(isinstance(x, str) for x in batch):
        values = [apply(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if batch is None or isinstance(batch, bool | int | float | str):
        return batch
    kind = f"a {type(batch).__name__} of str" if isinstance(batch, tuple | list) else type(batch).__name__
    raise TypeError(
        f"an input must be made of tensors, dicts, tuples and lists, got {kind}; convert it, or give split= a function "
        "(input, size) -> chunks"
    )


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch that have a first dimension.

    Raises:
        TypeError: see ``apply``.
    """
    collected: list[Tensor] = []
    apply(collected.append, batch)
    return collected


def samples(batch: Any) -> int:
    """The first dimension that all tensors of a batch share.

    Raises:
        TypeError: see ``apply``.
        ValueError: there is no tensor, or their first dimensions differ.
    """
    lengths = [len(x) for x in tensors(batch)]
    if not lengths:
        raise ValueError("an input must hold at least one tensor with a first dimension, got none; give a batch")
    if len(set(lengths)) > 1:
        raise ValueError(
            f"all tensors of an input must have the same first dimension, got {lengths}; give split= a function "
            "(input, size) -> chunks"
        )
    return lengths[0]


def cut(batch: Any, size: Size | None, split: Splitter | None) -> Sliced | Listed:
    """The chunks of one input.

    Raises:
        TypeError, ValueError: the size or the input is invalid.
    """
    stream_chunks = getattr(batch, "chunks", None)
    if isinstance(stream_chunks, Sliced):
        if size not in (None, stream_chunks.size):
            raise ValueError(f"chunk must be the stream's own size {stream_chunks.size}, got {size}; leave it out")
        return copy.copy(stream_chunks)
    if size is None:
        raise TypeError("chunk must be given, got None; only inputs made by training.stream have a size of their own")
    if split is None:
        return Sliced(batch, size)
    if isinstance(size, Budget):
        raise TypeError(f"with split= chunk must be a number, got {size}; the splitter counts samples as it likes")
    check_callable("split", split, "give a function (input, size) -> chunks")
    chunks = split(batch, positive_integer("chunk", size))
    if not isinstance(chunks, Iterable):
        raise TypeError(f"split must return the chunks, got {type(chunks).__name__}; return a list of them")
    return Listed(list(chunks))


def check_callable(name: str, argument: Any, remedy: str) -> None:
    """Raise TypeError, which ends with the remedy, for an argument that cannot be called."""
    if not callable(argument):
        raise TypeError(f"{name} must be a callable, got {type(argument).__name__}; {remedy}")


def positive_integer(name: str, number: Any) -> int:
    """The number as an int.

    Raises:
        ValueError: the number is not a positive integer.
    """
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise ValueError(f"{name} must be a positive integer, got {number!r}; try 256")
    return int(number)
