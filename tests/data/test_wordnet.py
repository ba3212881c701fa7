"""The shipped WordNet pairs: what they are, and that a damaged file is refused."""

from __future__ import annotations

import hashlib
import io
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contrastile.data import WordNetPairs, load_wordnet_pairs

PAIRS, GLOSSES, WIDTH = 1021, 899, 384
DATA = files("contrastile.data")


@pytest.fixture(scope="module")
def pairs() -> WordNetPairs:
    return load_wordnet_pairs()


@pytest.fixture(scope="module")
def blob() -> bytes:
    return DATA.joinpath("wordnet_pairs.npz").read_bytes()


def test_shapes_and_dtypes(pairs: WordNetPairs) -> None:
    for features in (pairs.examples, pairs.glosses):
        assert features.shape == (PAIRS, WIDTH)
        assert features.dtype == np.float16
    assert pairs.gloss_ids.shape == pairs.synset_offsets.shape == (PAIRS,)
    assert pairs.gloss_ids.dtype == pairs.synset_offsets.dtype == np.int64
    assert pairs.parts_of_speech.shape == pairs.example_numbers.shape == (PAIRS,)
    assert set(pairs.parts_of_speech.tobytes()) == set(b"nvar")


def test_features_are_unit_vectors_rounded_to_float16(pairs: WordNetPairs) -> None:
    # a component v moves by at most 2^-11 |v|, or by half a subnormal's spacing, and a sum of squares by its roundings
    allowed = 2.0**-11 + 2.0**-25 * np.sqrt(WIDTH) + 2 * (WIDTH + 2) * 2.0**-53
    for features in (pairs.examples, pairs.glosses):
        assert np.abs(np.linalg.norm(features.astype(np.float64), axis=1) - 1).max() <= allowed


def test_a_fifth_of_the_pairs_share_their_gloss(pairs: WordNetPairs) -> None:
    sizes = np.bincount(pairs.gloss_ids)
    assert np.bincount(sizes).tolist() == [0, 818, 50, 21, 10]
    assert sizes[sizes > 1].sum() == 203


def test_ids_tell_glosses_apart_and_examples_are_distinct(pairs: WordNetPairs) -> None:
    assert len(np.unique(pairs.glosses, axis=0)) == GLOSSES == len(np.unique(pairs.gloss_ids))
    assert len(np.unique(pairs.examples, axis=0)) == PAIRS
    synsets = np.stack([pairs.synset_offsets, pairs.parts_of_speech], axis=1)
    assert len(np.unique(synsets, axis=0)) == GLOSSES
    assert len(np.unique(np.column_stack([synsets, pairs.gloss_ids]), axis=0)) == GLOSSES
    assert len(np.unique(np.column_stack([pairs.glosses, pairs.gloss_ids]), axis=0)) == GLOSSES


def test_pairs_sharing_a_gloss_lie_apart(pairs: WordNetPairs) -> None:
    """The order is shuffled, so a shard or a tile splits them as a real batch would."""
    neighbours = np.count_nonzero(np.diff(pairs.gloss_ids) == 0)
    assert neighbours < 203 // 20


def test_nearest_gloss_is_often_the_right_one(pairs: WordNetPairs) -> None:
    """Measured recall@1 of example -> gloss: 245 of 1021 over 899 glosses, where chance gives 1.1."""
    ids, first = np.unique(pairs.gloss_ids, return_index=True)
    cosines = pairs.examples.astype(np.float64) @ pairs.glosses[first].astype(np.float64).T
    assert np.count_nonzero(ids[cosines.argmax(axis=1)] == pairs.gloss_ids) == 245


def test_file_is_uncompressed_undated_and_the_one_the_licences_name(blob: bytes) -> None:
    entries = zipfile.ZipFile(io.BytesIO(blob)).infolist()
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert len(blob) < 1_700_000
    assert hashlib.sha256(blob).hexdigest() in DATA.joinpath("LICENSES.md").read_text(encoding="utf-8")


def _saved(path: Path, pairs: WordNetPairs, **changes: Any) -> Path:
    file = path / "pairs.npz"
    np.savez(file, **{**vars(pairs), **changes})
    return file


def test_a_resaved_file_loads_alike(pairs: WordNetPairs, tmp_path: Path) -> None:
    again = load_wordnet_pairs(_saved(tmp_path, pairs))
    assert all(np.array_equal(vars(again)[name], array) for name, array in vars(pairs).items())


class Trap:
    """Touches a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_a_pickle_is_refused_unopened(pairs: WordNetPairs, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    file = _saved(tmp_path, pairs, glosses=np.array([Trap(sprung)], dtype=object))
    with pytest.raises(ValueError, match=r"Object arrays cannot be loaded .* the file is damaged"):
        load_wordnet_pairs(file)
    assert not sprung.exists()
    np.load(file, allow_pickle=True)["glosses"]  # the trap is live: it springs where pickles are allowed
    assert sprung.exists()


def test_unknown_and_missing_arrays_are_refused(pairs: WordNetPairs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'texts'.*the file is damaged"):
        load_wordnet_pairs(_saved(tmp_path, pairs, texts=np.zeros(3)))
    np.savez(tmp_path / "few.npz", examples=pairs.examples)
    with pytest.raises(ValueError, match=r"'glosses'.*the file is damaged"):
        load_wordnet_pairs(tmp_path / "few.npz")


@pytest.mark.parametrize("length", [0, 1, 1000, -1])
def test_truncated_file_is_refused(blob: bytes, tmp_path: Path, length: int) -> None:
    file = tmp_path / "cut.npz"
    file.write_bytes(blob[:length])
    with pytest.raises(ValueError, match=r"whole \.npz archive .*: the file is damaged"):
        load_wordnet_pairs(file)


def test_a_flipped_byte_is_refused_or_harmless(pairs: WordNetPairs, blob: bytes, tmp_path: Path) -> None:
    """Array bytes are under a checksum; some of the archive's own (a date, say) mean nothing to the arrays."""
    file = tmp_path / "flipped.npz"
    directory = blob.index(b"PK\x01\x02")
    array_bytes = range(1009, 786_000, 39_989)
    for position in (*array_bytes, *range(directory, len(blob), 11)):
        flipped = bytearray(blob)
        flipped[position] ^= 0x55
        file.write_bytes(flipped)
        try:
            again = load_wordnet_pairs(file)
        except ValueError as error:
            said = str(error)
        else:
            assert position >= directory
            assert all(np.array_equal(vars(again)[name], array) for name, array in vars(pairs).items())
            said = "the file is damaged in no way that matters"
        assert "the file is damaged" in said


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_wordnet_pairs(tmp_path / "none.npz")
