"""The GPU bench as far as a CPU can run it: every part but the fused kernels, and nothing timed that failed."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import pytest
import torch
from gpu_run import bench, reference
from gpu_run.chunked import chunked_loss
from gpu_run.machine import blocks_at_peak
from gpu_run.plan import SAFE, TORCH, Point
from gpu_run.record import Record, file_name
from gpu_run.timing import paired

from contrastile import problems
from contrastile.backends import load
from contrastile.backends.contract import Accuracy, Block, Options, Statistics
from contrastile.bench.workloads import Arguments
from contrastile.verify.bounds import ORACLE, bounds
from contrastile.verify.run import compare
from contrastile.verify.truth import Outcome, truth

B, D, SCALE = 61, 23, 14.3
SMOKE = ("--device", "cpu", "--smoke")


def run(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = gpu.main([*SMOKE, "--out", str(folder), *more])
    return code, json.loads((folder / file_name("cpu smoke")).read_text(encoding="utf-8"))


def test_every_part_measures_something(tmp_path: Path) -> None:
    code, found = run(tmp_path)
    assert code == 0
    measured = [row for row in found["times"] if row["status"] == "measured"]
    assert {row["group"] for row in measured} == {"aims", "peers", "grid"}
    assert {row["what"] for row in measured} == {"both", "forward", "backward"}
    assert {row["implementation"] for row in measured} == {TORCH, "open_clip formula", "chunked PyTorch, compiled"}
    for row in measured:
        assert len(row["milliseconds"]) == len(row["ceiling_tflops"]) == len(row["fraction"])
        assert min(row["milliseconds"]) > 0
    assert all(row["reason"] for part in ("times", "errors") for row in found[part] if row["status"] == "skip")
    assert {row["b"] for row in found["big"] if row["status"] == "measured"} == {257}
    assert all(row["holds"] for row in found["checks"])
    assert [row["verdict"] for row in found["verify"]] == ["pass"]


def test_a_backend_that_fails_verify_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = load("torch")

    def lse(block: Block, columns: bool, options: Options) -> Statistics:
        found = right.lse(block, columns, options)
        return replace(found, row_negative_lse=found.row_negative_lse + 0.01)

    monkeypatch.setattr(bench, "load", lambda name: replace(right, lse=lse))
    code, found = run(tmp_path, "--parts", "aims", "errors", "big")
    assert code == 1
    assert [row["verdict"] for row in found["verify"]] == ["fail"]
    for row in (*found["times"], *found["errors"], *found["big"]):
        assert row["implementation"] != TORCH or row["status"] == "skip"


def test_what_no_longer_fits_in_the_time_is_skipped(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--parts", "aims", "--seconds", "0")
    assert code == 0
    assert {row["reason"] for row in found["times"]} == {bench.NO_TIME}


def test_resuming_keeps_what_another_part_found(tmp_path: Path) -> None:
    run(tmp_path, "--parts", "checks", "--commit", "one")
    _, found = run(tmp_path, "--parts", "errors", "--commit", "one", "--resume")
    assert found["checks"]
    assert found["errors"]
    assert len(found["verify"]) == 1
    with pytest.raises(ValueError, match="another"):
        run(tmp_path, "--parts", "errors", "--commit", "two", "--resume")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--device cpu --smoke" in capsys.readouterr().err


def exact(given: Arguments) -> tuple[Any, Any]:
    """The problem and its truth by the oracle."""
    image, text = (x.detach().double().numpy() for x in (given.image, given.text))
    problem = problems.clip(image, text, float(given.scale.detach())).problem
    return problem, truth(problem)


def outcome(*values: Any) -> Outcome:
    loss, rows, columns, scale = (x.detach().double().numpy() for x in values)
    return Outcome(loss, rows, (columns,), scale)


def test_the_float64_reference_is_within_the_oracle_s_own_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_ENTRIES", 7 * B)
    given = reference.features(B, D, SCALE, "cpu", "float32")
    image, text, scale = given.image.detach(), given.text.detach(), float(given.scale.detach())
    found, index = reference.whole(given), torch.arange(B)
    d_image = reference.gradient_rows(image, text, index, scale, found.row_lse, found.column_lse)
    d_text = reference.gradient_rows(text, image, index, scale, found.column_lse, found.row_lse)
    problem, true = exact(given)
    # all exponentials are taken against the one reference 0
    allowed = bounds(problem, true, replace(ORACLE, shared_reference=True), "float64")
    got = outcome(found.loss, d_image, d_text, found.d_scale)
    worst = compare(got, true.outcome, allowed, ("loss", "rows", "columns", "scale"))
    assert worst.ratio < 1, worst
    for side, lse in (("row", found.row_lse), ("column", found.column_lse)):
        parts = [
            (getattr(x, f"{side}_{kind}_lse")) for x in (true.outcome, allowed) for kind in ("negative", "positive")
        ]
        # an error of the whole is a mean of those of its parts, and a rounding more
        exact_lse, most = np.logaddexp(*parts[:2]), 2 * np.maximum(*parts[2:])
        assert np.all(np.abs(lse.numpy() - exact_lse) < most)
        if side == "row":
            sampled = reference.lse_rows(image, text, index[5:9], scale).numpy()
            assert np.all(np.abs(sampled - exact_lse[5:9]) < most[5:9])


def test_the_chunked_loss_is_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_run.chunked.CHUNK", 16)
    given = reference.features(B, D, SCALE, "cpu", "float32")
    leaves = given.image, given.text, given.scale
    loss = chunked_loss(*leaves)
    problem, true = exact(given)
    allowed = bounds(problem, true, Accuracy(unit=2.0**-24, accumulate_unit=2.0**-24), "float32")
    worst = compare(
        outcome(loss, *torch.autograd.grad(loss, leaves)), true.outcome, allowed, ("loss", "rows", "columns", "scale")
    )
    assert worst.ratio < 1, worst


def test_a_scale_whose_exponentials_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        reference.whole(reference.features(5, 4, 2 * SAFE, "cpu", "float32"))


def test_samples_hold_both_ends_and_no_row_twice() -> None:
    index = reference.sample(1009, 31, "cpu").numpy()
    assert {0, 1008} <= set(index.tolist())
    assert len(np.unique(index)) == len(index) <= 31
    assert reference.sample(7, 31, "cpu").tolist() == list(range(7))


def test_the_peak_is_of_what_is_live_together() -> None:
    events = [
        ("alloc", 1, 300),
        ("alloc", 2, 50),
        ("free_requested", 1, 300),
        ("free_completed", 1, 300),
        ("free_requested", 99, 7),
        ("alloc", 1, 200),
        ("alloc", 3, 200),
        ("alloc", 4, 30),
        ("free_requested", 3, 200),
        ("alloc", 5, 100),
    ]
    assert blocks_at_peak(events) == [(200, 2), (50, 1), (30, 1)]


class Clock:
    """A ceiling that slows down as it works: its n-th sample reads 100 - n."""

    device = "cpu"

    def __init__(self) -> None:
        self.count = 0

    def rate(self, slot: float) -> float:
        self.count += 1
        return 101.0 - self.count


def test_a_sample_is_paired_with_the_ceiling_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("one", "two")}
    monkeypatch.setattr("gpu_run.timing.elapsed", lambda call, count, device: (call(), 1e3)[1])
    found, reasons = paired(calls, Clock(), 0.5, 3, 2.0, nullcontext())
    assert not reasons
    # two calls of each to begin with; patience allows two samples of one second; each round begins with another one
    assert order == ["one", "one", "two", "two", "one", "two", "two", "one"]
    assert found["one"].ceiling == [98.5, 94.5]
    assert found["two"].ceiling == [97.5, 95.5]


def test_what_raises_is_left_out_and_says_why() -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    found, reasons = paired({"broken": broken, "slow": lambda: None}, Clock(), 0.001, 1, 1.0, nullcontext())
    assert reasons == {"broken": "RuntimeError: no kernel image"}
    assert list(found) == ["slow"]


def test_flops_of_the_directions_add_up() -> None:
    parts = [Point(96, 40, what=what).flops for what in ("forward", "backward", "both")]
    assert parts[0] + parts[1] == parts[2] == 8 * 96 * 96 * 40


def test_a_record_replaces_rows_of_the_same_key(tmp_path: Path) -> None:
    record = Record(tmp_path / "x.json", {"device": "x"}, {"seconds": 1}, resume=False)
    for value in (1.0, float("nan")):
        record.add("checks", {"check": "a", "found": value}, ("check",))
    record.add("checks", {"check": "b", "found": 1 / 3}, ("check",))
    rows = json.loads((tmp_path / "x.json").read_text())["checks"]
    assert rows == [{"check": "a", "found": None}, {"check": "b", "found": 0.333333}]


def test_what_was_measured_stays_where_the_same_is_skipped_later(tmp_path: Path) -> None:
    record = Record(tmp_path / "x.json", {"device": "x"}, {"seconds": 1}, resume=False)
    for status in ("skip", "measured", "skip"):
        record.add("times", {"name": "a", "status": status}, ("name",))
    assert record.data["times"] == [{"name": "a", "status": "measured"}]
