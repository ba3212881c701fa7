"""What must hold before anything is timed: ring and gather against float64 and against one process, within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import torch

from contrastile import problems
from contrastile.backends.contract import Accuracy
from contrastile.backends.registry import load
from contrastile.schedules.local import Forward
from contrastile.schedules.problem import Problem
from contrastile.verify.arithmetic import arithmetic
from contrastile.verify.bounds import bounds
from contrastile.verify.run import compare
from contrastile.verify.shards import FIELDS, Cut, shares
from contrastile.verify.truth import Outcome, Truth, truth
from ring_run import features, sampled
from ring_run.bench import Bench, Part
from ring_run.plan import GATHER, LOCAL, RING, Trial
from ring_run.sampled import Scene
from ring_run.stand_ins import listening

KEY = ("check", "n", "exchange", "rows", "d", "scale")
Tensor = torch.Tensor


@dataclass(frozen=True)
class Found:
    """What a step found on this rank."""

    loss: Tensor
    gradients: tuple[Tensor, ...]
    saved: Forward

    @property
    def everything(self) -> tuple[Tensor, ...]:
        """All of it."""
        return self.loss, *self.gradients, *self.negatives, *self.positives

    @property
    def negatives(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps of rows and columns over all but the positives."""
        return self.saved.row_negative_lse, cast("Tensor", self.saved.column_negative_lse)

    @property
    def positives(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps of rows and columns over the positives."""
        return self.saved.row_positive_lse, cast("Tensor", self.saved.column_positive_lse)


def run(bench: Bench, part: Part, exchange: str) -> Found:
    """One step through the front door, and what its forward pass kept."""
    with listening() as heard:
        loss, gradients = bench.step(part, exchange)()
    return Found(loss, gradients, heard[0])


def verify(bench: Bench, *, brief: bool = False) -> bool:
    """Hold every schedule on every number of ranks to what is true; whether all passed, on all ranks.

    Args:
        bench: the run.
        brief: one small batch on all ranks, for a run whose record has the rest.
    """
    passed, whole = True, bench.ranks.size
    for trial in bench.plan.trials[:1] if brief else bench.plan.trials:
        known = Known.of(bench, trial)
        for n in [whole] if brief else bench.ranks.groups:
            for exchange in _exchanges(n):
                passed &= _report(bench, _trial(bench, trial, known, n, exchange))
    for exchange in () if brief else _exchanges(whole):
        passed &= _report(bench, _large(bench, exchange))
    return passed


def _exchanges(n: int) -> tuple[str, ...]:
    return (RING, GATHER) if n > 1 else (LOCAL,)


def _report(bench: Bench, row: dict[str, Any]) -> bool:
    """Put together what the ranks found, and say it."""
    everyone = bench.ranks.share(row)
    ratios = {name: max(each["ratios"][name] for each in everyone) for name in row["ratios"]}
    holds = all(ratio < 1 for ratio in ratios.values()) and all(each["repeats"] for each in everyone)
    row |= {"ratios": ratios, "repeats": all(each["repeats"] for each in everyone), "holds": holds}
    bench.add("checks", row, KEY)
    worst = ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items())
    repeats = "" if row["repeats"] else ", NOT the same bits twice"
    bench.ranks.say(
        f"verify {row['check']} {row['exchange']} n={row['n']} {row['sizes']}: {'pass' if holds else 'FAIL'}: "
        f"{worst}{repeats}, {row['seconds']:.1f} s"
    )
    if not holds and "worst" in row:
        ranks = (f"rank {rank}: {each['worst']}" for rank, each in enumerate(everyone))
        bench.ranks.say("  " + "; ".join(ranks))
    return holds


@dataclass(frozen=True)
class Known:
    """A small batch: the problem, its truth, the bounds of one process, and what one process made of it."""

    problem: Problem
    exact: Truth
    allowed: Outcome
    alone: Outcome

    @staticmethod
    def of(bench: Bench, trial: Trial) -> Known:
        """On the host; every rank for itself."""
        dtype = getattr(torch, bench.plan.dtype)
        whole = features.pairs(0, trial.pairs, trial.d, bench.ranks.device, dtype)
        problem = problems.clip(*(_host(x) for x in whole), trial.scale).problem
        exact = truth(problem)
        alone = run(bench, bench.part(1, [trial.pairs], trial.d, trial.scale), LOCAL)
        return Known(problem, exact, bounds(problem, exact, _facts(bench), bench.plan.dtype), _outcome(_moved(alone)))


def _facts(bench: Bench) -> Accuracy:
    return load(bench.backend).accuracy(bench.plan.dtype, bench.ranks.kind)


def _trial(bench: Bench, trial: Trial, known: Known, n: int, exchange: str) -> dict[str, Any]:
    """Every element of a small batch against the oracle, and against one process."""
    started, ranks, dtype = time.monotonic(), bench.ranks, bench.plan.dtype
    sizes = shares(trial.pairs, trial.weights[:n])
    part = bench.part(n, sizes, trial.d, trial.scale)
    found = run(bench, part, exchange)
    repeats = _alike(found, run(bench, part, exchange))
    first = ranks.rank - part.place
    cut = Cut(known.problem, part.shards())
    got = cut.joined([_outcome(x) for x in ranks.share(_moved(found))[first : first + n]], float(n))
    allowed = known.allowed
    if n > 1:
        allowed = bounds(known.problem, known.exact, _facts(bench), dtype, spread=cut.spread(exchange))
    worst = compare(got, known.exact.outcome, allowed, FIELDS[:-1])
    ratios = {"float64": worst.ratio}
    if n > 1:
        ratios["one process"] = compare(got, known.alone, _sum(allowed, known.allowed), FIELDS[:-1]).ratio
    return {
        "check": "every element",
        "n": n,
        "exchange": exchange,
        "rows": max(sizes),
        "sizes": sizes,
        "d": trial.d,
        "scale": trial.scale,
        "ratios": ratios,
        "worst": str(worst),
        "repeats": repeats,
        "seconds": time.monotonic() - started,
    }


def _alike(one: Found, other: Found) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one.everything, other.everything, strict=True))


def _host(x: Tensor) -> Any:
    return x.detach().double().cpu().numpy()


def _moved(found: Found) -> tuple[Any, ...]:
    return tuple(_host(x) for x in found.everything)


def _outcome(values: tuple[Any, ...]) -> Outcome:
    loss, rows, columns, scale, row_negative, column_negative, row_positive, column_positive = values
    return Outcome(
        loss,
        rows,
        (columns,),
        scale,
        row_negative_lse=row_negative,
        row_positive_lse=row_positive,
        column_negative_lse=column_negative,
        column_positive_lse=column_positive,
    )


def _sum(one: Outcome, other: Outcome) -> Outcome:
    """The sum of two outcomes, field by field."""
    total: dict[str, Any] = {}
    for name in (f.name for f in fields(Outcome)):
        x, y = getattr(one, name), getattr(other, name)
        total[name] = tuple(a + b for a, b in zip(x, y, strict=True)) if isinstance(x, tuple) else x
        if isinstance(x, np.ndarray):
            total[name] = x + y
    return Outcome(**total)


def scene(bench: Bench, part: Part, exchange: str) -> Scene:
    """What the bounds of sampled rows need to know of this batch."""
    d, pairs, scale = part.image.shape[1], sum(part.sizes), float(part.scale.detach())
    spread = None if part.n == 1 else Cut(None, part.shards()).spread(exchange)  # type: ignore[arg-type]
    lengths = (
        x.double().norm(dim=1) for tower in (part.image, part.text) for x in tower.detach().split(features.CHUNK)
    )
    longest = max((float(x.max()) for x in lengths if len(x)), default=0.0)
    how = arithmetic(_facts(bench), bench.plan.dtype, pairs, [pairs], None, spread)
    return Scene(how, pairs, d, scale, bench.ranks.most(longest))


def pieces(bench: Bench, part: Part, tower: int) -> Callable[[], Iterator[tuple[int, Tensor]]]:
    """The whole batch's images (0) or texts (1), piece by piece, drawn anew each time."""
    d, device, dtype = part.image.shape[1], bench.ranks.device, part.image.dtype

    def walk() -> Iterator[tuple[int, Tensor]]:
        for start, *towers in features.walk(0, sum(part.sizes), d, device, dtype):
            yield start, towers[tower]

    return walk


def hold(bench: Bench, part: Part, found: Found, known: Scene, count: int, *, every: bool) -> dict[str, float]:
    """Errors in bounds: log-sum-exps and gradients of sampled rows and columns, and the loss.

    Args:
        bench: the run.
        part: this rank's.
        found: what is held to float64.
        known: of the whole batch.
        count: rows, and columns, of this rank whose gradients are held to float64.
        every: whether all log-sum-exps are, and the loss with them; else those of the samples, and the loss to what
            follows from the log-sum-exps that were found.
    """
    a, ratios = known.arithmetic, dict[str, float]()
    towers = part.image.detach(), part.text.detach()
    rows = len(towers[0])
    index = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[:count].sort().values
    index = index.to(towers[0].device)
    own_lse = [torch.logaddexp(*both) for both in zip(found.negatives, found.positives, strict=True)]
    lengths = (a.over_columns, a.over_rows), (a.over_rows, a.over_columns)
    shares_of_loss = 0.0
    for side, name in enumerate(("image", "text")):
        own, other = towers[side], pieces(bench, part, 1 - side)
        taken = torch.arange(rows, device=index.device) if every else index
        exact = sampled.lse_rows(own[taken], other(), known.scale)
        ratios[f"{name} lse"] = sampled.ratio(own_lse[side][taken], exact.cpu(), known.lse(lengths[side][0]))
        others = bench.ranks.joined(own_lse[1 - side], part.n)
        numbers = index + part.first
        gradient = sampled.gradient_rows(
            known, own[index], numbers, other(), exact[index] if every else exact, others, lengths[side]
        )
        # what the trainer's mean over the ranks makes of it
        ratios[f"d {name}"] = sampled.ratio(
            found.gradients[side][index].double() / part.n, gradient.exact, gradient.bound
        )
        shares_of_loss += float((exact if every else own_lse[side].double()).sum())
    shares_of_loss -= 2 * known.scale * sum(float((x.double() * y.double()).sum()) for x, y in _slices(*towers))
    place = bench.ranks.rank - part.place
    total = sum(bench.ranks.share(shares_of_loss)[place : place + part.n])
    allowed = known.loss(given_lse=not every)
    ratios["loss" if every else "loss from its parts"] = sampled.ratio(found.loss, known.weight * total, allowed)
    return ratios


def _slices(*towers: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(features.CHUNK) for x in towers), strict=True)


