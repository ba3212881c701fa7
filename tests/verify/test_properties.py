"""The tester tested: each planted defect is caught by its property, which the sound backend passes."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from contrastile.backends.contract import Options, Weights
from contrastile.backends.registry import load
from contrastile.mutate.wrappers import WRAPPERS
from contrastile.mutate.wrapping import seeing
from contrastile.verify import memory
from contrastile.verify.comparison import Worst, identical
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.runner import Run
from contrastile.verify.selection import Selection
from contrastile.verify.truth import Outcome
from contrastile.verify.wrapped import around

NUMPY = load("numpy")


def on_lse(change):
    return replace(NUMPY, lse=lambda block, columns, options: change(block, columns, options))


def on_gradients(change):
    def gradients(block, weights, rows, columns, options):
        change(lambda w, r, c: NUMPY.gradients(block, w, r, c, options), block, weights, rows, columns)

    return replace(NUMPY, gradients=gradients)


def drops_the_last_tile_asked_for():
    def lse(block, columns, options):
        whole = NUMPY.lse(block, columns, options)
        over = len(block.columns) % options.tile[1] if options.tile else 0
        if not over or over == len(block.columns):
            return whole
        part = NUMPY.lse(replace(block, columns=block.columns[:-over]), False, options)
        return replace(whole, rows=whole.rows._replace(negative_lse=part.rows.negative_lse))

    return on_lse(lse)


def gives_no_gradient_without_a_workspace():
    def gradients(block, weights, rows, columns, options):
        if options.workspace != 0:
            NUMPY.gradients(block, weights, rows, columns, options)

    return replace(NUMPY, gradients=gradients)


def doubled(where):
    return seeing(NUMPY, lambda arrays, block: replace(block, scale=block.scale * (1 + where(block.rows))))


def doubled_at_100_rows():
    return doubled(lambda x: len(x) == 100)


def doubled_where_many_rows_are_wide():
    return doubled(lambda x: len(x) > 5000 and x.shape[1] > 8)


def doubled_beyond_4100_features():
    return doubled(lambda x: x.shape[1] > 4100)


def holds_a_vector_of_each_call():
    held = []

    def lse(block, columns, options):
        held.append(block.rows[:, 0].copy())
        return NUMPY.lse(block, columns, options)

    return on_lse(lse)


def shared_memory_is_equal_features():
    def lse(block, columns, options):
        same = np.shares_memory(block.rows, block.columns) and block.rows.shape == block.columns.shape
        return NUMPY.lse(replace(block, columns=block.rows) if same else block, columns, options)

    return on_lse(lse)


def strides_are_those_of_the_first_at_an_address():
    first = {}

    def rows(x):
        strides, _ = first.setdefault((x.ctypes.data, x.shape), (x.strides, x))
        return np.lib.stride_tricks.as_strided(x, x.shape, strides)

    return seeing(NUMPY, lambda arrays, block: replace(block, rows=rows(block.rows)))


def mutant(name):
    """A defect that ``contrastile mutate`` plants."""
    plant = partial(WRAPPERS[name].plant, NUMPY)
    plant.__name__ = name
    return plant


def assumes_the_diagonal():
    def diagonal(arrays, block):
        return replace(block, pairs=replace(block.pairs, positives=np.arange(len(block.rows))))

    return seeing(NUMPY, diagonal)


def reads_past_the_end():
    def longer(primitive, block, *rest):
        columns = block.columns
        if columns.base is not None and columns.base.ndim == 2 and len(columns) >= 2:
            shape = (len(columns) + 1, columns.shape[1])
            block = replace(block, columns=as_strided(columns, shape, columns.strides)[1:])
        return primitive(block, *rest)

    return around(NUMPY, longer, "lse")


def merges_equal_columns():
    def lse(block, columns, options):
        found = NUMPY.lse(block, columns, options)
        once = np.unique(block.columns, axis=0)
        part = NUMPY.lse(replace(block, columns=once), False, options)
        return replace(found, rows=found.rows._replace(negative_lse=part.rows.negative_lse))

    return on_lse(lse)


def forgets_later_blocks():
    """The first block it ever sees has LSE right; a block of fewer columns than rows is treated as padding."""

    def lse(block, columns, options):
        found = NUMPY.lse(block, columns, options)
        nothing = found.rows._replace(negative_lse=np.full_like(found.rows.negative_lse, -np.inf))
        return replace(found, rows=nothing) if len(block.columns) < 17 else found

    return on_lse(lse)


def goes_below_zero():
    def sigmoid(block, *call):
        loss, total = NUMPY.sigmoid(block, *call)
        return loss - 2.0 * np.abs(loss), total

    return replace(NUMPY, sigmoid=sigmoid)


def crashes():
    def lse(block, columns, options):
        raise IndexError("tile out of range")

    return on_lse(lse)


def rounds_the_weight_of_a_certain_pair():
    """What the rows' log-sum-exp loses in float32: nothing beside the bound, everything beside a plain computation."""

    def change(run, block, w, rows, columns):
        n, p, *_ = w.rows
        lse = np.logaddexp(n, p).astype(np.float32).astype(np.float64)
        excess = np.maximum(lse - p, 0.0)
        run(replace(w, rows=w.rows._replace(negative_lse=p + np.log(np.expm1(excess)))), rows, columns)

    return on_gradients(change)


