"""A training step beside other gradient caches: what the script records, and the table of its record."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import pytest
import torch
from harness import caches

# tests/training is a folder of the same name
training: Any = importlib.import_module("training")
BY_HAND = "fifteen lines around info_nce"


def broken(*_: Any) -> Any:
    raise RuntimeError("out of\nwhatever")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a smoke run with one competitor that cannot be imported and one that fails."""
    out = tmp_path_factory.mktemp("out") / "new" / "training.json"
    ours = {name: caches.CACHES[name] for name in (training.OURS, BY_HAND)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "CACHES", {"GradCache": broken, "fails": lambda encoder: broken, **ours})
        patch.setattr(sys, "argv", f"training.py --device cpu --smoke --commit c --out {out}".split())
        assert training.main() == 0
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_a_smoke_run_measures_everything_and_goes_on_after_a_failure(record: dict[str, Any]) -> None:
    steps = {row["name"]: row for row in record["steps"]}
    for name in ("GradCache", "fails"):
        assert (steps[name]["status"], steps[name]["reason"]) == ("skip", "RuntimeError: out of whatever")
    for name in (training.OURS, BY_HAND):
        assert (steps[name]["b"], len(steps[name]["samples"])) == (64, 2)
        assert steps[name]["pairs_per_second"] > 0
    # the weights stay as they are: all see the same embeddings, in bfloat16
    eps = torch.finfo(torch.bfloat16).eps
    assert steps[BY_HAND]["loss"] == steps[training.OURS]["loss"]
    assert steps[training.PLAIN]["loss"] == pytest.approx(steps[training.OURS]["loss"], abs=2 * eps * caches.SCALE)
    assert [row["b"] for row in record["memory"]] == [64, 16]
    assert record["environment"]["commit"] == "c"


def test_the_gradients_agree_with_those_of_the_plain_step(record: dict[str, Any]) -> None:
    errors = {(row["name"], row["autocast"]): row["error"] for row in record["agreement"]}
    # sums of 64 terms in float32
    assert errors[training.OURS, False] < 64 * torch.finfo(torch.float32).eps
    assert errors[training.OURS, False] < errors[training.OURS, True] < 1