def _large(bench: Bench, exchange: str) -> dict[str, Any]:
    """A batch of the sizes that are timed: log-sum-exps and loss in full, gradients where they are sampled."""
    started, n = time.monotonic(), bench.ranks.size
    each, d, count = bench.plan.sampled
    sizes = shares(each * n, bench.plan.trials[0].weights[:n])
    part = bench.part(n, sizes, d)
    found = run(bench, part, exchange)
    repeats = _alike(found, run(bench, part, exchange))
    known = scene(bench, part, exchange)
    ratios = hold(bench, part, found, known, count, every=True)
    if n > 1:
        ratios["loss of one process"] = _beside_one(bench, part, found, known)
    return {
        "check": "sampled rows",
        "n": n,
        "exchange": exchange,
        "rows": max(sizes),
        "sizes": sizes,
        "d": d,
        "scale": known.scale,
        "ratios": ratios,
        "repeats": repeats,
        "seconds": time.monotonic() - started,
    }


def _beside_one(bench: Bench, part: Part, found: Found, known: Scene) -> float:
    """How far the loss lies from that of one process, in the sum of both bounds."""
    whole = bench.part(1, [known.pairs], known.width, known.scale)
    loss = run(bench, whole, LOCAL).loss
    return sampled.ratio(found.loss, _host(loss), known.loss() + scene(bench, whole, LOCAL).loss())
