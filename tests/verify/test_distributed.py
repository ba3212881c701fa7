"""Checks of several ranks: the properties on every backend that runs here, and ``contrastile verify --world``."""

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


def passed(found: list[Any]) -> None:
    assert found
    assert [row for row in found if row["status"] != "pass"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "n"),
    [
        *(("torch", "float32", n) for n in (1, 2, 3, 4, 5, 8)),
        *((*each, n) for each in (("numpy", "float64"), ("torch", "bfloat16")) for n in (1, 3, 8)),
    ],
)
def test_edge_cases_and_public_losses_hold_in_every_world(backend: str, dtype: str, n: int) -> None:
    biting = ("ragged", "hot", "blocks", "ids-drop", "labels", "zero-rows", "sigmoid-ids", "nan", "front-door")
    found = rows_of(n, backend, cases=biting, dtypes=[dtype])
    assert {row["world"] for row in found} == {n}
    passed([row for row in found if row["status"] != "skip"])


def test_every_case_holds_in_a_world_of_three() -> None:
    quick = [name for name in cases.CASES if not name.startswith("wordnet")]
    passed(rows_of(3, "numpy", cases=quick, properties=list(EXCHANGES), dtypes=["float32"]))


@pytest.mark.parametrize(
    "hosts",
    [((0, 1, 2), (3, 4)), ((0,), (1, 2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3)), ((0, 3, 4), (1,), (2,))],
    ids=str,
)
def test_hosts_may_have_any_ranks(hosts: Hosts) -> None:
    world = Threads(sum(map(len, hosts)))
    world.hosts = hosts
    checks = {"cases": ["ragged", "blocks", "views", "sigmoid-ids"], "dtypes": ["float64"]}
    names = ["two-level", "themselves", "delivery"]
    found = list(Run(Selection({"numpy": load("numpy")}, properties=names, world=world, **checks)).rows())
    passed([row for row in found if row["status"] != "skip"])


def test_a_drawn_failure_names_the_world_in_the_command_that_runs_it_again() -> None:
    broken = {"broken": ill_backends.broken}
    run = Run(Selection(broken, ["sharded"], ["sharded"], ["float64"], examples=15, world=Threads(3)))
    (row,) = run.rows()
    assert (row["status"], row["world"]) == ("fail", 3)
    (failure,) = run.failures
    began = "contrastile verify --world 3 --backend broken --dtype float64 --property sharded"
    assert failure.command.startswith(began)
    assert f"--case {failure.label}" in failure.command
    (again,) = Run(Selection(broken, [failure.label], ["sharded"], ["float64"], world=Threads(3))).rows()
    assert again["status"] == "fail"


def test_the_command_writes_the_world_into_every_row(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "world.json"
    words = f"verify --world 3 --backend numpy --dtype float64 --json {path} --examples 5".split()
    assert main([*words, "--case", "smoke", "front-door", "mistakes", "sharded"]) == 0
    assert "PASS: 14 passed, 0 failed, 1 skipped" in capsys.readouterr().out
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read["verdict"] == "pass"
    assert {row["world"] for row in read["rows"]} == {3}
    assert {row["property"] for row in read["rows"]} == set(DISTRIBUTED)


@pytest.mark.parametrize(
    ("gpus", "ranks", "device", "found"),
    [
        (4, "4", "auto", True),
        # NCCL takes no two ranks on one GPU
        (2, "4", "auto", False),
        (0, "1", "auto", False),
        (0, "4", "cuda", True),
        (4, "4", "cpu", False),
    ],
)
def test_ranks_of_torchrun_have_gpus_where_there_is_one_for_each(monkeypatch, gpus, ranks, device, found):
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.setattr(cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert launched.on_gpus("torch", device) is found


def test_the_leader_s_judgement_is_everybody_s():
    # a process of a launcher that hears what the leader has found
    told = SimpleNamespace(leads=False, share=lambda x: ("verdict", None))
    assert judged(told, lambda: pytest.fail("only the leader judges")) == "verdict"
    told.share = lambda x: (None, KeyError("ill"))
    with pytest.raises(KeyError, match="ill"):
        judged(told, lambda: None)
    assert judged(Threads(2), lambda: 3) == 3
