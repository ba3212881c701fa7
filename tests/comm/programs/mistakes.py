"""A training loop in which one rank makes another call than the others; see test_mistakes and docs/how-to/faults.md.

Arguments: engine, mistake, exchange, rank, and ``cuda`` for GPUs. Every rank holds every loss and gradient to the
oracle of what the ranks passed to that call, and ends with a line: how many were right, that one was WRONG, or what it
raised.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from engines import PATIENCE, say, started

import contrastile
from contrastile import problems
from contrastile.backends import load
from contrastile.comm.communicator import Communicator, ExchangeError, MismatchError
from contrastile.comm.connect import connect
from contrastile.comm.watchdog import deadline_or
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import compare
from contrastile.verify.shards import Cut
from contrastile.verify.truth import Outcome, truth

STEPS, STEP = 5, 2
WIDTH, SCALE, BACKEND = 8, 14.25, "torch"
ENGINE, MISTAKE, EXCHANGE, FAULTY = *sys.argv[1:4], int(sys.argv[4])
KIND = "cuda" if "cuda" in sys.argv[5:] else "cpu"


class WrongError(Exception):
    """A number that is not the right one, and no error."""


def device(rank: int) -> torch.device:
    if KIND == "cpu":
        return torch.device("cpu")
    found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def features(rank: int, batch: int, model: int) -> list[Any]:
    """Image and text features of a rank; ranks have different numbers of them."""
    draw = np.random.default_rng([rank, batch, model])
    found = draw.standard_normal((2, 20 + rank, WIDTH))
    return list((found / np.linalg.norm(found, axis=2, keepdims=True)).astype(np.float32))


class Call:
    """One call of the loss, of which every rank can say what it must give.

    ``batches`` are those that the ranks pass, by rank; ``scale`` is this rank's.
    """

    def __init__(self, ranks: Any, group: Any, batches: list[int], model: int = 0, *, scale: float = SCALE) -> None:
        self.rank, self.batches, self.model = ranks.rank, batches, model
        own = features(self.rank, batches[self.rank], model)
        self.inputs = [torch.tensor(x, device=device(self.rank), requires_grad=True) for x in own]
        self.scale = torch.tensor(scale, device=device(self.rank), requires_grad=True)
        self.loss = contrastile.clip_loss(*self.inputs, self.scale, group=group, exchange=EXCHANGE, backend=BACKEND)

    def backward(self) -> None:
        """The backward; what it gave is right."""
        global right
        self.loss.backward()
        sizes = [20 + r for r in range(len(self.batches))]
        each = [features(r, batch, self.model) for r, batch in enumerate(self.batches)]
        image, text = (np.concatenate(x).astype(np.float64) for x in zip(*each, strict=True))
        problem = problems.clip(image, text, SCALE).problem
        exact = truth(problem)
        spread = Cut.of(problem, sizes, sizes).spread(EXCHANGE)
        bound = bounds(problem, exact, load(BACKEND).accuracy("float32", KIND), "float32", spread=spread)
        start = sum(sizes[: self.rank])
        mine = slice(start, start + sizes[self.rank])

        def cut(x: Outcome) -> Outcome:
            return replace(x, rows=x.rows[mine], columns=(x.columns[0][mine],))

        numbers = (self.loss, *(x.grad for x in (*self.inputs, self.scale)))
        value, d_image, d_text, d_scale = (x.detach().cpu().numpy().astype(np.float64) for x in numbers)
        n = len(sizes)
        got = replace(exact.outcome, loss=value, rows=d_image / n, columns=(d_text / n,), scale=d_scale)
        worst = compare(got, cut(exact.outcome), cut(bound), ("loss", "rows", "columns", "scale"))
        if not worst.ratio <= 1:
            raise WrongError(f"{worst.field} is off by {worst.ratio:.3g} times what it may be, by no error")
        right += 1

    def nothing(self) -> None:
        """The backward; nothing that it gave is a number."""
        self.loss.backward()
        for x in (self.loss, *(x.grad for x in (*self.inputs, self.scale))):
            if not x.isnan().all():
                raise WrongError(f"{x.flatten()[0]} of scales that differ, by no error")


right = 0


def skipped_backward(ranks: Any, step: int, *, now: bool) -> None:
    call = Call(ranks, ranks.world, [step] * ranks.size)
    if not now:
        call.backward()


def skipped_forward(ranks: Any, step: int, *, now: bool) -> None:
    # of the calls that are made the numbers are right: they are of what the ranks passed
    if now:
        return
    number = step - (ranks.rank == FAULTY and step > STEP)
    batches = [number + (r == FAULTY and number >= STEP) for r in range(ranks.size)]
    Call(ranks, ranks.world, batches).backward()


def raised_between(ranks: Any, step: int, *, now: bool) -> None:
    call = Call(ranks, ranks.world, [step] * ranks.size)
    if now:
        raise RuntimeError("this rank has a defect")
    call.backward()


def broken_backward(ranks: Any, step: int, *, now: bool) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("out of memory")

    call = Call(ranks, ranks.world, [step] * ranks.size)
    with mock.patch.object(Communicator, "exchange", broken) if now else nullcontext(), suppress(MemoryError):
        call.backward()


def swapped_backwards(ranks: Any, step: int, *, now: bool) -> None:
    both = [Call(ranks, ranks.world, [step] * ranks.size, model) for model in (0, 1)]
    for call in reversed(both) if now else both:
        call.backward()


def two_models(ranks: Any, step: int, *, now: bool) -> None:
    both = [Call(ranks, ranks.world, [step] * ranks.size, model) for model in (0, 1)]
    for call in reversed(both):
        call.backward()


def two_models_in_another_order(ranks: Any, step: int, *, now: bool) -> None:
    if not groups:
        groups.extend(ranks.part([list(range(ranks.size))]) for _ in range(2))
    for model in (1, 0) if now else (0, 1):
        Call(ranks, groups[model], [step] * ranks.size, model).backward()


def another_scale(ranks: Any, step: int, *, now: bool) -> None:
    # on a host the call raises; on a device it gives NaN, and the next call raises
    call = Call(ranks, ranks.world, [step] * ranks.size, scale=SCALE + now)
    (call.nothing if step == STEP else call.backward)()


groups: list[Any] = []
MISTAKES: dict[str, Callable[..., None]] = {
    "skipped backward": skipped_backward,
    "skipped forward": skipped_forward,
    "swapped backwards": swapped_backwards,
    "raised between": raised_between,
    "broken backward": broken_backward,
    "two models": two_models,
    "two models in another order": two_models_in_another_order,
    "another scale": another_scale,
}


def main() -> None:
    ranks = started()
    device(ranks.rank)
    # ranks may take long to come here, which is no mistake
    connect(ranks.world, deadline=PATIENCE)
    connect(ranks.world, deadline=deadline_or(None))
    try:
        for step in range(STEPS):
            now = step == STEP and ranks.rank == FAULTY
            MISTAKES[MISTAKE](ranks, step, now=now)
    except BaseException as error:
        text = str(error).partition("\n")[0]
        say(ranks.rank, f"{time.time()} {right} right, then {type(error).__name__}: {text}")
        if isinstance(error, (ExchangeError, MismatchError)):
            # the launcher ends all ranks when this one has ended: the others are to say first what they raise
            time.sleep(2)
        raise
    say(ranks.rank, f"{time.time()} {right} right")
    ranks.finish()


main()