def takes_every_loss_for_the_cross_entropy():
    def change(run, block, w, rows, columns):
        run(Weights(*(side and side._replace(bars=None) for side in (w.rows, w.columns))), rows, columns)

    return on_gradients(change)


def forgets_the_spread():
    def less(side):
        return side and side._replace(bars=side.bars and side.bars._replace(spread=0 * side.bars.spread))

    def change(run, block, w, rows, columns):
        run(Weights(less(w.rows), less(w.columns)), rows, columns)

    return on_gradients(change)


def forgets_the_columns_part():
    def change(run, block, w, rows, columns):
        run(replace(w, columns=None), rows, columns)

    return on_gradients(change)


def on_pairs(change, name):
    """One of the pairs' vectors is changed."""

    def changed(arrays, block):
        x = getattr(block.pairs, name)
        return block if x is None else replace(block, pairs=replace(block.pairs, **{name: change(x, block)}))

    return seeing(NUMPY, changed)


def ids_as_float64():
    return on_pairs(lambda x, block: x.astype(np.float64), "row_ids")


def positives_of_32_bits():
    return on_pairs(lambda x, block: x.astype(np.int32).astype(np.int64), "positives")


def exclusions_of_32_bits():
    return on_pairs(lambda x, block: x.astype(np.int32).astype(np.int64), "excluded")


def positives_from_the_end():
    return on_pairs(lambda x, block: np.where(x < 0, x + len(block.columns), x), "positives")


def exclusions_from_the_end():
    return on_pairs(lambda x, block: np.where(x < 0, x + len(block.columns), x), "excluded")


def holding(make):
    """Something else is alive while a primitive works."""

    def call(primitive, block, *rest):
        held = make(block)
        found = primitive(block, *rest)
        del held
        return found

    return around(NUMPY, call)


def holds_all_tiles():
    return holding(lambda block: [block.rows[i : i + 128] @ block.columns.T for i in range(0, len(block.rows), 128)])


def holds_a_whole_mask():
    return holding(lambda block: block.pairs.row_ids[:, None] == block.pairs.column_ids)


