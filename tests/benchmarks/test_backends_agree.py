"""The bench that holds two backends to each other, as far as a CPU can run it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import agreement
import pytest

from contrastile.backends import load, registry
from contrastile.backends.contract import Block, Options, Statistics

FEW = ("--device", "cpu", "--examples", "12")


def test_backends_that_agree_are_said_to(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert agreement.main(["torch", "numpy", *FEW, "--out", str(path)]) == agreement.AGREE
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["backends"] == ["torch", "numpy"]
    taken = load("torch").dtypes & load("numpy").dtypes
    assert {row["dtype"] for row in found["rows"]} == taken
    for row in found["rows"]:
        assert row["agree"]
        assert 0 <= row["ratio"] <= 1
        assert row["problems"] >= 12 // len(taken)


def test_a_backend_that_is_off_disagrees_and_the_problem_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = load("torch")

    def lse(block: Block, columns: bool, options: Options) -> Statistics:
        found = right.lse(block, columns, options)
        return replace(found, row_positive=found.row_positive + 1)

    changes: dict[str, Any] = {"lse": lse}
    wrong = replace(right, **changes)
    monkeypatch.setattr(registry, "load", lambda name: wrong if name == "wrong" else right)
    assert agreement.main(["wrong", "torch", *FEW, "--dtype", "float32"]) == agreement.DISAGREE
    assert "drawn:m=" in capsys.readouterr().out


def test_a_backend_that_is_missing_is_no_agreement(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement.main(["torch", "nowhere:backend", *FEW]) == agreement.CANNOT
    assert "nowhere" in capsys.readouterr().err
