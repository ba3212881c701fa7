"""Checks of several ranks: their properties with the backends of a CPU, and ``contrastile verify --world``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import ill_backends
import pytest

from contrastile.backends.registry import load
from contrastile.cli import main
from contrastile.comm.communicator import Hosts
from contrastile.verify import cases, launched
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.runner import Run
from contrastile.verify.selection import Selection
from contrastile.verify.shards import EXCHANGES
from contrastile.verify.worlds import Threads, judged


def rows_of(n: int, backend: str, **selection: Any) -> list[Any]:
    world = Threads(n)
    return list(Run(Selection({backend: load(backend)}, world=world, **selection)).rows())


def assert_all_pass(rows: list[Any]) -> None:
    assert rows
    assert [row for row in rows if row["status"] != "pass"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "n"),
    [
        *(("torch", "float32", n) for n in (1, 2, 3, 4, 5, 8)),
        *((*pair, n) for pair in (("numpy", "float64"), ("torch", "bfloat16")) for n in (1, 3, 8)),
    ],
)
def test_edge_cases_and_public_losses_hold_in_every_world(backend: str, dtype: str, n: int) -> None:
    names = ("ragged", "hot", "blocks", "ids-drop", "labels", "zero-rows", "sigmoid-ids", "nan", "front-door")
    rows = rows_of(n, backend, cases=names, dtypes=[dtype])
    assert {row["world"] for row in rows} == {n}
    assert_all_pass([row for row in rows if row["status"] != "skip"])


def test_every_case_holds_in_a_world_of_three() -> None:
    quick = [name for name in cases.CASES if not name.startswith("wordnet")]
    assert_all_pass(rows_of(3, "numpy", cases=quick, properties=list(EXCHANGES), dtypes=["float32"]))


@pytest.mark.parametrize(
    "hosts",
    [((0, 1, 2), (3, 4)), ((0,), (1, 2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3)), ((0, 3, 4), (1,), (2,))],
    ids=str,
)
def test_hosts_may_have_any_ranks(hosts: Hosts) -> None:
    world = Threads(sum(map(len, hosts)))
    world.hosts = hosts
    selection = {"cases": ["ragged", "blocks", "views", "sigmoid-ids"], "dtypes": ["float64"]}
    names = ["two-level", "themselves", "delivery"]
    rows = list(Run(Selection({"numpy": load("numpy")}, properties=names, world=world, **selection)).rows())
    assert_all_pass([row for row in rows if row["status"] != "skip"])


def test_the_rerun_command_of_a_drawn_failure_names_the_world() -> None:
    broken = {"broken": ill_backends.broken}
    run = Run(Selection(broken, ["sharded"], ["sharded"], ["float64"], examples=15, world=Threads(3)))
    (row,) = run.rows()
    assert (row["status"], row["world"]) == ("fail", 3)
    (failure,) = run.failures
    command = "contrastile verify --world 3 --backend broken --dtype float64 --property sharded"
    assert failure.command.startswith(command)
    assert f"--case {failure.label}" in failure.command
    (rerun_row,) = Run(Selection(broken, [failure.label], ["sharded"], ["float64"], world=Threads(3))).rows()
    assert rerun_row["status"] == "fail"


def test_the_command_writes_the_world_into_every_row(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "world.json"
    words = f"verify --world 3 --backend numpy --dtype float64 --json {path} --examples 5".split()
    assert main([*words, "--case", "smoke", "front-door", "mistakes", "sharded"]) == 0
    assert "PASS: 14 passed, 0 failed, 1 skipped" in capsys.readouterr().out
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["verdict"] == "pass"
    assert {row["world"] for row in report["rows"]} == {3}
    assert {row["property"] for row in report["rows"]} == set(DISTRIBUTED)


@pytest.mark.parametrize(
    ("gpus", "ranks", "device", "on_gpus"),
    [
        (4, "4", "auto", True),
        # NCCL refuses two ranks on one GPU
        (2, "4", "auto", False),
        (0, "1", "auto", False),
        (0, "4", "cuda", True),
        (4, "4", "cpu", False),
    ],
)
def test_ranks_of_torchrun_use_gpus_if_there_is_one_for_each(monkeypatch, gpus, ranks, device, on_gpus):
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.setattr(cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert launched.on_gpus("torch", device) is on_gpus


def test_every_rank_gets_the_verdict_of_the_leader():
    # a world of a launcher, in a process that is not the leader
    follower = SimpleNamespace(leads=False, share=lambda x: ("verdict", None))
    assert judged(follower, lambda: pytest.fail("only the leader judges")) == "verdict"
    follower.share = lambda x: (None, KeyError("ill"))
    with pytest.raises(KeyError, match="ill"):
        judged(follower, lambda: None)
    assert judged(Threads(2), lambda: 3) == 3
