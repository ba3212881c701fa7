"""``contrastile bench`` from its options to its table, record, picture and exit code."""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contrastile import cli
from contrastile.bench import command, report, sweep
from contrastile.bench.agreement import FEW_ROWS, check
from contrastile.bench.command import add_arguments
from contrastile.bench.sweep import Measurement, Sweep, SweepSettings
from contrastile.bench.workloads import Workload

TINY = ("--backend", "torch", "--batch", "32", "--width", "8", "--repeat", "1", "--no-memory")


@pytest.fixture(autouse=True, scope="module")
def a_small_check() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "check", partial(check, rows=FEW_ROWS))
        yield


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def bench(*words: str) -> int:
    return cli.main(["bench", *words])


def swept(**changes: Any) -> Sweep:
    values: dict[str, Any] = {"backends": ("torch",), "batches": (32,), "widths": (16,), "repeat": 1, "memory": False}
    return sweep.run(SweepSettings(**{**values, **changes}), lambda what, steps: None)


def test_everything_asked_for_is_measured_in_turns_smallest_first() -> None:
    variants, done = ("aligned", "ragged", "ids"), list[int]()
    backends = ("numpy", "torch")
    chosen = SweepSettings(backends, (65, 33), (16,), variants, repeat=3, memory=False)
    found = sweep.run(chosen, lambda what, steps: done.append(steps))
    assert sum(done) == sweep.steps(chosen)
    names = (*backends, "plain")
    assert list(found.rows) == [
        (name, Workload(variant, batch, 16)) for batch in (33, 65) for variant in variants for name in names
    ]
    rows = found.rows.values()
    assert all(len(row.seconds) == len(row.matmul) == 3 and min(*row.seconds, *row.matmul) > 0 for row in rows)


def test_figures_follow_from_the_samples() -> None:
    workload = Workload("ragged", 11, 8)
    assert workload.flops == 8 * 10 * 10 * 5
    found = swept(backends=(), batches=())
    found.rows["a", workload] = Measurement(seconds=[1.0, 2.0, 4.0], matmul=[8000.0] * 3, peak_bytes=10)
    found.rows["plain", workload] = Measurement(seconds=[2.0, 2.0, 2.0], matmul=[8000.0] * 3, peak_bytes=40)
    found.rows["a", replace(workload, variant="aligned")] = Measurement(seconds=[1.0, 1.0, 1.0], matmul=[8000.0] * 3)
    found.rows["c", workload] = Measurement("no room")
    ours, _, _, skipped = found.record()["rows"]
    assert (ours["batch"], ours["width"], ours["gflops"], ours["share_of_matmul"]) == (10, 5, 2e-6, 0.25)
    assert (ours["time_over_plain"], ours["time_over_aligned"], ours["memory_over_plain"]) == (1, 2, 0.25)
    assert ours["seconds"] == {"lower": 1.5, "median": 2, "upper": 3, "samples": [1, 2, 4]}
    assert (skipped["status"], skipped["reason"]) == ("skip", "no room")
    assert sweep.matmul_side(Workload("aligned", 8192, 512).flops, "cpu") == 4096
    assert sweep.matmul_side(1, "cpu") == 256


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


def test_what_is_not_given_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.settings(parsed("--quick", "--width", "7")).widths == (7,)
    assert command.settings(parsed("--quick")).batches == (256, 512)
    assert command.settings(parsed()).batches == (4096, 8192)
    # which is float64, and for reference
    assert "numpy" not in command.settings(parsed()).backends
    monkeypatch.setattr(command, "available", lambda: {"numpy": None, "torch": "missing"})
    assert command.settings(parsed()).backends == ("numpy",)


def test_what_does_not_fit_or_takes_too_long_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("raise --budget" in str(row.reason) and not row.seconds for row in swept(budget=0.0).rows.values())
    monkeypatch.setattr(sweep.memory, "available_bytes", lambda device: 10**6)
    ours, plain = swept(batches=(600,)).rows.values()
    assert ours.seconds
    assert not plain.seconds
    assert "GiB are available" in str(plain.reason)


def test_a_call_that_runs_out_of_memory_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(sweep.memory, "peak_extra", full)
    assert {row.reason for row in swept(memory=True).rows.values()} == {"raised MemoryError: no room"}


def test_no_speed_of_what_disagrees_or_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = "contrastile.bench.plain.clip"
    monkeypatch.setattr(wrong, lambda image, text, scale, ids: (image * text).sum() * scale)
    data = tmp_path / "bench.json"
    assert bench(*TINY, "--json", str(data)) == 1
    rows = {row["implementation"]: row for row in json.loads(data.read_text())["rows"]}
    assert rows["torch"]["status"] == "measured"
    assert (rows["plain"]["status"], "seconds" in rows["plain"]) == ("skip", False)
    assert "disagrees with the oracle" in rows["plain"]["reason"]

    def raising(*args: Any, **more: Any) -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(wrong, raising)
    assert [row.reason for row in swept().rows.values()] == ["raised RuntimeError: two lines", None]


@pytest.mark.parametrize(("times", "rounds"), [((1.0, 1.0), 3), ((1.0, 2.0), 12)])
def test_rounds_are_repeated_until_the_times_are_steady(
    times: tuple[float, float], rounds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = itertools.count()
    monkeypatch.setattr(sweep, "seconds", lambda call, device: times[next(turns) // 7 % 2])
    record = swept(repeat=3, most=12).record()
    assert {len(row["seconds"]["samples"]) for row in record["rows"]} == {rounds}
    report.show(record)
    assert ("this machine is busy" in capsys.readouterr().out) == (rounds > 3)


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
