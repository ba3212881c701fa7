"""docs/how-to/verify-loss.md: the first loss passes, a kernel fails as shown, repaired it passes; the claims exist."""

import importlib
import re

import pytest
from pages import blocks, read

from contrastile.verify.losses import Claims, check

PAGE = read("docs/how-to/verify-loss.md")
FIRST, CLAIMS, CONFTEST, KERNEL, REPAIRED = blocks(PAGE)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes and imports a module."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return write


def test_the_kernel_is_wrong_as_the_page_says_and_then_repaired(module):
    rows = check(module("first_of_the_page", FIRST).clip, cases=["smoke"])
    assert {row["status"] for row in rows} == {"pass", "unclaimed"}
    shown = re.findall(r"^FAILED kernels:clip (\S+) (\S+) (\S+)$", PAGE, re.M)
    assert len(shown) == 4
    loss = module("kernels_of_the_page", KERNEL).clip
    rows = list(check(loss, cases=["calls", "ragged", *(case for _, case, _ in shown)]))
    failures = {(row["property"], row["case"], row["dtype"]) for row in rows if row["status"] == "fail"}
    assert set(shown) <= failures
    # the checks that the author of the page had tried pass
    assert not {("value", "ragged", "float32"), ("gradients", "ragged", "float32")} & failures
    rows = list(check(module("repaired_kernels_of_the_page", REPAIRED).clip))
    assert not [row for row in rows if row["status"] in ("fail", "untested")]
    assert ("linear-memory", "pass") in {(row["property"], row["status"]) for row in rows}


def test_the_page_documents_every_claim(module):
    loss = module("claims_of_the_page", CLAIMS).clip
    assert Claims.of(loss.claims).state == "float32"
    table = PAGE.partition("| claims | |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(\w+)`", table)) - {"ids="}
    claims = set(Claims.__dataclass_fields__)
    widths = {name.replace("batch", "width") for name in claims if "batch" in name}
    assert documented - {"width"} == claims - widths
