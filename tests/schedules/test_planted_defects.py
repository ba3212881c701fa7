"""Known defects of rings and gathers, planted one at a time: the distributed properties catch every one.

Each names the smallest world that shows it: several need three ranks, where going round one way is not the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from in_process_worlds import failing, found_one_by_one, rows

from contrastile.backends.arrays import NumpyArrays
from contrastile.comm.inprocess import InProcess
from contrastile.schedules import gather, local, ring, sums
from contrastile.schedules.handshake import Handshake
from contrastile.schedules.placement import Placement
from contrastile.verify import distributed

CASES = ("ragged", "ids-drop", "blocks", "sigmoid-ids", "labels")
MATHEMATICS = ("ring", "gather", "reduction", "agreement")
Patch = pytest.MonkeyPatch

visits, blocks, shards = ring.visits, ring._blocks, ring._Shards.__iter__
Accumulator = ring.RingAccumulator
send_on, combined, result = Accumulator.send_on, Accumulator._combined, Accumulator.result
mean, summed = sums.mean, sums.summed
over, merged, returned, added_up = gather._over_columns, gather._merged, gather._returned, gather._added_up
meet = Handshake.meet


@dataclass(frozen=True)
class Defect:
    """A defect.

    Attributes:
        plant: plants it.
        least: the smallest world in which it shows.
        properties: those of which one is to catch it.
        cases: on which.
    """

    plant: Callable[[Patch], None]
    least: int = 2
    properties: tuple[str, ...] = MATHEMATICS
    cases: tuple[str, ...] = CASES


DEFECTS: dict[str, Defect] = {}


def defect(**facts: Any) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        DEFECTS[plant.__name__] = Defect(plant, **facts)
        return plant

    return register


def of_front_door(*losses: str) -> dict[str, Any]:
    return {"properties": losses, "cases": ("front-door",)}


def in_both(patch: Patch, name: str, function: Any) -> None:
    """Both schedules import it by name."""
    for module in (ring, gather):
        patch.setattr(module, name, function)


@defect(least=3)
def tile_of_algorithm_3_as_printed(patch: Patch) -> None:
    """Inf-CL Alg. 3 line 6: the tile at hand is taken for shard (i + j - 1) mod n."""

    def wrong(placement: Placement, *rest: Any) -> Iterator[Any]:
        for step, (_, held) in enumerate(visits(placement, *rest)):
            yield (placement.rank + step) % placement.size, held

    patch.setattr(ring, "visits", wrong)


@defect(least=2)
def last_shard_is_skipped(patch: Patch) -> None:
    def wrong(placement: Placement, *rest: Any) -> Iterator[Any]:
        yield from islice(visits(placement, *rest), max(1, placement.size - 1))

    patch.setattr(ring, "visits", wrong)


@defect(least=2)
def own_shard_counted_twice(patch: Patch) -> None:
    def wrong(placement: Placement, *rest: Any) -> Iterator[Any]:
        own = None
        for owner, held in visits(placement, *rest):
            own = own or (owner, held)
            yield own if (placement.rank + 1) % placement.size == owner else (owner, held)

    patch.setattr(ring, "visits", wrong)


@defect(least=2)
def shard_is_read_before_it_has_arrived(patch: Patch) -> None:
    def wrong(placement: Placement, arrays: Any, own: Any, sizes: Any) -> Iterator[Any]:
        held, n = list(own), placement.size
        for step in range(n):
            owner = (placement.rank - step) % n
            yield owner, held
            if step + 1 < n:
                following = [
                    arrays.full((k, *x.shape[1:]), 0, arrays.dtype(x), x)
                    for k, x in zip(sizes((owner - 1) % n), own, strict=True)
                ]
                pending.append(placement.communicator.shift(held, following))
                held = following

    pending: list[Any] = []
    patch.setattr(ring, "visits", wrong)


@defect(least=2, properties=("delivery",))
def sums_are_cleared_before_they_have_left(patch: Patch) -> None:
    """Only late delivery shows it: what is sent at once has left already."""

    def wrong(self: Any, owner: int, here: Sequence[Any], sizes: Any) -> None:
        send_on(self, owner, here, sizes)
        for x in self._sent:
            x[...] = 0.0

    patch.setattr(ring.RingAccumulator, "send_on", wrong)


@defect(least=2)
def gradients_of_columns_stay_on_the_last_rank(patch: Patch) -> None:
    """DK does not return to its owner: each rank keeps what it added last, its successor's."""

    def wrong(self: Any) -> list[Any]:
        found = result(self)
        return [np.resize(sent, x.shape) for sent, x in zip(self._sent or found, found, strict=True)]

    patch.setattr(ring.RingAccumulator, "result", wrong)


@defect(least=2)
def column_state_is_merged_twice(patch: Patch) -> None:
    def wrong(self: Any, here: Sequence[Any]) -> list[Any]:
        once, combine = combined(self, here), self.combine * len(here)
        return once if self._pending is None else [f(x, y) for f, x, y in zip(combine, once, here, strict=False)]

    patch.setattr(ring.RingAccumulator, "_combined", wrong)


