"""Load the shipped WordNet pairs and refuse a damaged file."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from numpy.typing import NDArray

WIDTH = 384  # of all-MiniLM-L6-v2

_FLOAT16_ROUNDOFF = 2.0**-11
_FLOAT16_HALF_SUBNORMAL = 2.0**-25
_FLOAT64_ROUNDOFF = 2.0**-53

# name -> (dtype, trailing dimensions)
_MEMBERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "examples": ("<f2", (WIDTH,)),
    "glosses": ("<f2", (WIDTH,)),
    "gloss_ids": ("<i8", ()),
    "synset_offsets": ("<i8", ()),
    "parts_of_speech": ("|u1", ()),
    "example_numbers": ("|u1", ()),
}


@dataclass(frozen=True, eq=False)
class WordNetPairs:
    """b pairs of an example sentence and the gloss it illustrates, as unit features.

    Attributes:
        examples: (b, 384) float16, features of the example sentences.
        glosses: (b, 384) float16, features of the glosses; row i is the positive of example i.
        gloss_ids: (b,) int64. Rows with equal ids hold the same gloss, bit for bit, so for row i every other
            column with its id is a second positive (as labels) or a false negative (as row and column ids).
        synset_offsets: (b,) int64, byte offset of the synset in its WordNet 3.0 data file.
        parts_of_speech: (b,) uint8, ASCII n, v, a or r: data.noun, data.verb, data.adj or data.adv.
        example_numbers: (b,) uint8, which of the synset's quoted examples, from 0.
    """

    examples: NDArray[np.float16]
    glosses: NDArray[np.float16]
    gloss_ids: NDArray[np.int64]
    synset_offsets: NDArray[np.int64]
    parts_of_speech: NDArray[np.uint8]
    example_numbers: NDArray[np.uint8]


def unit_norm_bound(width: int) -> float:
    """Largest | ||v|| - 1 | of a unit vector rounded to float16, its norm taken in float64.

    Rounding moves component i by at most u |v_i| + h, with u = 2^-11 and h = 2^-25 (half a subnormal's
    spacing), hence the norm by at most u ||v|| + h sqrt(width); the float64 sum of `width` squares and the root
    add (width + 2) 2^-53 relative, to a norm below 2.
    """
    rounding = _FLOAT16_ROUNDOFF + _FLOAT16_HALF_SUBNORMAL * math.sqrt(width)
    return rounding + 2 * (width + 2) * _FLOAT64_ROUNDOFF


def load_wordnet_pairs(path: str | os.PathLike[str] | None = None) -> WordNetPairs:
    """Read and check the shipped pairs, or those in `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged; the message names the rule it breaks, the value found and the fix.
    """
    source = files("contrastile.data").joinpath("wordnet_pairs.npz") if path is None else Path(path)
    arrays = _read(source.read_bytes())
    _check(arrays)
    return WordNetPairs(**arrays)


def _damaged(rule: str, value: object) -> ValueError:
    return ValueError(f"wordnet_pairs.npz {rule}, got {value}: the file is damaged, reinstall contrastile")


def _read(blob: bytes) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(blob), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    # zipfile, zlib and the npy parser raise different errors for damage
    except Exception as error:
        raise _damaged("must be a whole .npz archive of plain arrays", repr(error)) from error
    if arrays.keys() != _MEMBERS.keys():
        raise _damaged(f"must hold the arrays {sorted(_MEMBERS)}", sorted(arrays))
    return arrays


def _check(arrays: Mapping[str, NDArray[Any]]) -> None:
    pairs = arrays["gloss_ids"].size
    if pairs == 0:
        raise _damaged("must hold at least one pair", 0)
    for name, (dtype, trailing) in _MEMBERS.items():
        found = arrays[name]
        if found.dtype.str != dtype or found.shape != (pairs, *trailing):
            rule = f"must hold {name} as {np.dtype(dtype)} of shape {(pairs, *trailing)}"
            raise _damaged(rule, f"{found.dtype} of shape {found.shape}")
    for name in ("examples", "glosses"):
        _check_unit(name, arrays[name])
    _, first, inverse = np.unique(arrays["gloss_ids"], return_index=True, return_inverse=True)
    unlike = (arrays["glosses"] != arrays["glosses"][first[inverse]]).any(axis=1)
    if unlike.any():
        raise _damaged("must hold one gloss per gloss id", f"another in row {int(unlike.argmax())}")


def _check_unit(name: str, features: NDArray[Any]) -> None:
    exact = features.astype(np.float64)
    finite = np.isfinite(exact).all(axis=1)
    if not finite.all():
        raise _damaged(f"must hold finite {name}", f"NaN or inf in row {int(finite.argmin())}")
    excess = np.abs(np.sqrt(np.square(exact).sum(axis=1)) - 1)
    worst, bound = int(excess.argmax()), unit_norm_bound(WIDTH)
    if excess[worst] > bound:
        rule = f"must hold {name} within {bound:.3g} of unit norm"
        raise _damaged(rule, f"{excess[worst]:.3g} off in row {worst}")
