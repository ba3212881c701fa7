"""The shipped WordNet pairs: LICENSES.md has the hash of the file, and a damaged file is refused.

docs/reference/data.md prints the shapes and dtypes.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from contrastile.data import load_wordnet_pairs

DATA = files("contrastile.data")
BLOB = DATA.joinpath("wordnet_pairs.npz").read_bytes()


def test_file_is_uncompressed_undated_and_the_one_the_licences_name() -> None:
    entries = zipfile.ZipFile(io.BytesIO(BLOB)).infolist()
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert len(BLOB) < 1_700_000
    assert hashlib.sha256(BLOB).hexdigest() in DATA.joinpath("LICENSES.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("position", [1009, 400_000, 785_000])
def test_an_array_with_a_flipped_bit_is_refused(tmp_path: Path, position: int) -> None:
    file = tmp_path / "flipped.npz"
    file.write_bytes(BLOB[:position] + bytes([BLOB[position] ^ 1]) + BLOB[position + 1 :])
    with pytest.raises(ValueError, match="the file is damaged"):
        load_wordnet_pairs(file)
