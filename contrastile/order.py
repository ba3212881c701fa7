"""Samples in the order of their ids: few tiles then hold a positive or a pair to leave out, others look for none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contrastile.backends.arrays import Array, ArrayLibrary

FEW = 256
"""Samples that are taken as they come: all are one tile, and to sort them would take longer than it saves."""

MANY = 16384
"""Samples from which on sorting pays on a GPU where ids only leave pairs out; on a host it never does."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of samples.

    Attributes:
        arrays: their library.
        places: (m,) where each sample comes; None for the order that they have.
    """

    arrays: ArrayLibrary
    places: Array | None = None

    @staticmethod
    def of(arrays: ArrayLibrary, ids: Array | None, ids_are: str, alone: bool) -> Order:
        """The order of these ids where it pays; unless ``alone``, other ranks have more."""
        if ids is None or (alone and ids.shape[0] <= FEW):
            return Order(arrays)
        pays = ids_are == "positives" or (ids.shape[0] >= MANY and arrays.device(ids) == "cuda")
        places = arrays.put(arrays.arange(0, ids.shape[0], ids), arrays.sorted(ids)[1]) if pays else None
        return Order(arrays, places)

    def take(self, *samples: Array | None) -> tuple[Any, ...]:
        """Arrays of the samples in this order."""
        places = self.places
        # of ``take`` the gradient adds rows, one by one
        return tuple(x if x is None or places is None else self.arrays.put(x, places) for x in samples)

    def rising(self, ids: Array) -> Array:
        """The ids that were taken in this order, in rising order."""
        return self.arrays.sorted(ids)[0] if self.places is None else ids

    def put(self, samples: Array) -> Array:
        """An array of samples in this order, in the one that they had."""
        return samples if self.places is None else self.arrays.take(samples, self.places)
