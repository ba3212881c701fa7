"""``contrastile bench``: its options, table, record, picture and exit code.

contrastile/verify/calls.txt tests the messages of skipped measurements and the duration.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contrastile import cli
from contrastile.bench import command, sweep
from contrastile.bench.agreement import FEW_ROWS, check
from contrastile.bench.peers import Workload
from contrastile.bench.sweep import Measurement, Sweep, SweepSettings

TINY = ("--backend", "torch", "--batch", "32", "--width", "8", "--repeat", "1", "--no-memory")


@pytest.fixture(autouse=True, scope="module")
def a_small_check() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "check", partial(check, rows=FEW_ROWS))
        yield


def bench(*words: str) -> int:
    return cli.main(["bench", *words])


def test_a_record_has_quartiles_and_the_time_over_the_aligned_batch() -> None:
    workload = Workload("ragged", 11, 8)
    result = Sweep(SweepSettings(("a",)), {})
    result.rows["a", workload] = Measurement(seconds=[1.0, 2.0, 4.0], matmul=[8000.0] * 3)
    result.rows["a", replace(workload, variant="aligned")] = Measurement(seconds=[1.0, 1.0, 1.0], matmul=[8000.0] * 3)
    row, _ = result.record()["rows"]
    assert (row["batch"], row["width"], row["time_over_aligned"], row["time_over_plain"]) == (10, 5, 2, None)
    assert row["seconds"] == {"lower": 1.5, "median": 2, "upper": 3, "samples": [1, 2, 4]}


def test_the_command_writes_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["--backend", "torch", "--batch", "64", "--width", "16", "--repeat", "2", "--json"]
    assert bench(*words, str(data), "--plot", str(picture)) == 0
    record = json.loads(data.read_text())
    ours, plain = record["rows"]
    assert (ours["implementation"], plain["implementation"]) == ("torch", "plain")
    assert ours["memory_over_plain"] == ours["peak_extra_bytes"] / plain["peak_extra_bytes"]
    assert plain["time_over_plain"] == 1
    assert len(ours["seconds"]["samples"]) == 2
    assert all(agreement["agrees"] for agreement in record["agreements"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "aligned, b = 64, d = 16" in out
    assert bench(*TINY, "--plot", str(picture.with_suffix(".pdf"))) == 0
    assert picture.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_numpy_is_measured_only_without_other_backends() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    # the numpy backend computes in float64 and is a reference
    assert "numpy" not in command.settings(parser.parse_args([])).backends


def test_implementations_that_raise_in_the_check_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("contrastile.bench.plain.clip", lambda *_, **options: 1 / 0)
    results = sweep.run(SweepSettings((), (64, 32), (8,)), lambda what, steps: None)
    reason = "raised ZeroDivisionError: division by zero"
    assert [(size.batch, row.reason) for (_, size), row in results.rows.items()] == [(32, reason), (64, reason)]


@pytest.mark.parametrize("calls", [0, 20, 40])
def test_measurements_before_an_interruption_are_reported(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A timed call is interrupted, either one that estimates the speed or one of a round."""
    seconds, remaining = sweep.seconds, calls

    def interrupted(call: Any, device: str) -> float:
        nonlocal remaining
        if remaining == 0:
            raise KeyboardInterrupt
        remaining -= 1
        return seconds(call, device)

    monkeypatch.setattr(sweep, "seconds", interrupted)
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["--backend", "torch", "--batch", "32", "48", "--width", "8", "--repeat", "9", "--no-memory"]
    assert bench(*words, "--json", str(data), "--plot", str(picture)) == 130
    record = json.loads(data.read_text())
    measured = sum(row["status"] == "measured" for row in record["rows"])
    assert capsys.readouterr().err.endswith(f"contrastile bench: interrupted after {measured} of 4 measurements\n")
    assert record["interrupted"]
    samples = [len(row["seconds"]["samples"]) if row["status"] == "measured" else 0 for row in record["rows"]]
    # both implementations of a size have the same rounds
    assert samples[::2] == samples[1::2] or len(samples) == 1
    assert (sum(samples) > 0) == (calls >= 20) == picture.exists()
