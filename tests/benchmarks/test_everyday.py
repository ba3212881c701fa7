"""The measurements that run on a CPU: they write a record, and time no backend that failed verify."""

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


def measured_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    assert all(row["reason"] for row in record["times"] if row["status"] == "skip")
    return [row for row in record["times"] if row["status"] == "measured"]


def run_in_process(path: Path, *words: str) -> list[dict[str, Any]]:
    """The measured rows of another process, because the import of torch's compiler warns."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, "--out", str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return measured_rows(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_loss_is_timed(tmp_path: Path) -> None:
    rows = run_in_process(tmp_path / "new" / "record.json", everyday.__file__, *QUICK)
    assert {(row["loss"], row["name"]) for row in rows} == {
        (loss, name) for loss in PLAINS for name in ("torch", "plain")
    }
    assert all(min(row["milliseconds"]) > 0 for row in rows)


def test_a_record_has_fractions_of_the_ceiling_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for part in ("steps", "peers"):
        words = ["--part", part, "--only", "b=40 d=24", "--out", str(path)]
        assert everyday.main([*QUICK, *words]) == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = measured_rows(record)
    assert {row["part"] for row in rows} == {"steps", "peers"}
    assert {row["name"] for row in rows} == {"contrastile torch", "open_clip formula", "chunked PyTorch, compiled"}
    for row in rows:
        assert len(row["milliseconds"]) == len(row["ceiling_tflops"]) == len(row["fraction"]) == 2
        assert row["peak_bytes"] > 0
    assert [row["verdict"] for row in record["verify"]] == ["pass"]
    # a record drops the rows of another commit and of an unknown one
    assert everyday.main([*QUICK, *words, "--commit", "two"]) == 0
    assert {row["part"] for row in json.loads(path.read_text(encoding="utf-8"))["times"]} == {"peers"}
    text = tables.gpu_section("record", record)
    assert "| open_clip formula | " in text


@pytest.mark.slow
def test_two_ranks_run_the_same_code(tmp_path: Path) -> None:
    ranks = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    words = *ranks, everyday.__file__, *QUICK, "--part", "steps", "peers", "--only", "b=64 d=24"
    rows = run_in_process(tmp_path / "record.json", *words)
    scaled = {(row["n"], row["exchange"]) for row in rows if row["part"] == "steps"}
    assert scaled == {(1, "local"), (2, "ring"), (2, "gather"), (2, "auto")}
    assert {row["name"] for row in rows if row["part"] == "peers"} == {"contrastile torch", "open_clip formula"}


def test_a_backend_that_failed_verify_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    words = ["--part", "steps", "--only", "b=40 d=24", "--backends", "ill_backends:broken", "torch"]
    assert everyday.main([*QUICK, *words, "--out", str(path)]) == 1
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [row["verdict"] for row in record["verify"]] == ["fail", "pass"]
    assert {row["name"] for row in record["times"]} == {"contrastile torch"}


def test_every_call_of_the_readme_is_timed() -> None:
    for calls, cases in ((tables.CALLS, everyday.EVERYDAY), (tables.CALLS_OF_RANKS, everyday.OF_RANKS)):
        assert set(calls) <= {case.label for case in cases}


def test_a_sample_is_paired_with_the_ceiling_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order, readings = list[str](), iter(range(100, 0, -1))
    calls = {name: lambda name=name: order.append(name) for name in ("one", "two")}
    monkeypatch.setattr(harness, "elapsed", lambda ranks, call, count: (call(), 1.0)[1])
    rows = paired(ALONE, calls, lambda: float(next(readings)), 0.5, 2, 2.0)
    # two calls of each at first; then each round begins with another call
    assert order == ["one", "one", "two", "two", "one", "two", "two", "one"]
    assert rows["one"]["ceiling_tflops"] == [99.5, 96.5]
    assert rows["two"]["ceiling_tflops"] == [98.5, 97.5]


def test_calls_that_raise_or_are_too_slow_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(harness, "elapsed", lambda ranks, call, count: 2.0)
    rows = paired(ALONE, {"broken": broken, "slow": lambda: None}, lambda: 1.0, 0.1, 1, 1.0)
    assert rows["broken"] == {"status": "skip", "reason": "RuntimeError: no kernel image"}
    assert "one call takes 2 s" in rows["slow"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("library", training_steps.LIBRARIES["caches"][-1])
def test_every_cache_has_the_loss_of_the_whole_batch_and_adds_gradients(library: str) -> None:
    pytest.importorskip({"GradCache": "gradcache"}.get(library, "sentence_transformers"))
    pair = torch.randint(20, (2, 11, 6), generator=torch.Generator().manual_seed(1))
    encoder = training_steps.Mean(tiny_models.bert(20))
    loss = training_steps.add_gradients(library, encoder, 3, pair)
    expected = plain.info_nce(*map(encoder, pair), training_steps.SCALE)
    # both losses have features of bfloat16, and the logits are rounded to it
    assert abs(loss - expected).item() <= 2 * torch.finfo(torch.bfloat16).eps * training_steps.SCALE
    assert all(p.grad.any() for name, p in encoder.named_parameters() if "pooler" not in name)


def test_a_stale_page_or_chart_is_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    shutil.copy(make_pages.ROOT / "docs" / "results" / "gpu_nvidia_h200.json", tmp_path / "docs" / "results")
    (tmp_path / "README.md").write_text("no part is made\n")
    page = tmp_path / "docs" / "gpu.md"
    page.write_text("before\n<!-- made by scripts/make_pages.py: one GPU -->\nstale\n<!-- end -->\nafter\n")
    options = ["--root", str(tmp_path)]
    assert make_pages.main([*options, "--check"]) == 1
    assert make_pages.main(options) == 0
    assert make_pages.main([*options, "--check"]) == 0
    text = page.read_text()
    assert re.search("^before\n<!-- .* -->\n\n## NVIDIA H200\n.*\n\n<!-- end -->\nafter\n", text, re.DOTALL)
    page.write_text(re.sub(r"\d\d\.\d %", "0.1 %", text, count=1))
    assert make_pages.main([*options, "--check"]) == 1
    page.write_text(text)
    chart = tmp_path / "docs" / "assets" / "home.svg"
    chart.write_text(chart.read_text().replace("NVIDIA H200", "Old GPU"))
    assert make_pages.main([*options, "--check"]) == 1
    assert "docs/assets/home.svg is stale" in capsys.readouterr().out
