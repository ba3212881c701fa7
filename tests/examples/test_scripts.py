"""The short examples learn what they say they learn, and the tutorials print what they say they print."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from pages import ROOT, blocks, masked, printed, read

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBER = r"(\d\.\d\d)"


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("sup_con", 0.1),
        pytest.param("simclr", 0.05, marks=pytest.mark.slow),
        pytest.param("retrieval", 0.3, marks=pytest.mark.slow),
    ],
)
def test_after_is_better_than_before(name: str, gain: float) -> None:
    said = printed(read(f"examples/{name}.py"))
    before, after = (
        [float(x) for x in re.findall(rf"^{when}:.*? {NUMBER}", said, re.M)] for when in ("before", "after")
    )
    assert len(before) == len(after) > 0
    assert all(last > first + gain for first, last in zip(before, after, strict=True)), said


@pytest.mark.slow
def test_siglip_learns_the_same_on_one_process_and_on_two() -> None:
    found = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run([*command, ROOT / "examples" / "siglip.py"], capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        rows = re.findall(rf"^step +\d+: loss (\S+), recall@1 {NUMBER}, world size {processes}$", done.stdout, re.M)
        found.append([(float(loss), float(recall)) for loss, recall in rows])
    alone, shared = found
    assert len(alone) == len(shared) == 2
    # float32 of one step, before training can carry the roundings on
    assert f"{alone[0][0]:.2f}" == f"{shared[0][0]:.2f}"
    for first, last in found:
        assert last[1] > first[1] + 0.5
        assert last[0] < first[0] / 2


PAGE = read("docs/tutorials/tiny-clip.md")
BLOCKS = blocks(PAGE)
BEST = 0.8


def test_the_tiny_clip_learns_and_prints_what_the_page_says() -> None:
    found, shown = printed("\n".join(BLOCKS)), "".join(blocks(PAGE, "text"))
    before, after = (float(re.findall(rf"^{when}: +recall@1 (\S+)$", found, re.M)[0]) for when in ("before", "after"))
    assert before < 0.2 < BEST < after
    torch, numpy = re.findall(r"^(?:torch|numpy): (\S+)$", found, re.M)
    assert torch == numpy
    # what is nearest in third place may differ
    third = r"^  a .*\n?"
    assert masked(re.sub(third, "", found, flags=re.M)) == masked(re.sub(third, "", shown, flags=re.M))
    assert re.search(r"top:\n  a (large blue|\w+ blue ring|large \w+ ring)", found)