@defect(least=2)
def column_state_is_replaced_and_not_merged(patch: Patch) -> None:
    def wrong(self: Any, here: Sequence[Any]) -> list[Any]:
        combined(self, here)
        return list(here)

    patch.setattr(ring.RingAccumulator, "_combined", wrong)


@defect(least=1)
def log_sum_exps_are_merged_by_their_maximum(patch: Patch) -> None:
    patch.setattr(NumpyArrays, "merge", lambda self, a, b: np.maximum(a, b))


@defect(least=2)
def a_rank_with_no_rows_does_not_take_part(patch: Patch) -> None:
    def wrong(placement: Placement, *rest: Any) -> Iterator[Any]:
        for step, visit in enumerate(visits(placement, *rest)):
            if step == 0 or placement.shards.rows[placement.rank]:
                yield visit

    patch.setattr(ring, "visits", wrong)


def shifted_pairs(patch: Patch, offset: Callable[[Any, Any], int]) -> None:
    def wrong(problem: Any, placement: Any, visit: Any) -> Iterator[Any]:
        for where, block in blocks(problem, placement, visit):
            by = placement.shards.start(visit.owner) - offset(placement, visit)
            pairs = {
                name: None if getattr(block.pairs, name) is None else getattr(block.pairs, name) + by
                for name in ("positives", "excluded")
            }
            yield where, replace(block, pairs=replace(block.pairs, **pairs))

    patch.setattr(ring, "_blocks", wrong)


@defect(least=2)
def positive_by_global_index_in_a_shard(patch: Patch) -> None:
    shifted_pairs(patch, lambda placement, visit: 0)


@defect(least=2)
def positive_looked_for_in_the_own_shard_alone(patch: Patch) -> None:
    shifted_pairs(patch, lambda placement, visit: placement.start)


@defect(least=2, cases=("ids-drop", "labels"))
def ids_stay_while_columns_travel(patch: Patch) -> None:
    def wrong(self: Any) -> Iterator[Any]:
        own = None
        for visit in shards(self):
            own = visit.ids if own is None else own
            yield replace(visit, ids=np.resize(own, visit.ids.shape) if own is not None and own.size else visit.ids)

    patch.setattr(ring._Shards, "__iter__", wrong)


@defect(least=2)
def scale_gradient_times_n(patch: Patch) -> None:
    for module in (sums, gather):
        patch.setattr(module, "mean", lambda placement, *call: mean(placement, *call) * placement.size)


@defect(least=2)
def scale_gradient_of_the_own_rows_alone(patch: Patch) -> None:
    def wrong(rows_: Any, scale: Any, placement: Any, *rest: Any) -> Any:
        return local.gradients_from_sums(rows_, scale, *rest)

    def alone(placement: Any, arrays: Any, whole: Any, wants: Any, numbers: Any) -> Any:
        sums, _ = returned(placement, arrays, whole, wants, numbers)
        return sums, [x * placement.size for x in numbers]

    patch.setattr(ring, "gradients_over_ranks", wrong)
    patch.setattr(gather, "_returned", alone)


@defect(least=2)
def encoders_get_one_nth(patch: Patch) -> None:
    patch.setattr(Placement, "factor", property(lambda self: 1.0))


@defect(least=2, properties=("reduction",))
def a_sum_is_taken_for_a_mean(patch: Patch) -> None:
    patch.setattr(Placement, "factor", property(lambda self: float(self.size)))


@defect(least=1, properties=("reduction",))
def the_gradient_from_above_is_ignored(patch: Patch) -> None:
    weights = sums.scaled_weights
    in_both(patch, "scaled_weights", lambda problem, upstream: weights(problem, upstream * 0 + 1))


@defect(least=2)
def loss_of_the_own_rows_alone(patch: Patch) -> None:
    def wrong(problem: Any, loss: Any, *lses: Any, arrays: Any) -> local.Forward:
        return local.Forward(arrays.cast(loss, arrays.dtype(problem.scale)), *lses)

    def of_two_directions(problem: Any, arrays: Any, loss: Any, *state: Any) -> Any:
        total, *found = over(problem, arrays, loss, *state)
        return total if problem.placement.size == 1 else loss, *found

    in_both(patch, "finalize_loss", wrong)
    patch.setattr(gather, "_over_columns", of_two_directions)


@defect(least=2, properties=("agreement",), cases=("ragged",))
def ranks_add_in_an_order_of_their_own(patch: Patch) -> None:
    def wrong(placement: Any, arrays: Any, *numbers: Any) -> Any:
        return [x * (1 + placement.rank * np.finfo(np.float64).eps) for x in summed(placement, arrays, *numbers)]

    in_both(patch, "summed", wrong)
    patch.setattr(sums, "summed", wrong)


