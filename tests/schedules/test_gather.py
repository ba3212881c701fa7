"""The gather: few messages, the same bits on every rank, and what comes back owns its memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from in_process_worlds import Counting, cut, group, placement

from contrastile.backends.contract import Array, Backend, Block, ColumnForm, Finished, Options, Statistics, Weights
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess
from contrastile.schedules import gather, local
from contrastile.verify.execution import materialise

NUMPY = load("numpy")


def finished(
    block: Block, weights: Weights, upstream: Array | None, columns: ColumnForm | None, options: Options
) -> Finished:
    """``contract.Finished`` by way of sums, which it is to save: what a schedule makes of it is the question here."""
    rows, over = np.zeros(block.rows.shape), np.zeros(block.columns.shape)
    sides = [side and side._replace(weight=side.weight * upstream) for side in (weights.rows, weights.columns)]
    NUMPY.gradients(block, Weights(*sides, weights.kept), rows, over, options)  # type: ignore[arg-type]
    side = {None: None, "sums": over, "gradient": over * block.scale}[columns]
    return Finished(rows * block.scale, side, NUMPY.arrays.inner(block.rows, rows))


FINISHING = replace(NUMPY, finished=finished)


def keeping(block: Block, columns: bool, options: Options) -> Statistics:
    """What is kept says of which block it is."""
    kept = np.array([*block.rows.shape, *block.columns.shape], dtype=np.int64)
    return replace(NUMPY.lse(block, columns, options), kept=kept)


def room(m: int, n: int, *_: Any) -> int:
    """What ``keeping`` keeps."""
    return 32


def outcome(
    n: int, case: str, backend: Backend = NUMPY, columns: bool = True, scale: bool = True, keep: bool = False
) -> list[tuple[Counter[str], local.Gradients]]:
    parts = cut(case, range(2, n + 2), range(n + 1, 1, -1))

    def program(comm: InProcess) -> tuple[Counter[str], local.Gradients]:
        counting = Counting(comm)
        where = placement(counting, parts, "gather")  # type: ignore[arg-type]
        problem = materialise(parts.part(comm.rank, where), NUMPY, "float64")
        wanted = local.Wanted(True, (columns,) * len(problem.columns), scale)
        saved = gather.forward(problem, backend, Options(), wanted=wanted if keep else None)
        return counting.count, gather.backward(problem, saved, np.asarray(-0.7), wanted, backend, Options())

    found: list[Any] = group(n).run(program)
    return found


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_messages_are_few(n: int) -> None:
    for count, _ in outcome(n, "ragged"):
        assert count == {
            # the columns, once
            "all_gather 2": 1,
            # the loss, what each rank's rows give every column, and the weights and targets of its own
            "exchange number 2 2 2 1 1": 1,
            # the columns' sums, and the scale's gradient
            "exchange 2 number": 1,
        }


@pytest.mark.parametrize(("columns", "scale"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("case", ["ragged", "blocks", "one-row"])
@pytest.mark.parametrize("n", [1, 3])
def test_finished_rows_are_those_of_sums_and_cost_no_other_message(
    n: int, case: str, columns: bool, scale: bool
) -> None:
    both = [outcome(n, case, backend, columns, scale) for backend in (NUMPY, FINISHING)]
    for (count, plain), (again, found) in zip(*both, strict=True):
        assert count == again
        assert np.array_equal(plain.rows, found.rows)
        assert (found.scale is None) == (not scale)
        assert plain.scale == found.scale
        for a, b in zip(plain.columns, found.columns, strict=True):
            assert (a is None) == (b is None) == (not columns)
            assert a is None or np.array_equal(a, b)


@pytest.mark.parametrize("case", ["ragged", "blocks", "one-row"])
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_kept_of_all_columns_comes_back_and_changes_nothing(n: int, case: str) -> None:
    given: list[list[int]] = []

    def noted(block: Block, weights: Weights, *rest: Any) -> Finished:
        assert weights.kept is not None
        given.append(weights.kept.tolist())
        assert given[-1] == [*block.rows.shape, *block.columns.shape]
        return finished(block, weights, *rest)

    kept = outcome(n, case, replace(FINISHING, keeping=keeping, keeps=room, finished=noted), keep=True)
    assert len(given) == n
    for (count, found), (again, plain) in zip(kept, outcome(n, case, FINISHING), strict=True):
        assert count == again
        assert all(map(np.array_equal, (found.rows, *found.columns), (plain.rows, *plain.columns)))
        assert found.scale == plain.scale


@pytest.mark.parametrize("why", ["nobody asked", "a tower is frozen", "no room"])
def test_nothing_is_kept_where(why: str) -> None:
    def asked(*_: Any) -> Statistics:
        raise AssertionError("what is kept here would never be used")

    backend = replace(FINISHING, keeping=asked, keeps=room if why != "no room" else lambda *_: 0)
    learns = why != "a tower is frozen"
    assert len(outcome(3, "ragged", backend, columns=learns, keep=why != "nobody asked")) == 3


def test_a_world_of_one_sends_nothing() -> None:
    ((count, _),) = outcome(1, "ragged")
    assert not count


@pytest.mark.parametrize("n", [1, 3])
def test_gradients_of_several_blocks_share_no_memory(n: int) -> None:
    for _, found in outcome(n, "blocks"):
        first, _, last = found.columns
        assert not np.shares_memory(first, last)
        assert first.base is None or first.base.shape == first.shape
