"""Real embeddings that ship with the package, so that verification needs no download.

`load_wordnet_pairs` gives 1021 (example sentence, gloss) pairs from all-MiniLM-L6-v2 on WordNet 3.0,
some of which share a gloss. Files load without pickle and are checked on every load.
Sources and licences: LICENSES.md beside this file.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray


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


def load_wordnet_pairs(path: str | os.PathLike[str] | None = None) -> WordNetPairs:
    """Read the shipped pairs, or those in `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    source = files("contrastile.data").joinpath("wordnet_pairs.npz") if path is None else Path(path)
    content = source.read_bytes()
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return WordNetPairs(**archive)
    # zipfile, zlib and the npy parser raise different errors for damage; a wrong set of arrays is a TypeError
    except Exception as error:
        raise ValueError(
            f"wordnet_pairs.npz must be a whole .npz archive of the arrays of WordNetPairs, got {error!r}: "
            "the file is damaged, reinstall contrastile"
        ) from error