PLANTED = [
    ("value", "ids-drop@far", ids_as_float64),
    ("value", "ids-target@far", ids_as_float64),
    ("value", "sigmoid-ids@far", ids_as_float64),
    ("value", "ids-drop@far", positives_of_32_bits),
    ("value", "sigmoid-ids@far", positives_of_32_bits),
    ("value", "ids-drop@far", exclusions_of_32_bits),
    ("value", "ids-drop@far", positives_from_the_end),
    ("value", "ids-drop@far", exclusions_from_the_end),
    ("peak-memory", "peak-memory", holds_all_tiles),
    ("peak-memory", "peak-memory", holds_a_whole_mask),
    ("options", "ragged", gives_no_gradient_without_a_workspace),
    ("sizes", "sizes", doubled_at_100_rows),
    ("sizes", "sizes", doubled_where_many_rows_are_wide),
    ("sizes", "sizes", doubled_beyond_4100_features),
    ("calls", "calls", holds_a_vector_of_each_call),
    ("aliases", "aliases", shared_memory_is_equal_features),
    ("calls", "calls", strides_are_those_of_the_first_at_an_address),
    ("value", "ragged", mutant("positives-off-by-one")),
    ("value", "nan", mutant("nan-taken-for-0")),
    ("value", "ragged", crashes),
    ("gradients", "square-ragged", mutant("weights-squared")),
    ("bars", "smoke", takes_every_loss_for_the_cross_entropy),
    ("bars", "labels", forgets_the_spread),
    ("plain", "certain", rounds_the_weight_of_a_certain_pair),
    ("tiles", "ragged", drops_the_last_tile_asked_for),
    ("permutation", "ids-drop", assumes_the_diagonal),
    ("shift", "smoke", mutant("bias-ignored")),
    ("split-merge", "smoke", mutant("positives-modulo-n")),
    ("split-merge", "smoke", forgets_later_blocks),
    ("duplicates", "labels", merges_equal_columns),
    ("non-negative", "sigmoid", goes_below_zero),
    ("symmetric", "self-excluded", forgets_the_columns_part),
    ("upstream", "smoke", mutant("sign-of-weights-lost")),
    ("upstream", "smoke", mutant("nan-weights-are-0")),
    ("frozen", "ragged", mutant("nothing-without-row-gradient")),
    ("accumulation", "smoke", mutant("gradients-overwritten")),
    ("determinism", "ragged", mutant("never-the-same-twice")),
    ("guard-bands", "ragged", mutant("written-past-the-end")),
    ("guard-bands", "ragged", reads_past_the_end),
    ("guard-bands", "ragged", mutant("features-overwritten")),
    ("strided", "ragged", mutant("strides-ignored")),
    ("poisoned-memory", "ragged", mutant("unwritten-memory-read")),
    ("non-finite", "ragged", mutant("nan-taken-for-0")),
    ("non-finite", "ragged", mutant("nan-scale-is-1")),
    ("peak-memory", "peak-memory", mutant("tile-ignored")),
    ("peak-memory", "peak-memory", mutant("every-block-held")),
    ("growth", "growth", mutant("rows-and-columns-swapped")),
    ("sizes", "sizes", mutant("doubled-at-d-768")),
    ("calls", "calls", mutant("scale-shared-by-threads")),
    ("calls", "calls", mutant("statistics-by-address")),
    ("calls", "calls", mutant("statistics-in-one-buffer")),
    ("calls", "calls", mutant("generators-seeded")),
    ("drawn", "drawn", mutant("positives-off-by-one")),
    ("drawn", "drawn", mutant("rows-and-columns-swapped")),
    ("drawn", "drawn", crashes),
]


BY_NAME = {
    **{f"public-{name}": "public-losses" for name in ("clip-loss", "info-nce", "nt-xent", "sup-con", "sigmoid-loss")},
    "ranks": "ranks",
}
"""Properties that call the public losses, which find a backend by its name."""


def run(backend, prop, case):
    # the oracle is no more exact than a plain float64 computation, and most sizes are tried in float32 alone
    dtype = "float32" if prop in ("plain", "growth", "sizes") else "float64"
    found = Run(Selection({"planted": backend}, [case], [prop], [dtype], examples=30))
    return list(found.rows()), found.failures