@defect(least=2, properties=("agreement",), cases=("ragged",))
def ranks_of_a_gather_add_in_an_order_of_their_own(patch: Patch) -> None:
    def wrong(problem: Any, *rest: Any) -> Any:
        total, *found = over(problem, *rest)
        return total * (1 + problem.placement.rank * np.finfo(np.float64).eps), *found

    patch.setattr(gather, "_over_columns", wrong)


@defect(least=2, properties=("gather",))
def weights_of_other_ranks_columns_are_not_theirs(patch: Patch) -> None:
    def wrong(problem: Any, *rest: Any) -> Any:
        *found, everywhere = over(problem, *rest)
        if everywhere is not None:
            _, (weights, _) = everywhere
            weights[:] = np.resize(problem.column_weight, weights.shape) if problem.column_weight.size else 0
        return *found, everywhere

    patch.setattr(gather, "_over_columns", wrong)


@defect(least=2, properties=("gather",))
def column_state_of_a_gather_merged_twice(patch: Patch) -> None:
    patch.setattr(gather, "_merged", lambda arrays, parts: merged(arrays, [[*x, x[-1]] for x in parts]))


@defect(least=2, properties=("gather",))
def gathered_gradients_are_cut_and_not_summed(patch: Patch) -> None:
    patch.setattr(gather, "_added_up", lambda arrived, me, own: own)


@defect(least=2, properties=("gather",))
def gathered_gradients_are_averaged(patch: Patch) -> None:
    """DisCo Alg. 1: AVG, and DDP averages again."""
    patch.setattr(gather, "_added_up", lambda arrived, me, own: added_up(arrived, me, own) / (len(arrived) + 1))


@defect(least=2, properties=("gather",), cases=("ids-drop",))
def columns_are_joined_in_the_order_of_arrival(patch: Patch) -> None:
    """This rank's first, then its predecessor's: as a ring brings them."""
    all_gather = InProcess.all_gather

    def wrong(self: InProcess, own: Any, whole: Any, sizes: Any) -> Any:
        pending = all_gather(self, own, whole, sizes)

        class Turned:
            def wait(self) -> None:
                pending.wait()
                if whole.ndim > 1:
                    whole[...] = np.roll(whole, sizes[0], axis=0)

        return Turned()

    patch.setattr(InProcess, "all_gather", wrong)


@defect(least=2, **of_front_door("clip-loss", "info-nce", "sigmoid-loss"))
def weights_are_those_of_the_own_batch(patch: Patch) -> None:
    def wrong(self: Handshake, arrays: Any, rows_: Any, *rest: Any, **more: Any) -> Any:
        return replace(meet(self, arrays, rows_, *rest, **more), rows=max(1, rows_.shape[0]))

    patch.setattr(Handshake, "meet", wrong)


@defect(least=2, **of_front_door("clip-loss", "info-nce", "nt-xent", "sigmoid-loss"))
def every_rank_numbers_its_columns_from_0(patch: Patch) -> None:
    def wrong(self: Handshake, *call: Any, **more: Any) -> Any:
        return replace(meet(self, *call, **more), start=0)

    patch.setattr(Handshake, "meet", wrong)


@defect(least=2, **of_front_door("sup-con"))
def partners_are_counted_on_the_own_rank(patch: Patch) -> None:
    patch.setattr(Handshake, "count_in", lambda self, arrays, needles: arrays.count_in(needles, needles))


@defect(least=2, **of_front_door("sup-con"))
def anchors_are_counted_on_the_own_rank(patch: Patch) -> None:
    patch.setattr(Handshake, "total", lambda self, arrays, x: x)


def caught(n: int, planted: Defect) -> bool:
    assert set(planted.properties) <= set(distributed.DISTRIBUTED)
    for row in found_one_by_one(n, planted.properties, planted.cases):
        # a defect that no longer fits the code it is planted in catches itself
        assert not re.search("raised (Type|Attribute|Name)Error", row["reason"]), row
        if row["status"] == "fail":
            return True
    return False


@pytest.mark.parametrize("name", list(DEFECTS))
def test_a_planted_defect_is_caught(name: str, monkeypatch: Patch) -> None:
    planted = DEFECTS[name]
    planted.plant(monkeypatch)
    for n in {planted.least, 4}:
        assert caught(n, planted), f"not caught in a world of {n}"


@pytest.mark.parametrize("name", [name for name, each in DEFECTS.items() if each.least > 1])
def test_a_smaller_world_does_not_show_it(name: str, monkeypatch: Patch) -> None:
    planted = DEFECTS[name]
    planted.plant(monkeypatch)
    assert not caught(planted.least - 1, planted)


def test_without_a_defect_nothing_is_caught() -> None:
    for n in (1, 2, 3, 4):
        assert not failing(rows(n, [*MATHEMATICS, "delivery"], CASES))


def test_eager_delivery_forgives_a_buffer_that_is_reused(monkeypatch: Patch) -> None:
    DEFECTS["sums_are_cleared_before_they_have_left"].plant(monkeypatch)
    assert not failing(rows(3, ["ring"], ["ragged"]))
    assert failing(rows(3, ["delivery"], ["ragged"])) == {"delivery"}
