"""The tester tested: defects that no mutant plants are caught by their property, which the sound backend passes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from contrastile.backends.contract import Options, Weights
from contrastile.backends.registry import load
from contrastile.mutate.registry import every
from contrastile.mutate.wrappers import WRAPPERS
from contrastile.mutate.wrapping import adding, doubled, seeing
from contrastile.verify.comparison import identical
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.runner import Run
from contrastile.verify.selection import Selection
from contrastile.verify.truth import Outcome
from contrastile.verify.wrapped import around

NUMPY = load("numpy")
RECORD = Path(__file__).resolve().parents[2] / "docs" / "results" / "mutants.json"


def gives_no_gradient_without_a_workspace():
    return adding(lambda primitive, *given: given[-1].workspace == 0 or primitive(*given))(NUMPY)


def doubled_at_100_rows():
    return doubled(lambda block: len(block.rows) == 100)(NUMPY)


def doubled_where_many_rows_are_wide():
    return doubled(lambda block: len(block.rows) > 5000 and block.rows.shape[1] > 8)(NUMPY)


def doubled_beyond_4100_features():
    return doubled(lambda block: block.rows.shape[1] > 4100)(NUMPY)


def swaps_rows_and_columns():
    return WRAPPERS["rows-and-columns-swapped"].plant(NUMPY)


def reads_past_the_end():
    def longer(primitive, block, *rest):
        columns = block.columns
        if columns.base is not None and columns.base.ndim == 2 and len(columns) >= 2:
            shape = (len(columns) + 1, columns.shape[1])
            block = replace(block, columns=as_strided(columns, shape, columns.strides)[1:])
        return primitive(block, *rest)

    return around(NUMPY, longer, "lse")


def merges_equal_columns():
    def lse(primitive, block, columns, options):
        found = primitive(block, columns, options)
        part = primitive(replace(block, columns=np.unique(block.columns, axis=0)), False, options)
        return replace(found, rows=found.rows._replace(negative_lse=part.rows.negative_lse))

    return around(NUMPY, lse, "lse")


def goes_below_zero():
    def sigmoid(primitive, *call):
        loss, total = primitive(*call)
        return loss - 2.0 * np.abs(loss), total

    return around(NUMPY, sigmoid, "sigmoid")


def crashes():
    def lse(*call):
        raise IndexError("tile out of range")

    return around(NUMPY, lse, "lse")


def with_other_weights(change):
    def call(primitive, block, weights, *rest):
        primitive(block, change(weights), *rest)

    return adding(call)(NUMPY)


def rounds_the_weight_of_a_certain_pair():
    """What the rows' log-sum-exp loses in float32: nothing beside the bound, everything beside a plain computation."""

    def change(w):
        n, p = w.rows.negative_lse[:, 0], w.rows.positive_lse[:, 0]
        lse = np.logaddexp(n, p).astype(np.float32).astype(np.float64)
        rounded = p + np.log(np.expm1(np.maximum(lse - p, 0.0)))
        return replace(w, rows=w.rows._replace(negative_lse=np.stack((rounded, 0 * rounded), 1)))

    return with_other_weights(change)


def takes_every_loss_for_the_cross_entropy():
    return with_other_weights(lambda w: Weights(*(side and side._replace(bars=None) for side in (w.rows, w.columns))))


def forgets_the_spread():
    def less(side):
        return side and side._replace(bars=side.bars and side.bars._replace(spread=0 * side.bars.spread))

    return with_other_weights(lambda w: Weights(less(w.rows), less(w.columns)))


def on_pairs(change: Callable, name: str):
    """One of the pairs' vectors is changed."""

    def changed(arrays, block):
        x = getattr(block.pairs, name)
        return block if x is None else replace(block, pairs=replace(block.pairs, **{name: change(x, block)}))

    return seeing(NUMPY, changed)


def of_32_bits(x, block):
    return x.astype(np.int32).astype(np.int64)


def from_the_end(x, block):
    return np.where(x < 0, x + len(block.columns), x)


