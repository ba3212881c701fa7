"""Samples sorted by their ids: only few tiles then contain positives or false negatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from contrastile.backends.arrays import Array, ArrayLibrary

FEW = 256
"""Batches of at most so many samples are not sorted: they are one tile, and sorting takes longer than it saves."""

MANY = 16384
"""From so many samples on a GPU sorting pays if ids only leave pairs out; on a host it never pays then."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of samples.

    Attributes:
        arrays: the library of the arrays.
        places: (m,) the position of each sample in the new order; None keeps the order.
    """

    arrays: ArrayLibrary
    places: Array | None = None

    @staticmethod
    def of(arrays: ArrayLibrary, ids: Array | None, ids_are: str, alone: bool) -> Order:
        """The order of the ids, if sorting pays; unless ``alone``, other ranks hold further samples."""
        if ids is None or (alone and ids.shape[0] <= FEW):
            return Order(arrays)
        is_worthwhile = ids_are == "positives" or (ids.shape[0] >= MANY and arrays.device(ids) == "cuda")
        places = arrays.put(arrays.arange(0, ids.shape[0], ids), arrays.sorted(ids)[1]) if is_worthwhile else None
        return Order(arrays, places)

    def take(self, *samples: Array | None) -> tuple[Any, ...]:
        """The arrays, sorted: their samples come in this order."""
        places = self.places
        # not ``take``: its gradient would add rows one by one
        return tuple(x if x is None or places is None else self.arrays.put(x, places) for x in samples)

    def rising(self, ids: Array) -> Array:
        """Ids that ``take`` has returned, in rising order."""
        return self.arrays.sorted(ids)[0] if self.places is None else ids

    def put(self, samples: Array) -> Array:
        """The inverse of ``take``: an array in this order, put back in the original order."""
        return samples if self.places is None else self.arrays.take(samples, self.places)


def restored(
    arrays: ArrayLibrary, arguments: Sequence[Array], gradients: Sequence[Array], orders: Sequence[Order] = ()
) -> Iterator[Array]:
    """The gradients in the arguments' sample order and dtypes: sorting and autocast may have changed them."""
    if orders:
        gradients = [order.put(gradient) for order, gradient in zip(orders, gradients, strict=True)]
    return (arrays.cast(gradient, arrays.dtype(x)) for x, gradient in zip(arguments, gradients, strict=True))
