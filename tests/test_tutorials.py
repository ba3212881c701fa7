"""The tutorials print what they say they print, and the program of the first is the example that it names."""

from __future__ import annotations

import re

from pages import blocks, masked, printed, read

PAGE = read("docs/tutorials/tiny-clip.md")
BLOCKS = blocks(PAGE)
BEST = 0.8


def test_the_tiny_clip_is_the_example() -> None:
    program = read("examples/clip.py")
    for block in BLOCKS[:5]:
        assert program.count(block.strip("\n")) == 1, block
        program = program.replace(block.strip("\n"), "")
    about, rest = re.fullmatch(r'(""".*?""")(.*)', program, re.S).groups()  # type: ignore[union-attr]
    assert not rest.strip()
    assert "docs/tutorials/tiny-clip.md" in about


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


def test_two_processes_print_what_one_prints() -> None:
    page = read("docs/tutorials/two-processes.md")
    runs = re.findall(r"^```text\n(.*?), world size \d\n(.*?), world size \d\n```", page, re.M | re.S)
    assert len(runs) == 2
    assert runs[0] == runs[1]