@pytest.mark.parametrize(("prop", "case", "defect"), PLANTED, ids=lambda x: getattr(x, "__name__", x))
def test_planted_defect_is_caught(prop, case, defect):
    rows, failures = run(defect(), prop, case)
    assert [row["status"] for row in rows] == ["fail"]
    assert rows[0]["ratio"] >= 1
    assert failures[0].row is rows[0]
    assert rows[0]["reason"]


@pytest.mark.parametrize(("prop", "case"), sorted({(prop, case) for prop, case, _ in PLANTED}))
def test_sound_backend_passes_where_defects_were_caught(prop, case):
    rows, failures = run(NUMPY, prop, case)
    assert [(row["status"], row["reason"]) for row in rows] == [("pass", "")]
    assert rows[0]["ratio"] < 1
    assert not failures


@pytest.mark.parametrize(("prop", "case"), BY_NAME.items())
def test_a_defect_is_caught_through_the_public_losses(prop, case):
    def rows(name):
        return list(Run(Selection({name: load(name)}, [case], [prop], ["float32"], examples=5)).rows())

    assert [row["status"] for row in rows("numpy")] == ["pass"]
    assert [row["status"] for row in rows("contrastile.mutate.wrappers:features-in-tf32@numpy")] == ["fail"]


def test_every_property_of_every_case_has_a_planted_defect():
    # those of training, and of what is refused: the tests of these names
    others = {"saved-bytes", "public-training", "public-refusals"}
    assert set(PROPERTIES) - {prop for prop, _, _ in PLANTED} - set(BY_NAME) == others


def test_what_is_not_refused_is_told(monkeypatch):
    pytest.importorskip("torch")

    def found():
        (row,) = Run(Selection({"torch": load("torch")}, None, ["public-refusals"], ["float32"])).rows()
        return row["status"], row["reason"]

    assert found() == ("pass", "")
    monkeypatch.setattr("contrastile.validation.options", lambda *_: Options())
    assert found() == ("fail", "tile=True: it was computed")


def test_every_property_says_what_it_is():
    assert all(each.about.endswith(".") for each in PROPERTIES.values())


def test_saved_bytes_tells_linear_from_quadratic(monkeypatch):
    torch = pytest.importorskip("torch")

    def full_logits(image, text, scale, *, backend, keep):
        return (scale * image @ text.T).logsumexp(dim=1).mean()

    def select(name):
        return Run(Selection({"torch": load(name)}, ["batch-doubling"], None, ["float32"]))

    assert [row["status"] for row in select("torch").rows()] == ["pass"]
    monkeypatch.setattr(memory, "clip_loss", full_logits)
    quadratic = select("torch")
    (row,) = quadratic.rows()
    assert row["status"] == "fail"
    assert re.search(r"b = \d+ and \d+: bytes: error", row["reason"])
    assert torch.is_grad_enabled()
    (skipped,) = Run(Selection({"numpy": NUMPY}, ["batch-doubling"], None, ["float32"])).rows()
    assert skipped["status"] == "skip"


def test_tile_options_reach_the_backend():
    seen = []

    def lse(block, columns, options):
        seen.append(options)
        return NUMPY.lse(block, columns, options)

    rows, _ = run(on_lse(lse), "tiles", "one-row")
    assert rows[0]["status"] == "pass"
    assert Options(tile=(7, 5)) in seen
    assert Options(tile=(1, 1)) in seen


def test_what_is_missing_the_second_time_is_not_the_same():
    one = np.ones(())
    whole = Outcome(loss=one, rows=np.ones((2, 3)), columns=(), scale=one)
    assert identical(whole, whole).ratio == 0.0
    assert "rows is missing" in str(identical(replace(whole, rows=None), whole))


def test_the_worst_of_a_peak_is_in_bytes():
    run = Run(Selection({"it": WRAPPERS["tile-ignored"].plant(NUMPY)}, ["peak-memory"], None, ["float32"]))
    list(run.rows())
    (failure,) = run.failures
    assert isinstance(failure.worst, Worst)
    assert failure.label.endswith("tile 32 x 32")
    assert failure.worst.error > 2 * 256 * 512 * 8
