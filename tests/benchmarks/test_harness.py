"""The harness as far as processes on a CPU can run it: every part measures, and nothing is timed that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run
import torch
from harness import bench, float64, parts, timing
from harness.chunked import chunked_loss
from harness.machine import linked
from harness.plan import SMOKE, Point
from harness.ranks import Ranks
from harness.record import Record, file_name
from harness.timing import paired

from contrastile import problems
from contrastile.backends import load
from contrastile.backends.contract import Accuracy
from contrastile.verify.arithmetic import Spread
from contrastile.verify.bounds import ORACLE, bounds
from contrastile.verify.comparison import compare
from contrastile.verify.truth import Outcome, truth

ROOT = Path(__file__).resolve().parents[2]
B, D, SCALE = 61, 23, 14.3
CPU = torch.device("cpu")
ALONE = Ranks(CPU, {1: None})
SMOKES = ("--device", "cpu", "--smoke")
FIELDS = ("loss", "rows", "columns", "scale")

WRONG = """
from dataclasses import replace
from contrastile.backends.torch import backend as right

def lse(block, columns, options):
    found = right.lse(block, columns, options)
    return replace(found, row_negative_lse=found.row_negative_lse + 0.01)

backend = replace(right, name="wrong", lse=lse)
"""


def ran(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = run.main([*SMOKES, "--out", str(folder), *more])
    return code, json.loads((folder / file_name("cpu smoke")).read_text(encoding="utf-8"))


def launched(ranks: int, folder: Path, *more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "benchmarks" / "run.py"), *SMOKES, "--out", str(folder), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    path = folder / file_name("cpu smoke", ranks)
    return done, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def most(b: int, d: int, scale: float, ranks: int = 1, samples: int = 0) -> dict[str, float]:
    """The largest errors that a record's row may have, from the derived bounds of every element.

    Args:
        b: pairs, of unit features in float32.
        d: width.
        scale: of the logits.
        ranks: that gather.
        samples: rows of each rank; 0 for all.
    """
    image, text = float64.pairs(0, b, d, CPU, torch.float32)
    problem = problems.clip(image.double().numpy(), text.double().numpy(), scale).problem
    true, rows = truth(problem), b // ranks
    spread = Spread((rows,) * ranks, (b,)) if ranks > 1 else None
    allowed = bounds(problem, true, load("torch").accuracy("float32", "cpu"), "float32", spread=spread)
    own = float64.sample(rows, samples or rows, CPU)
    index = torch.cat([own + rank * rows for rank in range(ranks)]).numpy()

    def share(bound: Any, exact: Any) -> float:
        return float(np.linalg.norm(bound) / np.linalg.norm(exact))

    found = {"loss": share(allowed.loss, true.outcome.loss), "d_scale": share(allowed.scale, true.outcome.scale)}
    found["d_image"] = share(allowed.rows[index], true.outcome.rows[index])
    found["d_text"] = share(allowed.columns[0][index], true.outcome.columns[0][index])
    for side, name in (("row", "image_lse"), ("column", "text_lse")):
        both = [getattr(allowed, f"{side}_{kind}_lse") for kind in ("negative", "positive")]
        # an error of the whole is a mean of those of its parts, and a rounding more
        found[name] = 2 * float(np.maximum(*both).max())
    return found


def measured(found: dict[str, Any]) -> list[dict[str, Any]]:
    assert all(row["reason"] for row in found["times"] if row["status"] == "skip")
    return [row for row in found["times"] if row["status"] == "measured"]


@pytest.mark.slow
def test_every_part_measures_something(tmp_path: Path) -> None:
    code, found = ran(tmp_path)
    assert code == 0
    rows = measured(found)
    assert {row["part"] for row in rows} == {"steps", "peers"}
    assert {row["what"] for row in rows} == {"both", "forward", "backward"}
    names = {"contrastile torch", "open_clip formula", "chunked PyTorch, compiled"}
    assert {row["name"] for row in rows} == names
    for row in rows:
        assert len(row["milliseconds"]) == len(row["ceiling_tflops"]) == len(row["fraction"]) == 2
        assert min(row["milliseconds"]) > 0
        # where there is no device to queue for, the host's time is all of it
        assert row["host_ms"] == row["milliseconds"]
        assert row["peak_bytes"] > 0
    assert {row["b"] for row in found["big"] if row["status"] == "measured"} == {257}
    assert [row["verdict"] for row in found["verify"]] == ["pass"]


@pytest.mark.slow
def test_two_ranks_run_the_same_code(tmp_path: Path) -> None:
    done, found = launched(2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = measured(found)
    scaled = {(row["n"], row["exchange"]) for row in rows if row["part"] == "steps"}
    assert scaled == {(1, "local"), (2, "ring"), (2, "gather"), (2, "auto")}
    assert {row["name"] for row in rows if row["part"] == "peers"} == {"contrastile torch", "open_clip formula"}
    assert [(row["verdict"], row["n"]) for row in found["verify"]] == [("pass", 2)]
    (largest,) = found["big"]
    assert largest["b"] == SMOKE.big[1][0][0]
    allowed = most(largest["b"], largest["d"], largest["scale"], 2, largest["samples"] // 2)
    assert all(largest[name] < allowed[name] for name in ("image_lse", "text_lse", "d_image", "d_text"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_timed_that_failed(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy_backend.py").write_text(WRONG, encoding="utf-8")
    given = "--backends", "noisy_backend:backend", "--parts", "steps", "big"
    if ranks == 1:
        monkeypatch.syspath_prepend(tmp_path)
        code, found = ran(tmp_path, *given)
    else:
        done, found = launched(ranks, tmp_path, *given)
        code = done.returncode
    assert code != 0
    assert [row["verdict"] for row in found["verify"]] == ["fail"]
    assert not found["times"]
    assert not found["big"]


def test_what_no_longer_fits_in_the_time_is_skipped(tmp_path: Path) -> None:
    code, found = ran(tmp_path, "--parts", "steps", "--seconds", "0")
    assert code == 0
    assert {row["reason"] for row in found["times"]} == {bench.NO_TIME}


def test_resuming_keeps_what_another_part_found(tmp_path: Path) -> None:
    ran(tmp_path, "--parts", "big", "--commit", "one")
    _, found = ran(tmp_path, "--parts", "peers", "--commit", "one", "--resume")
    assert found["big"]
    assert found["times"]
    assert len(found["verify"]) == 1
    with pytest.raises(ValueError, match="another"):
        ran(tmp_path, "--parts", "peers", "--commit", "two", "--resume")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def exact(image: torch.Tensor, text: torch.Tensor) -> tuple[Any, Any]:
    """The problem and its truth by the oracle."""
    problem = problems.clip(image.double().numpy(), text.double().numpy(), SCALE).problem
    return problem, truth(problem)


def outcome(*values: Any) -> Outcome:
    loss, rows, columns, scale = (x.detach().double().numpy() for x in values)
    return Outcome(loss, rows, (columns,), scale)


def test_the_float64_reference_is_within_the_oracle_s_own_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "_ENTRIES", 7 * B)
    image, text = float64.pairs(0, B, D, CPU, torch.float32)
    index = torch.arange(B)
    row, column = float64.lse_rows(image, text, index, SCALE), float64.lse_rows(text, image, index, SCALE)
    d_image = float64.gradient_rows(image, text, index, SCALE, row, column)
    d_text = float64.gradient_rows(text, image, index, SCALE, column, row)
    problem, true = exact(image, text)
    # all exponentials are taken against the one reference 0
    allowed = bounds(problem, true, replace(ORACLE, shared_reference=True), "float64")
    found = replace(true.outcome, rows=d_image.numpy(), columns=(d_text.numpy(),))
    worst = compare(found, true.outcome, allowed, ("rows", "columns"))
    assert worst.ratio < 1, worst
    for side, lse in (("row", row), ("column", column)):
        both = [getattr(x, f"{side}_{kind}_lse") for x in (true.outcome, allowed) for kind in ("negative", "positive")]
        # an error of the whole is a mean of those of its parts, and a rounding more
        assert np.all(np.abs(lse.numpy() - np.logaddexp(*both[:2])) < 2 * np.maximum(*both[2:]))


def test_the_chunked_loss_is_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.chunked.CHUNK", 16)
    image, text = float64.pairs(0, B, D, CPU, torch.float32)
    leaves = image.requires_grad_(), text.requires_grad_(), torch.tensor(SCALE, requires_grad=True)
    loss = chunked_loss(*leaves)
    problem, true = exact(image.detach(), text.detach())
    allowed = bounds(problem, true, Accuracy(unit=2.0**-24, accumulate_unit=2.0**-24), "float32")
    worst = compare(outcome(loss, *torch.autograd.grad(loss, leaves)), true.outcome, allowed, FIELDS)
    assert worst.ratio < 1, worst


def test_log_sums_of_a_backend_are_those_of_float64() -> None:
    image, text = float64.pairs(0, B, D, CPU, torch.float64)
    part = bench.Part(1, 0, image, text, torch.tensor(SCALE, dtype=torch.float64))
    found, index = parts.log_sums(ALONE, "torch", part, text), torch.arange(B)
    true = [float64.lse_rows(one, other, index, SCALE) for one, other in ((image, text), (text, image))]
    problem, known = exact(image, text)
    allowed = bounds(problem, known, load("torch").accuracy("float64", "cpu"), "float64")
    for got, want, side in zip(found, true, ("row", "column"), strict=True):
        most = np.maximum(*(getattr(allowed, f"{side}_{kind}_lse") for kind in ("negative", "positive")))
        assert np.all(np.abs((got - want).numpy()) < 2 * most)


def test_a_scale_whose_exponentials_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        float64.lse_rows(*float64.pairs(0, 5, 4, CPU, torch.float32), torch.arange(5), 800.0)


def test_a_piece_is_the_same_whoever_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "CHUNK", 8)
    whole = float64.pairs(0, 29, D, CPU, torch.float32)
    for first, rows in ((0, 29), (5, 3), (7, 13), (8, 8), (29, 0)):
        for part, all_of_it in zip(float64.pairs(first, rows, D, CPU, torch.float32), whole, strict=True):
            assert torch.equal(part, all_of_it[first : first + rows])


def test_samples_hold_both_ends_and_no_row_twice() -> None:
    index = float64.sample(1009, 31, CPU).numpy()
    assert {0, 1008} <= set(index.tolist())
    assert len(np.unique(index)) == len(index) <= 31
    assert float64.sample(7, 31, CPU).tolist() == list(range(7))


class Clock:
    """A ceiling that slows down as it works: its n-th sample reads 100 - n."""

    def __init__(self) -> None:
        self.count = 0

    def rate(self, slot: float) -> float:
        self.count += 1
        return 101.0 - self.count


def test_a_sample_is_paired_with_the_ceiling_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("one", "two")}
    monkeypatch.setattr(timing, "elapsed", lambda ranks, call, count: (call(), 1e3, 1e3)[1:])
    found, reasons = paired(ALONE, calls, Clock(), 0.5, 3, 2.0, nullcontext())
    assert not reasons
    # two calls of each to begin with; patience allows two samples of one second; each round begins with another one
    assert order == ["one", "one", "two", "two", "one", "two", "two", "one"]
    # the first ceiling sample warms up
    assert found["one"].ceiling == [98.5, 95.5]
    assert found["two"].ceiling == [97.5, 96.5]


def test_what_raises_or_is_too_slow_is_left_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(timing, "elapsed", lambda ranks, call, count: (2e3, 2e3))
    found, reasons = paired(ALONE, {"broken": broken, "slow": lambda: None}, Clock(), 0.1, 1, 1.0, nullcontext())
    assert reasons["broken"] == "RuntimeError: no kernel image"
    assert "one call takes 2 s" in reasons["slow"]
    assert not found


def test_flops_of_the_directions_add_up_and_ranks_share_them() -> None:
    forward, backward, both = (Point(96, 40, what=what).flops(1) for what in ("forward", "backward", "both"))
    assert forward + backward == both == 8 * 96 * 96 * 40
    assert Point(96, 40).flops(4) == both / 4
    assert Point(24, 40, each=True).flops(4) == both / 4


def test_a_record_replaces_rows_of_the_same_key_but_none_measured_by_a_skip(tmp_path: Path) -> None:
    record = Record(tmp_path / "x.json", {"device": "x"}, {"seconds": 1})
    for value in (1.0, float("nan")):
        record.add("big", {"name": "a", "found": value}, ("name",))
    record.add("big", {"name": "b", "found": 1 / 3}, ("name",))
    rows = json.loads((tmp_path / "x.json").read_text())["big"]
    assert rows == [{"name": "a", "found": None}, {"name": "b", "found": 0.333333}]
    for status in ("skip", "measured", "skip"):
        record.add("times", {"name": "a", "status": status}, ("name",))
    assert record.data["times"] == [{"name": "a", "status": "measured"}]


def test_links_are_told_in_words() -> None:
    table = "\x1b[4m\tGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tNV18\t0-31\n"
    assert linked(table + "GPU2\tSYS\tNV18\t X \t0-31\n") == "NV18 between 2 pairs, SYS between 1 pairs"
    assert linked(table) == "NV18 between all 1 pairs"
    assert linked("") == "not known"
