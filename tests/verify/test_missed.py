"""Defects that no random aligned problem shows, each caught by a case made for it. Others are mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from contrastile.backends.arrays import NumpyArrays
from contrastile.backends.contract import Backend, Block
from contrastile.backends.registry import load
from contrastile.mutate.wrappers import WRAPPERS
from contrastile.mutate.wrapping import seeing
from contrastile.verify import cases, report
from contrastile.verify.comparison import Worst
from contrastile.verify.runner import Run
from contrastile.verify.selection import Selection
from contrastile.verify.wrapped import around

SOUND = load("numpy")


def on_pairs(change: Callable[[Any, Block], Any], *names: str) -> Backend:
    """Some of the pairs' vectors are changed."""

    def changed(arrays: object, block: Block) -> Block:
        vectors = {name: getattr(block.pairs, name) for name in names}
        changes = {name: change(x, block) for name, x in vectors.items() if x is not None}
        return replace(block, pairs=replace(block.pairs, **changes))

    return seeing(SOUND, changed)


def ids_as_float64() -> Backend:
    return on_pairs(lambda x, block: x.astype(np.float64), "row_ids", "column_ids")


def cut_to_32_bits(name: str) -> Backend:
    return on_pairs(lambda x, block: x.astype(np.int32).astype(np.int64), name)


def counted_from_the_end(name: str) -> Backend:
    return on_pairs(lambda x, block: np.where(x < 0, x + len(block.columns), x), name)


def holding(make: Callable[[Block], object]) -> Backend:
    """Something else is alive while a primitive works."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        held = make(block)
        found = primitive(block, *rest)
        del held
        return found

    return around(SOUND, call)


def all_tiles(block: Block) -> object:
    step = 128
    return [block.rows[i : i + step] @ block.columns.T for i in range(0, len(block.rows), step)]


def whole_mask(block: Block) -> object:
    return block.pairs.row_ids[:, None] == block.pairs.column_ids


MISSED: dict[str, tuple[str, list[str], Callable[[], Backend]]] = {
    "ids as float64": ("value", ["ids-drop@far", "ids-target@far", "sigmoid-ids@far"], ids_as_float64),
    "positives of 32 bits": ("value", ["ids-drop@far", "sigmoid-ids@far"], partial(cut_to_32_bits, "positives")),
    "exclusions of 32 bits": ("value", ["ids-drop@far"], partial(cut_to_32_bits, "excluded")),
    "positives from the end": ("value", ["ids-drop@far"], partial(counted_from_the_end, "positives")),
    "exclusions from the end": ("value", ["ids-drop@far"], partial(counted_from_the_end, "excluded")),
    "all tiles": ("peak-memory", ["peak-memory"], partial(holding, all_tiles)),
    "a whole mask": ("peak-memory", ["peak-memory"], partial(holding, whole_mask)),
}
EACH = [(name, case) for name, (_, named, _) in MISSED.items() for case in named]


def statuses(backend: Backend, prop: str, case: str) -> list[str]:
    return [row["status"] for row in Run(Selection({"it": backend}, [case], [prop], ["float32"])).rows()]


@pytest.mark.parametrize(("defect", "case"), EACH)
def test_what_was_missed_is_caught(defect: str, case: str) -> None:
    prop, _, plant = MISSED[defect]
    assert statuses(plant(), prop, case) == ["fail"]


@pytest.mark.parametrize(("prop", "case"), sorted({(p, case) for p, named, _ in MISSED.values() for case in named}))
def test_a_sound_backend_passes_there(prop: str, case: str) -> None:
    assert statuses(SOUND, prop, case) == ["pass"]


def test_every_one_of_them_runs_by_default() -> None:
    selection = Selection({})
    run = {(p.name, case) for p in selection.chosen() for case in selection.own_cases(p) or selection.case_names()}
    assert {(p, case) for p, named, _ in MISSED.values() for case in named} <= run


def test_a_library_whose_memory_nothing_counts_is_skipped() -> None:
    arrays = NumpyArrays(np)
    arrays.name = "other"
    other = replace(SOUND, arrays=arrays)
    (row,) = Run(Selection({"other": other}, ["peak-memory"], None, ["float32"])).rows()
    assert (row["status"], row["reason"]) == ("skip", "nothing counts the memory of other on cpu")


def test_a_backend_that_refuses_most_problems_is_no_pass() -> None:
    def supports(block: Block) -> str | None:
        return None if len(block.rows) == 32 else "m must be 32"

    choosy = replace(SOUND, supports=supports)
    small = [name for name in cases.names() if not name.startswith(("wordnet", "long", "deep"))]
    rows = list(Run(Selection({"choosy": choosy}, small, ["value"], ["float32"])).rows())
    assert {row["status"] for row in rows} == {"pass", "refused"}
    assert report.verdict(rows) == "incomplete"
    (line,) = report.gaps(rows)
    assert line.startswith(f"choosy: refused {len(small) - 1} of {len(small)} in float32")
    assert line.endswith("m must be 32")


def test_a_few_refusals_are_counted_and_pass() -> None:
    choosy = replace(SOUND, supports=lambda block: "too wide" if block.rows.shape[1] > 150 else None)
    rows = list(
        Run(Selection({"choosy": choosy}, ["smoke", "ragged", "hot", "exact", "wide"], ["value"], ["float32"])).rows()
    )
    assert report.verdict(rows) == "pass"
    assert report.summary(rows).startswith("PASS: 4 passed, 0 failed, 1 refused, 0 skipped")


def test_the_worst_of_a_peak_is_in_bytes() -> None:
    run = Run(Selection({"it": WRAPPERS["tile-ignored"].plant(SOUND)}, ["peak-memory"], None, ["float32"]))
    list(run.rows())
    (failure,) = run.failures
    assert isinstance(failure.worst, Worst)
    assert failure.label.endswith("tile 32 x 32")
    assert failure.worst.error > 2 * 256 * 512 * 8
