"""A training step beside other gradient caches: all see the same loss, and the pages show what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import everyday
import page_tables as tables
import pytest
import torch
from peers import caches

OURS, PLAIN = "contrastile, cached_step", "PyTorch, no cache"


def broken(encoder: Any) -> Any:
    raise RuntimeError("out of\nwhatever")


def test_every_cache_is_timed_and_a_failure_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {OURS: caches.ours, "GradCache": broken, PLAIN: caches.plain}
    monkeypatch.setattr(caches, "CACHES", made)
    out = tmp_path / "training.json"
    words = ["--device", "cpu", "--smoke", "--part", "training", "--only", "cached_step", "--backends", "torch"]
    words += ["--slot", "0.002", "--rounds", "2", "--commit", "c", "--out", str(out)]
    assert everyday.main(words) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    rows = tables.measured(record, "training", name=OURS)
    assert {(row["b"], row["chunk"]) for row in rows} >= {(96, 128), (96, 16), (33, 16), (40, 128)}
    assert all(len(row["milliseconds"]) == 2 and row["peak_bytes"] > 0 for row in rows)
    text = tables.training_section("training", record)
    assert "| GradCache | - | - | RuntimeError: out of whatever | - | - | - |" in text
    assert f"| {PLAIN} | 96 | " in text


def test_all_see_the_same_loss() -> None:
    ours, plain = (caches.step(name, 64, 24, 16, torch.device("cpu")) for name in (OURS, PLAIN))
    # the weights stay as they are, in bfloat16
    eps = torch.finfo(torch.bfloat16).eps
    assert ours().item() == pytest.approx(plain().item(), abs=2 * eps * caches.SCALE)
    assert ours().item() == pytest.approx(plain().item(), abs=2 * eps * caches.SCALE)
