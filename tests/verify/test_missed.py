"""Defects that no random aligned problem shows, each caught by the case and property that was made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contrastile.backends.arrays import NumpyArrays
from contrastile.backends.contract import Accuracy, Backend, Block, Options, Pairs, Weights
from contrastile.backends.registry import load
from contrastile.verify import cases, report
from contrastile.verify.run import Worst
from contrastile.verify.runner import Run, Selection

SOUND = load("numpy")


def on_block(change: Callable[[Block], Block], *primitives: str, base: Backend = SOUND) -> Backend:
    """A backend that sees a changed block."""

    def wrap(primitive: Any) -> Any:
        return lambda block, *call: primitive(change(block), *call)

    names = primitives or ("lse", "gradients", "sigmoid")
    changes: dict[str, Any] = {name: wrap(getattr(base, name)) for name in names}
    return replace(base, **changes)


def doubled_where(where: Callable[[int, int, int], bool]) -> Backend:
    """All logits are doubled at some sizes of m, n, d."""

    def change(block: Block) -> Block:
        m, d = block.rows.shape
        return replace(block, scale=block.scale * 2) if where(m, len(block.columns), d) else block

    return on_block(change)


def on_pairs(change: Callable[[Pairs], Pairs]) -> Backend:
    return on_block(lambda block: replace(block, pairs=change(block.pairs)))


def on_ids(change: Callable[[Any], Any]) -> Backend:
    def moved(pairs: Pairs) -> Pairs:
        if pairs.row_ids is None:
            return pairs
        return replace(pairs, row_ids=change(pairs.row_ids), column_ids=change(pairs.column_ids))

    return on_pairs(moved)


def negative_ids_are_none() -> Backend:
    def apart(pairs: Pairs) -> Pairs:
        if pairs.row_ids is None:
            return pairs
        return replace(pairs, row_ids=np.where(pairs.row_ids < 0, 10**15, pairs.row_ids))

    return on_pairs(apart)


def pointers_cut_to_32_bits(name: str) -> Backend:
    def cut(pairs: Pairs) -> Pairs:
        x = getattr(pairs, name)
        return pairs if x is None else replace(pairs, **{name: x.astype(np.int32).astype(np.int64)})

    return on_pairs(cut)


def pointers_from_the_end(name: str) -> Backend:
    def change(block: Block) -> Block:
        x = getattr(block.pairs, name)
        if x is None:
            return block
        return replace(block, pairs=replace(block.pairs, **{name: np.where(x < 0, x + len(block.columns), x)}))

    return on_block(change)


def early_return(missing: str) -> Backend:
    """Nothing is done for a tower where the other's gradient is not wanted."""

    def out(rows: Any, columns: Any) -> bool:
        return {"rows": rows is None, "columns": columns is None}[missing]

    def gradients(block: Block, weights: Weights, rows: Any, columns: Any, options: Options) -> None:
        if not out(rows, columns):
            SOUND.gradients(block, weights, rows, columns, options)

    def sigmoid(block: Block, weight: Any, rows: Any, columns: Any, options: Options) -> Any:
        if out(rows, columns):
            return np.zeros(len(weight)), np.zeros(len(weight))
        return SOUND.sigmoid(block, weight, rows, columns, options)

    return replace(SOUND, gradients=gradients, sigmoid=sigmoid)


def no_loss_without_gradients() -> Backend:
    def sigmoid(block: Block, weight: Any, rows: Any, columns: Any, options: Options) -> Any:
        loss, total = SOUND.sigmoid(block, weight, rows, columns, options)
        return (0 * loss, 0 * total) if rows is None and columns is None else (loss, total)

    return replace(SOUND, sigmoid=sigmoid)


def signs_of_strides_lost() -> Backend:
    def forward(x: Any) -> Any:
        return x[tuple(slice(None, None, -1 if step < 0 else None) for step in x.strides)]

    return on_block(lambda block: replace(block, rows=forward(block.rows), columns=forward(block.columns)))


def small_weights_dropped() -> Backend:
    def kept(x: Any) -> Any:
        return None if x is None else np.where(np.abs(x) < 1e-6, 0.0, x)

    def gradients(block: Block, w: Weights, *call: Any) -> None:
        w = replace(w, row_weight=kept(w.row_weight), column_weight=kept(w.column_weight))
        SOUND.gradients(block, w, *call)

    def sigmoid(block: Block, weight: Any, *call: Any) -> Any:
        return SOUND.sigmoid(block, kept(weight), *call)

    return replace(SOUND, gradients=gradients, sigmoid=sigmoid)


def holding(make: Callable[[Block], object]) -> Backend:
    """Something is alive beside the tiles while a primitive works."""

    def wrap(primitive: Any) -> Any:
        def function(block: Block, *call: Any) -> Any:
            alive = make(block)
            found = primitive(block, *call)
            del alive
            return found

        return function

    return replace(SOUND, lse=wrap(SOUND.lse), gradients=wrap(SOUND.gradients), sigmoid=wrap(SOUND.sigmoid))


def all_tiles(block: Block) -> object:
    step = 128
    return [block.rows[i : i + step] @ block.columns.T for i in range(0, len(block.rows), step)]


def whole_mask(block: Block) -> object:
    return block.pairs.row_ids[:, None] == block.pairs.column_ids


