"""A training step beside other gradient caches: a small run measures everybody, and goes on after a failure."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import page_tables as tables
import pytest
import torch

# tests/training is a folder of the same name
training: Any = importlib.import_module("training")
OURS, PLAIN = training.OURS, training.PLAIN


def broken(*_: Any) -> Any:
    raise RuntimeError("out of\nwhatever")


def test_a_smoke_run_measures_everything_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "training.json"
    made = {"GradCache": broken, "fails": lambda encoder: broken, OURS: training.ours}
    monkeypatch.setattr(training, "CACHES", made)
    monkeypatch.setattr(sys, "argv", f"training.py --device cpu --smoke --commit c --out {out}".split())
    assert training.main() == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    steps = {row["name"]: row for row in record["steps"]}
    for name in ("GradCache", "fails"):
        assert (steps[name]["status"], steps[name]["reason"]) == ("skip", "RuntimeError: out of whatever")
    assert (steps[OURS]["b"], len(steps[OURS]["samples"])) == (64, 2)
    assert steps[OURS]["pairs_per_second"] > 0
    # the weights stay as they are: all see the same embeddings, in bfloat16
    eps = torch.finfo(torch.bfloat16).eps
    assert steps[PLAIN]["loss"] == pytest.approx(steps[OURS]["loss"], abs=2 * eps * training.SCALE)
    assert [row["b"] for row in record["memory"]] == [64, 16]
    text = tables.training_section("training", record)
    assert "| fails | - | - | RuntimeError: out of whatever | - | - | - |" in text
    assert f"| {PLAIN} | 64 | - | " in text
