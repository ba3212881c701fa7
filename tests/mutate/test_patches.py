"""The registry of mutants: every patch fits its source."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from contrastile.mutate.registry import COMPONENTS, PACKAGE, Mutant, PatchError, every, read
from contrastile.verify.properties import PROPERTIES

ALL = list(every())


def test_every_component_has_mutants_and_names_are_unique() -> None:
    assert {mutant.component for mutant in ALL} == set(COMPONENTS)
    assert len({mutant.name for mutant in ALL}) == len(ALL)
    assert sum(mutant.equivalent is None for mutant in ALL) >= 60


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_patch_fits_the_source(mutant: Mutant) -> None:
    changed, path = mutant.applied(), PACKAGE / mutant.file
    assert changed != path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        ast.parse(changed)


@pytest.mark.parametrize(("before", "count"), [("two", 2), ("three", 0)])
def test_a_patch_that_does_not_fit_is_refused(tmp_path: Path, before: str, count: int) -> None:
    (tmp_path / "a.py").write_text("one two\ntwo\n", encoding="utf-8")
    with pytest.raises(PatchError, match=rf"a.py must hold '{before}' once, found it {count} times; update the patch"):
        Mutant("", "", "a.py", before, "x").applied(tmp_path)
    with pytest.raises(PatchError, match=r"b.py must hold 'one' once, found it 0 times"):
        Mutant("", "", "b.py", "one", "x").applied(tmp_path)


LIST = """== a.py

first: what is wrong
- one two
- two
+ one
checks: --case hot
equivalent: no test reads it
device: cuda
"""


def test_a_list_of_patches_is_read(tmp_path: Path) -> None:
    (mutant,) = read("numpy", LIST)
    attributes = ("--case", "hot"), "no test reads it", "cuda"
    assert mutant == Mutant("numpy:first", "what is wrong", "a.py", "one two\ntwo", "one", *attributes)
    (tmp_path / "a.py").write_text("one two\ntwo\n", encoding="utf-8")
    assert mutant.applied(tmp_path) == "one\n"


@pytest.mark.parametrize("old", ["== a.py", "first: what is wrong\n", "+ one\n", "checks"])
def test_a_malformed_list_is_refused(old: str) -> None:
    with pytest.raises(PatchError, match="a patch must be written as in"):
        list(read("numpy", LIST.replace(old, "else" if old == "checks" else "")))


def test_every_property_catches_a_mutant_and_has_a_description() -> None:
    record = json.loads((PACKAGE.parent / "docs" / "results" / "mutants.json").read_text(encoding="utf-8"))
    caught = {row["property"] for row in record["mutants"]}
    caught |= {word for mutant in ALL for word in mutant.checks}
    assert set(PROPERTIES) <= caught
    assert all(x.about.endswith(".") for x in PROPERTIES.values())