def tile_ignored(name: str = "numpy") -> Backend:
    base = load(name)
    return replace(
        base,
        lse=lambda block, columns, options: base.lse(block, columns, Options()),
        gradients=lambda *call: base.gradients(*call[:-1], Options()),
        sigmoid=lambda *call: base.sigmoid(*call[:-1], Options()),
    )


def nothing_under_loose_facts() -> Backend:
    blank = on_block(lambda block: replace(block, scale=block.scale * 0))
    return replace(blank, accuracy=lambda dtype, device: Accuracy(unit=1.0, accumulate_unit=1.0))


MISSED: dict[str, tuple[str, list[str], Callable[[], Backend]]] = {
    "m % 64 == 0": (
        "value",
        ["aligned", "long", "long@sigmoid"],
        lambda: doubled_where(lambda m, n, d: m and m % 64 == 0),
    ),
    "m % 128 == 0": ("value", ["aligned", "long"], lambda: doubled_where(lambda m, n, d: m and m % 128 == 0)),
    "n % 128 == 0": ("value", ["aligned"], lambda: doubled_where(lambda m, n, d: n % 128 == 0)),
    "d == 512": ("value", ["long", "long@sigmoid"], lambda: doubled_where(lambda m, n, d: d == 512)),
    "d > 128": ("value", ["wide"], lambda: doubled_where(lambda m, n, d: d > 128)),
    "d > 1024": ("value", ["deep@1025"], lambda: doubled_where(lambda m, n, d: d > 1024)),
    "odd d": ("value", ["negative-scale", "deep@1025"], lambda: doubled_where(lambda m, n, d: d % 2 == 1)),
    "n > 1000": ("value", ["long", "long@sigmoid"], lambda: doubled_where(lambda m, n, d: n > 1000)),
    "n > 1100": ("value", ["long", "long@sigmoid"], lambda: doubled_where(lambda m, n, d: n > 1100)),
    "no row gradient": ("frozen", ["ragged", "blocks", "sigmoid"], lambda: early_return("rows")),
    "no column gradient": ("frozen", ["ragged", "blocks", "sigmoid"], lambda: early_return("columns")),
    "sigmoid's value alone": ("frozen", ["sigmoid"], no_loss_without_gradients),
    "negative ids": ("value", ["ids-drop@far", "ids-target@far", "sigmoid-ids@far"], negative_ids_are_none),
    "ids of 32 bits": (
        "value",
        ["ids-drop@far", "ids-target@far", "sigmoid-ids@far"],
        lambda: on_ids(lambda x: x.astype(np.int32)),
    ),
    "ids as float64": (
        "value",
        ["ids-drop@far", "ids-target@far", "sigmoid-ids@far"],
        lambda: on_ids(lambda x: x.astype(np.float64)),
    ),
    "positives of 32 bits": (
        "value",
        ["ids-drop@far", "sigmoid-ids@far"],
        lambda: pointers_cut_to_32_bits("positives"),
    ),
    "exclusions of 32 bits": ("value", ["ids-drop@far"], lambda: pointers_cut_to_32_bits("excluded")),
    "positives from the end": ("value", ["ids-drop@far"], lambda: pointers_from_the_end("positives")),
    "exclusions from the end": ("value", ["ids-drop@far"], lambda: pointers_from_the_end("excluded")),
    "negative strides": ("strided", ["ragged"], signs_of_strides_lost),
    "small weights": ("gradients", ["tiny-weights", "tiny-weights@sigmoid"], small_weights_dropped),
    "sign of the scale": (
        "value",
        ["negative-scale", "negative-scale@sigmoid"],
        lambda: on_block(lambda block: replace(block, scale=abs(block.scale))),
    ),
    "all logits": ("peak-memory", ["peak-memory"], lambda: holding(lambda block: block.rows @ block.columns.T)),
    "all tiles": ("peak-memory", ["peak-memory"], lambda: holding(all_tiles)),
    "a whole mask": ("peak-memory", ["peak-memory"], lambda: holding(whole_mask)),
    "tile ignored": ("peak-memory", ["peak-memory"], tile_ignored),
    "loose facts": ("value", ["smoke"], nothing_under_loose_facts),
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


def test_a_torch_backend_that_ignores_the_tile_is_caught() -> None:
    pytest.importorskip("torch")
    assert statuses(load("torch"), "peak-memory", "peak-memory") == ["pass"]
    assert statuses(tile_ignored("torch"), "peak-memory", "peak-memory") == ["fail"]


def test_a_torch_backend_that_holds_all_logits_is_caught() -> None:
    pytest.importorskip("torch")
    base = load("torch")

    def lse(block: Block, *call: Any) -> Any:
        alive = block.rows @ block.columns.T
        found = base.lse(block, *call)
        del alive
        return found

    assert statuses(replace(base, lse=lse), "peak-memory", "peak-memory") == ["fail"]


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
    run = Run(Selection({"it": tile_ignored()}, ["peak-memory"], None, ["float32"]))
    list(run.rows())
    (failure,) = run.failures
    assert isinstance(failure.worst, Worst)
    assert failure.label.endswith("tile 32 x 32")
    assert failure.worst.error > 2 * 256 * 512 * 8
