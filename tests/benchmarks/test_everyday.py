"""Everyday calls: what the script records, and what the pages make of its records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import everyday
import pages
import pytest
from harness import tables


def timed(row: everyday.Row, **times: float) -> list[dict[str, Any]]:
    return [{"row": row.label, "name": name, "status": "measured", "median_ms": ms} for name, ms in times.items()]


def record(rows: list[dict[str, Any]], ranks: int = 1, **more: Any) -> dict[str, Any]:
    about = {"device": "Some GPU", "date": "2026-01-02T03:04:05", "commit": "c" * 40, "torch": "2.11.0"}
    return {"environment": {**about, "ranks": ranks, **more}, "settings": {"slot": 0.06}, "rows": rows}


@pytest.fixture
def alone() -> dict[str, Any]:
    """A made-up run on one GPU."""
    skipped = {"row": everyday.Row("clip_loss", "bfloat16", 65536, 512).label, "name": "compiled", "status": "skip"}
    return record(
        [
            *timed(everyday.Row("clip_loss", "bfloat16", 4096, 512), auto=2.0, triton=2.5, plain=9.0, compiled=5.0),
            *timed(everyday.Row("clip_loss", "bfloat16", 65536, 512), auto=30.0, plain=90.0),
            skipped,
            *timed(everyday.Row("clip_loss", "float32", 8192, 512, {"precision": "tf32"}), auto=1.0, plain=9.0),
            *timed(everyday.Row("clip_loss ids", "bfloat16", 4096, 512), plain=1.0),
            *timed(everyday.Row("nt_xent", "bfloat16", 4096, 128), auto=4.0, plain=3.0),
        ]
    )


@pytest.fixture
def two() -> dict[str, Any]:
    """A made-up run on two GPUs."""
    times = {"auto": 1.0, "open_clip formula": 2.0, "open_clip formula, compiled": 1.5}
    return record(timed(everyday.Row("clip_loss", "bfloat16", 256, 512), **times), 2)


@pytest.mark.slow
def test_every_loss_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "everyday.json"
    words = "--device cpu --backends torch --without compiled --only b=64 --slot 0.002 --rounds 1 --out"
    command = [sys.executable, str(everyday.__file__), *words.split(), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert {(x["row"].partition(" float32")[0], x["name"]) for x in found if x["status"] == "measured"} == {
        (loss, name) for loss in everyday.PLAINS for name in ("torch", "plain")
    }
    assert all(x["median_ms"] > 0 for x in found)


def test_every_row_is_one_that_the_pages_can_say() -> None:
    for row in (*everyday.ROWS, *everyday.SEVERAL, *everyday.CPU_ROWS):
        assert tables.in_words(row.label).startswith(f"`{row.loss.split()[0]}`, "), row.label
    assert set(tables.CALLS) <= {row.label for row in everyday.ROWS}
    assert set(tables.CALLS_OF_RANKS) <= {row.label for row in everyday.SEVERAL}


def test_the_ratio_is_to_the_faster_of_the_others(alone: dict[str, Any], two: dict[str, Any]) -> None:
    text = tables.everyday_calls(alone, two).splitlines()
    assert text[2:] == [
        "| `clip_loss`, bfloat16, b = 4,096, d = 512 | 2.00 | 9.00 | 5.00 | 2.5 x |",
        "| `clip_loss`, bfloat16, b = 65,536, d = 512 | 30.0 | 90.0 | - | 3.0 x |",
        "| `nt_xent`, bfloat16, b = 4,096, d = 128 | 4.00 | 3.00 | - | 0.8 x |",
        "| `clip_loss`, bfloat16, b = 256, d = 512, on each of 2 GPUs | 1.00 | 2.00 | 1.50 | 1.5 x |",
    ]
    assert tables.everyday_calls(alone, None).splitlines() == text[:-1]


def test_the_page_has_every_call(alone: dict[str, Any], two: dict[str, Any]) -> None:
    clip, others = tables.everyday(alone).split("\n\n")
    assert "| `clip_loss`, bfloat16, b = 4,096, d = 512 | 2.00 | 2.50 | 9.00 | 5.00 | 2.5 x |" in clip
    # in tf32 the others do not multiply
    assert "| `clip_loss`, tf32, float32, b = 8,192, d = 512 | 1.00 | - | 9.00 | - | - |" in clip
    assert "| `clip_loss`, ids, bfloat16, b = 4,096, d = 512 | - | - | 1.00 | - | - |" in clip
    assert "`nt_xent`" in others
    assert "`clip_loss`" not in others
    page = pages.all_calls({"everyday": {"one": alone, "two": two}}, pages.ROOT)
    assert clip in page.partition("### 2 x Some GPU")[0]
    assert "| 1.00 | 2.00 | 1.50 | 1.5 x |" in page.partition("### 2 x Some GPU")[2]


def test_the_readme_is_of_the_newest_record(alone: dict[str, Any], two: dict[str, Any]) -> None:
    old = record(timed(everyday.Row("clip_loss", "bfloat16", 256, 512), auto=7.0), device="Old GPU", date="2025")
    text = pages.readme({"everyday": {"old": old, "new": alone, "two": two}}, pages.ROOT)
    assert text.startswith("Some GPU, torch 2.11.0, commit `cccccccccccc`, 2026-01-02.\n")
    assert "on each of 2 GPUs" in text
    assert "7.00" not in text
    two["environment"]["commit"] = "d" * 40
    text = pages.readme({"everyday": {"new": alone, "two": two}}, pages.ROOT)
    assert "2026-01-02. Several GPUs: commit `dddddddddddd`, 2026-01-02.\n" in text
    assert not pages.readme({"everyday": {"two": two}}, pages.ROOT)


def test_a_hosts_record_is_on_the_page_alone_and_behind_those_of_gpus(alone: dict[str, Any]) -> None:
    host = record(timed(everyday.Row("clip_loss", "float32", 64, 512), auto=2.0, plain=1.0), device="cpu", date="2027")
    host["environment"] |= {"cpu": "Some CPU", "threads": 2}
    records = {"everyday": {"cpu": host, "one": alone}}
    before, _, page = pages.all_calls(records, pages.ROOT).partition("### Some CPU, 2 threads\n\ntorch 2.11.0, commit")
    assert "### Some GPU" in before
    assert "| `clip_loss`, float32, b = 64, d = 512 | 2.00 | 1.00 | 0.5 x |" in page
    assert pages.readme(records, pages.ROOT) == pages.readme({"everyday": {"one": alone}}, pages.ROOT)


def test_a_page_says_where_the_kernels_have_changed_since(
    tmp_path: Path, alone: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    root, results = tmp_path / "root", tmp_path / "results"
    kernel, other = root / "contrastile" / "backends" / "triton" / "kernel.py", root / "docs/benchmarks/everyday.md"
    results.mkdir()
    for path in (kernel, *(root / page for page in pages.PAGES)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{pages.BEGIN}\n{pages.page_writing.END}\n", encoding="utf-8")

    def git(*words: str) -> str:
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(root), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "measured")
    alone["environment"]["commit"] = git("rev-parse", "HEAD")
    (results / "everyday_some.json").write_text(json.dumps(alone), encoding="utf-8")
    how = ["--results", str(results), "--root", str(root)]
    assert pages.main(how) == 0
    assert pages.CHANGED not in other.read_text(encoding="utf-8")
    kernel.write_text("changed", encoding="utf-8")
    git("commit", "--quiet", "--all", "--message", "kernels")
    # the pages are still what the records say
    assert pages.main([*how, "--check"]) == 0
    assert "README.md: the kernels have changed since" in capsys.readouterr().err
    assert pages.main(how) == 0
    assert pages.CHANGED in other.read_text(encoding="utf-8")
    assert pages.main([*how, "--check"]) == 0
    assert not pages.changed_since(alone["environment"]["commit"], root, pages.KERNELS["cpu"])
    # nobody can tell
    assert not pages.changed_since("c" * 40, root, ["triton"])
    assert not pages.changed_since("c" * 40, tmp_path, ["triton"])
