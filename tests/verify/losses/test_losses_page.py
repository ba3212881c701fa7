"""docs/how-to/verify-loss.md: its kernel is wrong as it says, its diff mends it, its claims and conftest are real."""

import importlib
import re
import sys

import pytest
from pages import blocks, read

from contrastile.verify.losses import Claims, check

PAGE = read("docs/how-to/verify-loss.md")
CASES = ("smoke", "ragged", "hot", "opposite", "staircase", "scale-0", "nan", "memory")
CLAIMS, CONFTEST, KERNEL = blocks(PAGE)
(DIFF,) = blocks(PAGE, "diff")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module of a text."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield write
    for name in made:
        sys.modules.pop(name, None)


def mended(text):
    """The text with each - line of the page's diff replaced by the + line below it."""
    lines = DIFF.splitlines()
    assert [line[0] for line in lines] == ["-", "+"] * (len(lines) // 2)
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert text.count(f"{old[1:]}\n") == 1, old
        text = text.replace(f"{old[1:]}\n", f"{new[1:]}\n")
    return text


def test_the_kernel_is_wrong_as_the_page_says_and_then_mended(module):
    rows = list(check(module("kernels_of_the_page", KERNEL).clip, cases=CASES))
    failures = {(row["property"], row["case"], row["dtype"]) for row in rows if row["status"] == "fail"}
    said = re.findall(r"^FAILED kernels:clip (\S+) (\S+) (\S+)$", PAGE, re.M)
    assert len(said) == 3
    assert set(said) <= failures
    # what the author had tried is right
    assert not {("value", "smoke", "float32"), ("gradients", "smoke", "float32")} & failures
    rows = list(check(module("mended_kernels_of_the_page", mended(KERNEL)).clip, cases=CASES))
    assert not [row for row in rows if row["status"] in ("fail", "untested")]
    assert ("linear-memory", "pass") in {(row["property"], row["status"]) for row in rows}
    # the page says what other roundings would do
    same = "x, row = scale * part @ text.T"
    assert KERNEL.count(same) == 1
    other = mended(KERNEL).replace(same, "x, row = scale * (part @ text.T)")
    (row,) = check(
        module("other_roundings_of_the_page", other).clip, cases=["hot"], properties=["plain"], dtypes=["float32"]
    )
    assert row["status"] == "fail"


def test_the_claims_of_the_page_can_be_made(module):
    loss = module("claims_of_the_page", CLAIMS).clip
    assert Claims.of(loss.claims).state == "float32"
    table = PAGE.partition("| claims | |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table)) - {"ids="}
    known = set(Claims.__dataclass_fields__)
    widths = {name.replace("batch", "width") for name in known if "batch" in name}
    assert named - {"width"} == known - widths


def test_the_conftest_of_the_page_is_three_lines():
    assert len([line for line in CONFTEST.splitlines() if line]) == 3
    compile(CONFTEST, "conftest.py", "exec")