def ids_as_float64():
    return on_pairs(lambda x, block: x.astype(np.float64), "row_ids")


def positives_of_32_bits():
    return on_pairs(of_32_bits, "positives")


def exclusions_of_32_bits():
    return on_pairs(of_32_bits, "excluded")


def positives_from_the_end():
    return on_pairs(from_the_end, "positives")


def exclusions_from_the_end():
    return on_pairs(from_the_end, "excluded")


PLANTED = [
    ("value", "ids-drop@far", ids_as_float64),
    ("value", "ids-target@far", ids_as_float64),
    ("value", "sigmoid-ids@far", positives_of_32_bits),
    ("value", "ids-drop@far", exclusions_of_32_bits),
    ("value", "ids-drop@far", positives_from_the_end),
    ("value", "ids-drop@far", exclusions_from_the_end),
    ("value", "ragged", crashes),
    ("options", "ragged", gives_no_gradient_without_a_workspace),
    ("sizes", "sizes", doubled_at_100_rows),
    ("sizes", "sizes", doubled_where_many_rows_are_wide),
    ("sizes", "sizes", doubled_beyond_4100_features),
    ("bars", "smoke", takes_every_loss_for_the_cross_entropy),
    ("bars", "labels", forgets_the_spread),
    ("plain", "certain", rounds_the_weight_of_a_certain_pair),
    ("duplicates", "labels", merges_equal_columns),
    ("non-negative", "sigmoid", goes_below_zero),
    ("guard-bands", "ragged", reads_past_the_end),
    ("growth", "growth", swaps_rows_and_columns),
    ("drawn", "drawn", crashes),
]


LONG = (doubled_at_100_rows, doubled_where_many_rows_are_wide)
PARAMETERS = [pytest.param(*each, marks=[pytest.mark.slow] * (each[-1] in LONG)) for each in PLANTED]


def run(backend, prop, case):
    # the oracle is no more exact than a plain float64 computation; sizes are tried in float32 alone
    dtype = "float32" if prop in ("plain", "growth", "sizes") else "float64"
    found = Run(Selection({"planted": backend}, [case], [prop], [dtype], examples=30))
    return list(found.rows()), found.failures


@pytest.mark.parametrize(("prop", "case", "defect"), PARAMETERS, ids=lambda x: getattr(x, "__name__", x))
def test_planted_defect_is_caught(prop, case, defect):
    (row,), (failure,) = run(defect(), prop, case)
    assert row["status"] == "fail"
    assert row["ratio"] >= 1
    assert failure.row is row
    assert row["reason"]


@pytest.mark.parametrize(("prop", "case"), sorted({each[:2] for each in PLANTED}))
def test_sound_backend_passes_where_defects_were_caught(prop, case):
    (row,), failures = run(NUMPY, prop, case)
    assert (row["status"], row["reason"], failures) == ("pass", "", [])
    assert row["ratio"] < 1


def test_every_property_catches_a_defect_and_says_what_it_is():
    mutants = {each["property"] for each in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"]}
    mutants |= {word for each in every() for word in each.checks}
    # what is refused: the test below
    assert set(PROPERTIES) <= {prop for prop, *_ in PLANTED} | mutants | {"public-refusals"}
    assert all(each.about.endswith(".") for each in PROPERTIES.values())


def test_what_is_not_refused_is_told(monkeypatch):
    pytest.importorskip("torch")

    def found():
        (row,) = Run(Selection({"torch": load("torch")}, None, ["public-refusals"], ["float32"])).rows()
        return row["status"], row["reason"]

    assert found() == ("pass", "")
    monkeypatch.setattr("contrastile.validation.options", lambda *_: Options())
    assert found() == ("fail", "tile=True: it was computed")


def test_what_is_missing_the_second_time_is_not_the_same():
    one = np.ones(())
    whole = Outcome(loss=one, rows=np.ones((2, 3)), columns=(), scale=one)
    assert identical(whole, whole).ratio == 0.0
    assert "rows is missing" in str(identical(replace(whole, rows=None), whole))
