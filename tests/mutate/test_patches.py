"""The registry: every patch fits the source it is written for, and every wrapped backend is one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from contrastile.backends.contract import Backend
from contrastile.backends.registry import load
from contrastile.mutate.registry import COMPONENTS, PACKAGE, Mutant, Patch, PatchError, every, read
from contrastile.mutate.wrappers import WRAPPERS

ALL = list(every())
PATCHED = [mutant for mutant in ALL if mutant.patch is not None]


def test_there_are_mutants_in_every_component_and_no_two_of_a_name() -> None:
    assert {mutant.component for mutant in ALL} == set(COMPONENTS)
    assert len({mutant.name for mutant in ALL}) == len(ALL)
    assert sum(mutant.equivalent is None for mutant in ALL) >= 60


@pytest.mark.parametrize("mutant", PATCHED, ids=lambda mutant: mutant.name)
def test_a_patch_fits_the_source(mutant: Mutant) -> None:
    assert mutant.patch is not None
    changed, path = mutant.patch.applied(), PACKAGE / mutant.patch.file
    assert changed != path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        ast.parse(changed)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_makes_a_backend(name: str) -> None:
    planted = load(f"contrastile.mutate.wrappers:{name}@numpy")
    assert isinstance(planted, Backend)
    assert planted != load("numpy")


@pytest.mark.parametrize("name", ["no-such-defect@numpy", "hangs"])
def test_what_is_no_wrapper_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"must be a contrastile.backends.contract.Backend"):
        load(f"contrastile.mutate.wrappers:{name}")


@pytest.mark.parametrize(("before", "count"), [("two", 2), ("three", 0)])
def test_a_patch_that_does_not_fit_is_refused(tmp_path: Path, before: str, count: int) -> None:
    (tmp_path / "a.py").write_text("one two\ntwo\n", encoding="utf-8")
    with pytest.raises(PatchError, match=rf"a.py must hold '{before}' once, found it {count} times; update the patch"):
        Patch("a.py", before, "x").applied(tmp_path)
    with pytest.raises(PatchError, match=r"b.py must hold 'one' once, found it 0 times"):
        Patch("b.py", "one", "x").applied(tmp_path)


LIST = """== a.py

first: what is wrong
- one two
- two
+ one
checks: --case hot
equivalent: no test reads it
device: cuda
"""


def test_a_list_is_read_as_it_is_written(tmp_path: Path) -> None:
    (mutant,) = read("numpy", LIST)
    patch = Patch("a.py", "one two\ntwo", "one")
    assert mutant == Mutant("numpy:first", "what is wrong", patch, ("--case", "hot"), "no test reads it", "cuda")
    (tmp_path / "a.py").write_text("one two\ntwo\n", encoding="utf-8")
    assert patch.applied(tmp_path) == "one\n"


@pytest.mark.parametrize("old", ["== a.py", "first: what is wrong\n", "+ one\n", "checks"])
def test_a_list_that_is_not_written_so_is_refused(old: str) -> None:
    with pytest.raises(PatchError, match="a patch must be written as in"):
        list(read("numpy", LIST.replace(old, "else" if old == "checks" else "")))
