"""What docs/how-to/faults.md says was measured is within the deadline."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("measure_faults")


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_every_fault_ends_every_rank_within_the_deadline() -> None:
    made = script()
    data = record("faults")
    rows = data["rows"]
    expected = {(f, p, launcher) for f in made.FAULTS for p in made.PLACES for launcher in made.LAUNCHERS}
    assert {(row["fault"], row["where"], row["launcher"]) for row in rows} == expected
    for row in rows:
        held(row, data)
        assert row["raised"] == row["named"], row


def test_every_fault_on_gpus_ends_every_rank_within_the_deadline() -> None:
    made = script()
    data = record("faults_gpus")
    rows = data["rows"]
    expected = [("nccl", f, by) for f in made.FAULTS for by in made.LAUNCHERS]
    assert [(row["carried by"], row["fault"], row["launcher"]) for row in rows] == expected
    for row in rows:
        held(row, data)
        assert row["named"] <= row["raised"] + row["ended"] < data["environment"]["ranks"], row


@pytest.mark.parametrize("cuda", [False, True], ids=["CPU", "GPUs"])
def test_no_mistake_gives_a_wrong_number(cuda: bool) -> None:
    made = script()
    data = record("mistakes_gpus" if cuda else "mistakes")
    rows = data["rows"]
    sizes = (2,) if cuda else (2, 3)
    exchanges = ("ring", "gather", "replicate") if cuda else ("ring", "gather")
    expected = [(m, e, by, n) for m in made.MISTAKES for e in exchanges for by in made.CARRIERS for n in sizes]
    assert [(row["mistake"], row["exchange"], row["by"], row["ranks"]) for row in rows] == expected
    for row in rows:
        assert row["orphans"] == 0, row
        replicated = row["exchange"] == "replicate"
        # of a forward that is skipped two steps come before the wait; replicated, they are the first to be captured
        latest = (3 if replicated else 1) * data["environment"]["deadline"]
        assert row["heard"] is None or row["heard"] < latest, row
        if replicated and row["mistake"] in ("skipped backward", "swapped backwards", "broken backward"):
            # no message: what a rank does in a backward concerns no other
            assert (row["all right"], row["raised"], row["code"]) == (row["ranks"], 0, 0), row
            continue
        if row["mistake"] == "two models":
            # steps, models, ranks
            assert (row["right"], row["all right"], row["code"]) == (5 * 2 * row["ranks"], row["ranks"], 0), row
            continue
        assert row["code"] not in (0, 124), row
        told = row["raised"] + row["gave up"] + row["all right"]
        # every rank raises, unless the launcher ends it because another rank has ended
        assert told <= row["ranks"] if cuda or row["mistake"] == "raised between" else told == row["ranks"], row


def held(row: dict[str, Any], data: dict[str, Any]) -> None:
    assert row["seconds"] < data["environment"]["deadline"], row
    assert row["orphans"] == 0, row
    assert row["code"] not in (0, 124), row
