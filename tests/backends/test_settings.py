"""What the environment says is checked as arguments are, and every variable has its line in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contrastile.backends.settings import mebibytes

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "contrastile"
PAGE = ROOT / "docs" / "reference.md"


@pytest.mark.parametrize("given", ["", "two", "-1", "1.5", "1e3", "0x10", "²"])
def test_a_size_is_a_whole_number_of_mib(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", given)
    expected = (
        rf"^CONTRASTILE_KEEP_MIB must be a whole number of MiB, 0 or more, got {re.escape(repr(given))}; set e\.g\."
    )
    with pytest.raises(ValueError, match=expected):
        mebibytes("CONTRASTILE_KEEP_MIB", 7)


@pytest.mark.parametrize(("given", "mib"), [("0", 0), ("2048", 2048), (" 8 ", 8), (None, 7)])
def test_a_size_is_the_variable_s_or_else_the_default(
    given: str | None, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("CONTRASTILE_KEEP_MIB", raising=False)
    else:
        monkeypatch.setenv("CONTRASTILE_KEEP_MIB", given)
    assert mebibytes("CONTRASTILE_KEEP_MIB", 7) == mib * 2**20


def test_every_size_of_a_backend_is_so_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from contrastile.backends.cupy import configs as cupy
    from contrastile.backends.triton import configs as triton

    for name, sizes in {
        "CONTRASTILE_KEEP_MIB": [cupy.kept_bytes],
        "CONTRASTILE_WORKSPACE_MIB": [cupy.workspace_bytes, triton.workspace_bytes],
    }.items():
        monkeypatch.setenv(name, "much")
        for size in sizes:
            with pytest.raises(ValueError, match=f"{name} must be"):
                size()


def test_the_table_of_variables_has_those_that_the_package_reads() -> None:
    read = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"CONTRASTILE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    table = re.findall(r"^\| `(CONTRASTILE_[A-Z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert read
    assert sorted(table) == sorted(read)
