"""``contrastile bench`` from its options to its table, record, picture and exit code.

What is skipped, in which words, and how long it measures: contrastile/verify/calls.txt.
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


def test_times_are_those_of_the_same_implementation_aligned_and_have_quartiles() -> None:
    workload = Workload("ragged", 11, 8)
    found = Sweep(SweepSettings(("a",)), {})
    found.rows["a", workload] = Measurement(seconds=[1.0, 2.0, 4.0], matmul=[8000.0] * 3)
    found.rows["a", replace(workload, variant="aligned")] = Measurement(seconds=[1.0, 1.0, 1.0], matmul=[8000.0] * 3)
    ours, _ = found.record()["rows"]
    assert (ours["batch"], ours["width"], ours["time_over_aligned"], ours["time_over_plain"]) == (10, 5, 2, None)
    assert ours["seconds"] == {"lower": 1.5, "median": 2, "upper": 3, "samples": [1, 2, 4]}


def test_the_command_writes_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["--backend", "torch", "--batch", "64", "--width", "16", "--repeat", "2", "--json"]
    assert bench(*words, str(data), "--plot", str(picture)) == 0
    read = json.loads(data.read_text())
    ours, plain = read["rows"]
    assert (ours["implementation"], plain["implementation"]) == ("torch", "plain")
    assert ours["memory_over_plain"] == ours["peak_extra_bytes"] / plain["peak_extra_bytes"]
    assert plain["time_over_plain"] == 1
    assert len(ours["seconds"]["samples"]) == 2
    assert all(each["agrees"] for each in read["agreements"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "aligned, b = 64, d = 16" in out
    # time alone
    assert bench(*TINY, "--plot", str(picture.with_suffix(".pdf"))) == 0
    assert picture.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_numpy_is_measured_only_where_there_is_no_other() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    # it is float64, and for reference
    assert "numpy" not in command.settings(parser.parse_args([])).backends


def test_what_raises_while_it_is_checked_is_skipped_with_the_reason_smallest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("contrastile.bench.plain.clip", lambda *_, **how: 1 / 0)
    found = sweep.run(SweepSettings((), (64, 32), (8,)), lambda what, steps: None)
    why = "raised ZeroDivisionError: division by zero"
    assert [(size.batch, row.reason) for (_, size), row in found.rows.items()] == [(32, why), (64, why)]


@pytest.mark.parametrize("calls", [0, 20, 40])
def test_what_was_measured_before_an_interruption_is_shown(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interruption comes in one of the timed calls: while speeds are felt out, and in a round."""
    seconds, left = sweep.seconds, calls

    def interrupted(call: Any, device: str) -> float:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return seconds(call, device)

    monkeypatch.setattr(sweep, "seconds", interrupted)
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["--backend", "torch", "--batch", "32", "48", "--width", "8", "--repeat", "9", "--no-memory"]
    assert bench(*words, "--json", str(data), "--plot", str(picture)) == 130
    read = json.loads(data.read_text())
    done = sum(row["status"] == "measured" for row in read["rows"])
    assert capsys.readouterr().err.endswith(f"contrastile bench: interrupted after {done} of 4 measurements\n")
    assert read["interrupted"]
    samples = [len(row["seconds"]["samples"]) if row["status"] == "measured" else 0 for row in read["rows"]]
    # both implementations of a size have the same rounds
    assert samples[::2] == samples[1::2] or len(samples) == 1
    assert (sum(samples) > 0) == (calls >= 20) == picture.exists()
