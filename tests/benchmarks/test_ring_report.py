"""The committed page says what the records of several GPUs say, and a record becomes the tables it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pages
import pytest
import ring_report
from ring_run import aims, tables
from ring_run.plan import IN_A_GRAPH, OPEN_CLIP, OURS

MIB = 2**20
PAGE = ring_report.PAGE


def timed(part: str, n: int, rows: int, ms: float, exchange: str, **more: Any) -> dict[str, Any]:
    row = {"part": part, "name": f"{exchange} on {n}", "setting": "", "n": n, "rows": rows, "d": 512, "what": "step"}
    row |= {"exchange": exchange, "status": "measured", "milliseconds": [ms], "calls": 1, "ceiling_tflops": [700.0]}
    if n > 1:
        row["auto"] = "ring" if rows > 16384 else "gather"
    return row | {"fraction": [8.0 * rows**2 * n * 512 / ms * 1e-9 / 700.0]} | more


def scaled(kind: str, n: int, rows: int, ms: float, exchange: str, mib: float) -> dict[str, Any]:
    return timed("scaling", n, rows, ms, exchange, kind=kind, peak_bytes=int(mib * MIB))


def hidden(what: str, ms: float) -> dict[str, Any]:
    return timed("hidden", 4, 8192, ms, "ring", what=what)


def overlapped(ms: float, **more: Any) -> dict[str, Any]:
    return timed("overlap", 4, 8192, ms, "", what="lse", **more)


@pytest.fixture
def record() -> dict[str, Any]:
    """A made-up run in which every table has a row."""
    peers = [
        timed("peers", 4, 16384, 8.0, "auto", name=f"{OURS}, auto", peak_bytes=100 * MIB),
        timed("peers", 4, 16384, 12.0, "", name=OPEN_CLIP, peak_bytes=4000 * MIB),
    ]
    check = {"check": "every element", "n": 4, "exchange": "ring", "rows": 500, "sizes": [331, 0, 500, 193], "d": 512}
    largest = {"n": 4, "pairs": 12_582_912, "asked": 12_582_912, "d": 512, "scale": 100.0, "status": "measured"}
    times = {"forward_ms": 6e4, "backward_ms": 2e5, "tflops": 600.0, "ceiling_tflops": [700.0], "fraction": 0.857}
    sizes = {"peak_bytes": 40 << 30, "features_bytes": 6 << 30, "loss": 0.125, "samples": 128, "exchange": "ring"}
    environment = {"device": "Some GPU", "ranks": 4, "date": "2026-01-02T03:04:05", "commit": "c" * 40, "nccl": "2.28"}
    return {
        "environment": environment,
        "settings": {"slot": 0.25, "smoke": False},
        "checks": [check | {"scale": 100.0, "ratios": {"float64": 0.5}, "repeats": True, "holds": True}],
        "times": [
            scaled("weak", 1, 32768, 6.0, "local", 600.0),
            scaled("weak", 4, 32768, 25.0, "ring", 700.0),
            scaled("weak", 4, 32768, 30.0, "gather", 900.0),
            scaled("strong", 1, 262144, 480.0, "local", 1512.0),
            scaled("strong", 2, 131072, 250.0, "ring", 1012.0),
            scaled("strong", 4, 65536, 150.0, "ring", 762.0),
            scaled("strong", 4, 65536, 140.0, "gather", 2512.0),
            timed("shards", 4, 8192, 1.0, "ring"),
            timed("shards", 4, 8192, 0.8, "gather"),
            *(hidden(what, ms) for what, ms in (("step", 10.0), ("no messages", 9.5))),
            *(hidden(what, ms) for what, ms in (("no products", 3.0), ("neither", 1.0))),
            overlapped(0.5, transfer="message"),
            *(overlapped(ms, waves=waves, spared=0) for waves, ms in ((1, 1.0), (4, 1.1))),
            *(overlapped(ms, waves=waves, spared=0, transfer="message") for waves, ms in ((1, 1.75), (4, 1.25))),
            *peers,
            timed("peers", 4, 65536, 1.0, "", name=OPEN_CLIP) | {"status": "skip", "reason": "no memory"},
        ],
        "headline": [largest | times | sizes | {"ratios": {"d image": 0.25}, "holds": True}],
    }


def test_what_auto_took_is_timed_by_its_own_samples_too(record: dict[str, Any]) -> None:
    slow = timed("shards", 4, 16384, 6.0, "gather") | {"milliseconds": [6.0, 4.0]}
    record["times"] += [slow, timed("shards", 4, 16384, 5.0, "ring")]
    assert [tables.behind(*pair) for pair in tables.choices(record) if pair[0]["rows"] == 16384] == [0.0]
    record["times"] += [timed("shards", 4, 16384, 9.0, "auto")]
    found = [pair for pair in tables.choices(record) if pair[0]["rows"] == 16384]
    assert [pair[1]["milliseconds"] for pair in found] == [[6.0, 4.0, 9.0]]
    assert [tables.behind(*pair) for pair in found] == [6.0 / 5.0 - 1]


def test_the_host_and_a_graph_stand_beside_the_whole_time(record: dict[str, Any]) -> None:
    at = {"n": 4, "rows": 8192, "d": 512}
    graph = timed("shards", 4, 8192, 0.25, "", name=f"gather on 4{IN_A_GRAPH}", captured="gather", host_ms=[0.03])
    record["times"] += [{name: x for name, x in graph.items() if name != "exchange"}]
    (row,) = (row for row in record["times"] if row["part"] == "shards" and row.get("exchange") == "gather")
    assert " | 1.00 | 0.800 | - | - | 0.250 | " in tables.exchanges(record)
    row["host_ms"] = [0.7, 0.6, 0.75]
    assert " | 1.00 | 0.800 | - | 0.700 | 0.250 | " in tables.exchanges(record)
    # it is no gather that ``auto`` could have taken
    assert [
        pair[1]["milliseconds"] for pair in tables.choices(record) if all(pair[0][k] == v for k, v in at.items())
    ] == [[0.8]]
    (peer,) = (row for row in record["times"] if row["name"] == f"{OURS}, auto")
    peer["host_ms"] = [7.5]
    assert "| 8.00 | 7.50 |" in tables.peers(record)


def test_small_shards_are_held_to_the_better_of_the_others_ways(record: dict[str, Any]) -> None:
    def found() -> list[list[str]]:
        lines = aims.aims(record).splitlines()[2:]
        return [[x.strip() for x in line.split("|")[2:4]] for line in lines if "8,192 pairs a rank" in line]

    assert not found()
    for name, ms in ((OPEN_CLIP, 6.0), (OPEN_CLIP + IN_A_GRAPH, 5.0), (f"{OURS}, auto", 4.0)):
        record["times"] += [timed("peers", 4, 8192, ms, "", name=name)]
    assert found() == [["1.25 times", "**no**"]]
    record["times"] += [timed("peers", 4, 8192, 2.5, "", name=f"{OURS}, auto{IN_A_GRAPH}")]
    assert found() == [["1.25 times", "**no**"], ["2.00 times", "yes"]]


def test_the_committed_page_is_what_the_records_say() -> None:
    assert PAGE.main(["--check"]) == 0


def test_a_page_that_says_something_else_is_found_out(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "ring_some.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"{PAGE.begin}\nstale\n{pages.END}\nafter\n", encoding="utf-8")
    how = ["--results", str(tmp_path), "--page", str(page)]
    assert PAGE.main([*how, "--check"]) == 1
    assert PAGE.main(how) == 0
    assert PAGE.main([*how, "--check"]) == 0
    assert (tmp_path / "ring_some.svg").exists()
    text = page.read_text(encoding="utf-8")
    assert "stale" not in text
    assert "### 4 x Some GPU" in text
    page.write_text(text.replace("12,582,912", "12,582,913"), encoding="utf-8")
    assert PAGE.main([*how, "--check"]) == 1


def test_the_figure_is_drawn_alike_each_time(tmp_path: Path, record: dict[str, Any]) -> None:
    paths = [tmp_path / f"{name}.svg" for name in "ab"]
    for path in paths:
        PAGE.draw(record, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_without_records_the_page_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert PAGE.generated(tmp_path) == PAGE.nothing


def test_perfect_weak_scaling_is_n_times_the_time_of_a_rank_alone(record: dict[str, Any]) -> None:
    rows = tables.scaling(record, "weak").splitlines()[2:]
    assert "| 100.0 % |" in rows[0]
    # 4 x 6 / 25
    assert "| 96.0 % |" in rows[1]
    assert "| 80.0 % |" in rows[2]


def test_perfect_strong_scaling_divides_the_time_of_a_rank_alone(record: dict[str, Any]) -> None:
    rows = tables.scaling(record, "strong").splitlines()[2:]
    # 480 / (2 x 250) and 480 / (4 x 150)
    assert "| 96.0 % |" in rows[1]
    assert "| 80.0 % |" in rows[2]


def test_the_aims_say_what_was_reached(record: dict[str, Any]) -> None:
    text = aims.aims(record)
    assert "| weak scaling, 32,768 pairs a rank, d = 512, at least 95 %: 4 ranks | 96.0 % (ring) | yes |" in text
    assert "2 ranks | 96.0 % (ring) | yes |" in text
    # the better of 480 / (4 x 150) and 480 / (4 x 140)
    assert "4 ranks | 85.7 % (gather) | **no** |" in text
    # ring where it takes 150 and the gather 140
    assert "| 7.1 % at worst" in text
    assert "| 1,012 MiB on 2, 762 on 4, of which fixed 512 | yes |" in text
    assert "b = 65,536 on 4 ranks | 1.50 times | **no** |" in text


def test_what_is_hidden_is_what_neither_shows(record: dict[str, Any]) -> None:
    # of 2 ms of messages 0.5 show
    assert "| 2.00 | 75.0 % | - |" in tables.hidden(record)


def test_a_block_beside_a_message_is_compared_with_the_block_as_it_is(record: dict[str, Any]) -> None:
    one, four = tables.overlap(record).splitlines()[2:]
    assert one.endswith("| message | 1 | 0 | 0.500 | 1.00 | 1.75 | 0.750 |")
    assert four.endswith("| message | 4 | 0 | 0.500 | 1.10 | 1.25 | 0.250 |")


def test_peers_and_the_largest_batch(record: dict[str, Any]) -> None:
    assert f"{OPEN_CLIP} takes 1.50 times as long" in tables.comparison(record)
    assert f"| {OPEN_CLIP} | 12.0 | - | 367 | 52.4 % | 1.50 | 4,000 | 40.0 |" in tables.peers(record)
    assert "| 12,582,912 | 512 | 4 | ring | 60.0 | 200 | 600 | 85.7 % | 40.0 | 6.00 |" in tables.headline(record)
    assert "65,536 a rank: no memory" in tables.skipped(record)
