"""What the environment says is checked as arguments are, and every variable has its line in the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from contrastile.backends.contract import Options
from contrastile.backends.settings import kept_bytes, mebibytes, workspace_bytes

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "contrastile"
PAGE = ROOT / "docs" / "reference" / "environment.md"


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


@pytest.mark.parametrize(
    ("option", "variable", "size", "usual"),
    [
        ("workspace", "CONTRASTILE_WORKSPACE_MIB", workspace_bytes, 512),
        ("keep", "CONTRASTILE_KEEP_MIB", kept_bytes, 0),
    ],
)
def test_an_option_is_stronger_than_the_environment_and_that_than_the_default(
    option: str, variable: str, size: Callable[[Options], int], usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert size(Options()) == usual * 2**20
    monkeypatch.setenv(variable, "3")
    assert size(Options()) == 3 * 2**20
    for mib in (0, 7):
        assert size(replace(Options(), **{option: mib})) == mib * 2**20
    monkeypatch.setenv(variable, "much")
    with pytest.raises(ValueError, match=f"{variable} must be"):
        size(Options())


def test_the_table_of_variables_has_those_that_the_package_reads() -> None:
    read = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"CONTRASTILE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    table = re.findall(r"^\| `(CONTRASTILE_[A-Z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert read
    assert sorted(table) == sorted(read)
