"""The measurements as far as processes on a CPU can run them: a record is made, and nothing is timed that failed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import everyday
import harness
import make_pages
import page_tables as tables
import pytest
import tiny_models
import torch
import training_steps
from harness import Ranks, paired
from peers.timed import PLAINS

from contrastile.bench import plain

ALONE = Ranks(torch.device("cpu"), {1: None})
QUICK = (
    *("--device", "cpu", "--backends", "torch", "--without", "compiled", "--slot", "0.002", "--rounds", "2"),
    *("--commit", "one", "--smoke"),
)


def measured(found: dict[str, Any]) -> list[dict[str, Any]]:
    assert all(row["reason"] for row in found["times"] if row["status"] == "skip")
    return [row for row in found["times"] if row["status"] == "measured"]


def launched(out: Path, *words: str) -> list[dict[str, Any]]:
    """What a process of its own measures: torch's compiler warns of itself when it is imported."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return measured(json.loads(out.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_loss_is_timed(tmp_path: Path) -> None:
    rows = launched(tmp_path / "new" / "record.json", everyday.__file__, *QUICK)
    assert {(row["loss"], row["name"]) for row in rows} == {
        (loss, name) for loss in PLAINS for name in ("torch", "plain")
    }
    assert all(min(row["milliseconds"]) > 0 for row in rows)


def test_a_record_has_shares_of_the_ceiling_and_grows(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    for part in ("steps", "peers"):
        words = ["--part", part, "--only", "b=40 d=24", "--out", str(out)]
        assert everyday.main([*QUICK, *words]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = measured(found)
    assert {row["part"] for row in rows} == {"steps", "peers"}
    assert {row["name"] for row in rows} == {"contrastile torch", "open_clip formula", "chunked PyTorch, compiled"}
    for row in rows:
        assert len(row["milliseconds"]) == len(row["ceiling_tflops"]) == len(row["fraction"]) == 2
        assert row["peak_bytes"] > 0
    assert [row["verdict"] for row in found["verify"]] == ["pass"]
    # what another commit found, or one that is not known, is not kept
    assert everyday.main([*QUICK, *words, "--commit", "two"]) == 0
    assert {row["part"] for row in json.loads(out.read_text(encoding="utf-8"))["times"]} == {"peers"}
    # the pages read it
    text = tables.gpu_section("record", found)
    assert "| open_clip formula | " in text


@pytest.mark.slow
def test_two_ranks_run_the_same_code(tmp_path: Path) -> None:
    ranks = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    words = *ranks, everyday.__file__, *QUICK, "--part", "steps", "peers", "--only", "b=64 d=24"
    rows = launched(tmp_path / "record.json", *words)
    scaled = {(row["n"], row["exchange"]) for row in rows if row["part"] == "steps"}
    assert scaled == {(1, "local"), (2, "ring"), (2, "gather"), (2, "auto")}
    assert {row["name"] for row in rows if row["part"] == "peers"} == {"contrastile torch", "open_clip formula"}


def test_nothing_is_timed_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    words = ["--part", "steps", "--only", "b=40 d=24", "--backends", "ill_backends:broken", "torch"]
    assert everyday.main([*QUICK, *words, "--out", str(out)]) == 1
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["verdict"] for row in found["verify"]] == ["fail", "pass"]
    assert {row["name"] for row in found["times"]} == {"contrastile torch"}


def test_every_call_of_the_readme_is_timed() -> None:
    for wanted, there in ((tables.CALLS, everyday.EVERYDAY), (tables.CALLS_OF_RANKS, everyday.OF_RANKS)):
        assert set(wanted) <= {case.label for case in there}


def test_a_sample_is_paired_with_the_ceiling_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order, readings = list[str](), iter(range(100, 0, -1))
    calls = {name: lambda name=name: order.append(name) for name in ("one", "two")}
    monkeypatch.setattr(harness, "elapsed", lambda ranks, call, count: (call(), 1.0)[1])
    found = paired(ALONE, calls, lambda: float(next(readings)), 0.5, 2, 2.0)
    # two calls of each to begin with; each round begins with another one
    assert order == ["one", "one", "two", "two", "one", "two", "two", "one"]
    assert found["one"]["ceiling_tflops"] == [99.5, 96.5]
    assert found["two"]["ceiling_tflops"] == [98.5, 97.5]


def test_what_raises_or_is_too_slow_is_left_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(harness, "elapsed", lambda ranks, call, count: 2.0)
    found = paired(ALONE, {"broken": broken, "slow": lambda: None}, lambda: 1.0, 0.1, 1, 1.0)
    assert found["broken"] == {"status": "skip", "reason": "RuntimeError: no kernel image"}
    assert "one call takes 2 s" in found["slow"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("way", training_steps.LIBRARIES["caches"][-1])
def test_every_cache_has_the_loss_of_the_whole_batch_and_adds_gradients(way: str) -> None:
    pytest.importorskip({"GradCache": "gradcache"}.get(way, "sentence_transformers"))
    pair = torch.randint(20, (2, 11, 6), generator=torch.Generator().manual_seed(1))
    encoder = training_steps.Mean(tiny_models.bert(20))
    loss = training_steps.add_gradients(way, encoder, 3, pair)
    exact = plain.info_nce(*map(encoder, pair), training_steps.SCALE)
    # the features are those of bfloat16 either way, and the logits are narrowed
    assert abs(loss - exact).item() <= 2 * torch.finfo(torch.bfloat16).eps * training_steps.SCALE
    assert all(p.grad.any() for name, p in encoder.named_parameters() if "pooler" not in name)


def test_a_page_that_says_something_else_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    shutil.copy(make_pages.ROOT / "docs" / "results" / "gpu_nvidia_h200.json", tmp_path / "docs" / "results")
    (tmp_path / "README.md").write_text("no part is made\n")
    page = tmp_path / "docs" / "gpu.md"
    page.write_text("before\n<!-- made by scripts/make_pages.py: one GPU -->\nstale\n<!-- end -->\nafter\n")
    how = ["--root", str(tmp_path)]
    assert make_pages.main([*how, "--check"]) == 1
    assert make_pages.main(how) == 0
    assert make_pages.main([*how, "--check"]) == 0
    text = page.read_text()
    assert re.search("^before\n<!-- .* -->\n\n### NVIDIA H200\n.*\n\n<!-- end -->\nafter\n", text, re.DOTALL)
    page.write_text(re.sub(r"\d\d\.\d %", "0.1 %", text, count=1))
    assert make_pages.main([*how, "--check"]) == 1
    page.write_text(text)
    chart = tmp_path / "docs" / "assets" / "home.svg"
    chart.write_text(chart.read_text().replace("NVIDIA H200", "Old GPU"))
    assert make_pages.main([*how, "--check"]) == 1
    assert "docs/assets/home.svg is stale" in capsys.readouterr().out
