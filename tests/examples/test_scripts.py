"""The short examples improve their results, and the tutorials print the output of their pages."""

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
def test_training_improves_the_result(name: str, gain: float) -> None:
    output = printed(read(f"examples/{name}.py"))
    before, after = (
        [float(x) for x in re.findall(rf"^{when}:.*? {NUMBER}", output, re.M)] for when in ("before", "after")
    )
    assert len(before) == len(after) > 0
    assert all(last > first + gain for first, last in zip(before, after, strict=True)), output


@pytest.mark.slow
def test_siglip_has_the_same_loss_on_one_process_and_on_two() -> None:
    runs = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        run = subprocess.run([*command, ROOT / "examples" / "siglip.py"], capture_output=True, text=True, timeout=1200)
        assert run.returncode == 0, run.stderr
        rows = re.findall(rf"^step +\d+: loss (\S+), recall@1 {NUMBER}, world size {processes}$", run.stdout, re.M)
        runs.append([(float(loss), float(recall)) for loss, recall in rows])
    one_process, two_processes = runs
    assert len(one_process) == len(two_processes) == 2
    # the float32 losses of the first step, before training amplifies roundings
    assert f"{one_process[0][0]:.2f}" == f"{two_processes[0][0]:.2f}"
    for first, last in runs:
        assert last[1] > first[1] + 0.5
        assert last[0] < first[0] / 2


PAGE = read("docs/tutorials/tiny-clip.md")
BLOCKS = blocks(PAGE)
BEST = 0.8


def test_the_tiny_clip_learns_and_prints_the_output_of_its_page() -> None:
    output, page_output = printed("\n".join(BLOCKS)), "".join(blocks(PAGE, "text"))
    before, after = (float(re.findall(rf"^{when}: +recall@1 (\S+)$", output, re.M)[0]) for when in ("before", "after"))
    assert before < 0.2 < BEST < after
    torch, numpy = re.findall(r"^(?:torch|numpy): (\S+)$", output, re.M)
    assert torch == numpy
    # the third nearest text may differ
    third = r"^  a .*\n?"
    assert masked(re.sub(third, "", output, flags=re.M)) == masked(re.sub(third, "", page_output, flags=re.M))
    assert re.search(r"top:\n  a (large blue|\w+ blue ring|large \w+ ring)", output)
