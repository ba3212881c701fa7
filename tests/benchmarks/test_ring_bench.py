"""The bench of several GPUs as far as processes on a CPU can run it, and that what fails is not timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ring_run import features, machine, sampled, stand_ins
from ring_run.plan import SMOKE
from ring_run.sampled import Scene

from contrastile import clip_loss, problems
from contrastile.backends import load
from contrastile.backends.contract import Accuracy
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.verify.arithmetic import Spread, arithmetic
from contrastile.verify.bounds import bounds
from contrastile.verify.truth import truth

ROOT = Path(__file__).resolve().parents[2]
B, D, SCALE = 64, 19, 14.3
CPU = torch.device("cpu")

WRONG = """
from dataclasses import replace
from functools import partial
from contrastile.backends.torch import backend as right

def lse(block, columns, options):
    found = right.lse(block, columns, options)
    return replace(found, row_negative_lse=found.row_negative_lse + 0.01)

backend = replace(right, name="wrong", lse=lse)
"""


def launched(ranks: int, folder: Path, *more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(ROOT / "benchmarks" / "ring.py"), "--device", "cpu", "--smoke", "--out", str(folder), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*command, *script], capture_output=True, text=True, timeout=400, env=environment, check=False
    )
    path = folder / machine.file_name("cpu smoke", ranks)
    return done, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run of four ranks."""
    done, found = launched(4, tmp_path_factory.mktemp("ring"), "--without", "inf_cl")
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def test_every_part_measures_something(record: dict[str, Any]) -> None:
    measured = [row for row in record["times"] if row["status"] == "measured"]
    assert {row["part"] for row in measured} == {"scaling", "shards", "hidden", "overlap", "peers"}
    assert all(min(row["milliseconds"]) > 0 for row in measured)
    # where there is no device to queue for, the host's time is all of it
    assert all(row["host_ms"] == row["milliseconds"] for row in measured)
    scaled = [row for row in measured if row["part"] == "scaling"]
    assert {(row["n"], row["exchange"]) for row in scaled} == {
        (1, "local"),
        *((n, how) for n in (2, 4) for how in ("ring", "gather")),
        (4, "auto"),
    }
    assert all(row["peak_bytes"] > 0 and len(row["fraction"]) == len(row["milliseconds"]) for row in scaled)
    assert all(row["reason"] for row in record["times"] if row["status"] == "skip")


def test_everything_is_held_to_float64_first(record: dict[str, Any]) -> None:
    checks = record["checks"]
    assert all(row["holds"] and row["repeats"] for row in checks)
    assert {(row["n"], row["exchange"]) for row in checks if row["check"] == "every element"} == {
        (1, "local"),
        *((n, how) for n in (2, 4) for how in ("ring", "gather")),
    }
    # shards that bite: uneven ones, and a rank without rows
    assert any(0 in row["sizes"] for row in checks)
    assert any(len(set(row["sizes"])) == row["n"] > 1 for row in checks)
    (largest,) = record["headline"]
    assert largest["holds"]
    assert largest["pairs"] == SMOKE.headline[0]


def test_messages_and_products_are_told_apart(record: dict[str, Any]) -> None:
    rows = [row for row in record["times"] if row["part"] == "hidden"]
    whats = {"step", "no messages", "no messages, no handshake", "no products", "neither"}
    assert {(row["exchange"], row["what"]) for row in rows} == {(how, x) for how in ("ring", "gather") for x in whats}


def test_nothing_is_timed_that_failed(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    done, found = launched(2, tmp_path, "--backend", "wrong:backend", "--parts", "scaling", "headline")
    assert done.returncode != 0
    assert "nothing is timed" in done.stdout
    assert any(not row["holds"] for row in found["checks"])
    assert not found["times"]
    assert not found["headline"]


@pytest.fixture
def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return features.pairs(0, B, D, CPU, torch.bfloat16)


def test_a_piece_is_the_same_whoever_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK", 8)
    whole = features.pairs(0, 29, D, CPU, torch.float32)
    for first, rows in ((0, 29), (5, 3), (7, 13), (8, 8), (29, 0)):
        for part, all_of_it in zip(features.pairs(first, rows, D, CPU, torch.float32), whole, strict=True):
            assert torch.equal(part, all_of_it[first : first + rows])


def scene(facts: Accuracy, spread: Spread | None, *towers: torch.Tensor) -> Scene:
    longest = max(float(x.double().norm(dim=1).max()) for x in towers)
    return Scene(arithmetic(facts, "bfloat16", B, [B], None, spread), B, D, SCALE, longest)


SPREADS = {
    "one process": None,
    "ring": Spread((20, 44), (20, 44), halved=True),
    "gather": Spread((20, 44), (B,)),
}
FACTS = {
    "torch": load("torch").accuracy("bfloat16", "cpu"),
    "shared": replace(load("torch").accuracy("bfloat16", "cpu"), shared_reference=True),
}


@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.parametrize("spread", SPREADS)
def test_bounds_by_largest_values_are_never_below_those_of_verify(
    facts: str, spread: str, pairs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    image, text = pairs
    problem = problems.clip(*(x.double().numpy() for x in pairs), SCALE).problem
    exact = truth(problem)
    allowed = bounds(problem, exact, FACTS[facts], "bfloat16", spread=SPREADS[spread])
    known = scene(FACTS[facts], SPREADS[spread], *pairs)
    a, index = known.arithmetic, torch.arange(B)
    lse = [sampled.lse_rows(x, [(0, y[:37]), (37, y[37:])], SCALE) for x, y in ((image, text), (text, image))]
    errors = [
        np.maximum(x, y)
        for x, y in (
            (allowed.row_negative_lse, allowed.row_positive_lse),
            (allowed.column_negative_lse, allowed.column_positive_lse),
        )
    ]
    assert known.lse(a.over_columns) >= errors[0].max()
    assert known.lse(a.over_rows) >= errors[1].max()
    assert known.loss() >= allowed.loss
    assert exact.row is not None
    assert sampled.ratio(lse[0], exact.row.lse, errors[0]) < 1
    sides = (
        (image, text, lse[0], lse[1], (a.over_columns, a.over_rows), exact.outcome.rows, allowed.rows),
        (text, image, lse[1], lse[0], (a.over_rows, a.over_columns), exact.outcome.columns[0], allowed.columns[0]),
    )
    for own, other, own_lse, other_lse, lengths, right, least in sides:
        pieces = [(0, other[:37]), (37, other[37:])]
        found = sampled.gradient_rows(known, own, index, pieces, own_lse, other_lse, lengths)
        assert sampled.ratio(found.exact, right, least) < 1
        # the run's log-sum-exps of the other direction are taken as they are; these may be off
        looser = sampled.gradient_rows(known, own, index, pieces, own_lse, other_lse, lengths, known.lse(lengths[1]))
        assert (looser.bound >= least).all()
        without = found.exact + SCALE / B * other.double().numpy()
        assert sampled.ratio(without, right, found.bound) > 1


def test_a_silent_ring_computes_what_ranks_with_equal_shards_do(pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    def program(communicator: InProcess, silent: bool, exchange: str) -> Any:
        image, text = (x.float().clone().requires_grad_() for x in pairs)
        scale = torch.tensor(SCALE, requires_grad=True)
        group = stand_ins.Silent(communicator, handshake=True) if silent else communicator
        loss = clip_loss(image, text, scale, group=group, exchange=exchange, backend="torch")
        return loss.detach(), *torch.autograd.grad(loss, (image, text, scale))

    # a gather has its own share of every sum over the ranks, the columns' positives among them
    real, silent = (InProcessGroup(2).run(partial(program, silent=quiet, exchange="ring")) for quiet in (False, True))
    for expected, got in zip(real, silent, strict=True):
        assert all(map(torch.equal, expected, got))


def test_a_silent_communicator_sends_nothing(pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    class Deaf:
        name, rank, size, deadline = "deaf", 1, 3, 1.0

        def agree(self, record: Any) -> Any:
            return np.stack([record] * 3)

        def refusal(self, device: str) -> None:
            return None

    group = stand_ins.Silent(Deaf(), handshake=False)
    for exchange in ("ring", "gather"):
        image, text = (x.float().clone().requires_grad_() for x in pairs)
        loss = clip_loss(image, text, SCALE, group=group, exchange=exchange, backend="torch")
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (image, text)))


def test_an_idle_backend_leaves_zeros(pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    image, text = (x.float().requires_grad_() for x in pairs)
    loss = clip_loss(image, text, SCALE, backend="ring_run.stand_ins:idle_torch")
    for gradient in torch.autograd.grad(loss, (image, text)):
        assert not gradient.any()


def test_listening_hears_the_log_sum_exps(pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with stand_ins.listening() as heard:
        clip_loss(*pairs, SCALE, backend="torch")
    clip_loss(*pairs, SCALE, backend="torch")
    (found,) = heard
    assert found.row_negative_lse.shape == found.row_positive_lse.shape == (B,)


def test_links_are_told_in_words() -> None:
    table = "\x1b[4m\tGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tNV18\t0-31\n"
    assert machine.linked(table + "GPU2\tSYS\tNV18\t X \t0-31\n") == "NV18 between 2 pairs, SYS between 1 pairs"
    assert machine.linked(table) == "NV18 between all 1 pairs"
    assert machine.linked("") == "not known"
