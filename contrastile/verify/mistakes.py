"""Mistakes of ranks that share a public loss: each is one error, the same on every rank, and never a wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from contrastile import evaluation, losses
from contrastile.backends.contract import state_dtype
from contrastile.comm.calls import Label
from contrastile.comm.communicator import Communicator, ExchangeError, MismatchError
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, wrong
from contrastile.verify.execution import putter
from contrastile.verify.shards import EXCHANGES
from contrastile.verify.trial import SkipError, Subject

CASE = "mistakes"
_WIDTH = 20
_UNWANTED = "a gradient that the others do not want"


def _told(told: list[str], error: str) -> Worst:
    """Whether every rank has raised an error, and the same."""
    if not all(told):
        return wrong(f"a rank raised no {error}")
    same = len(set(told)) == 1
    return NOTHING if same else wrong(f"ranks raised different errors: {sorted(set(told))}")


def skipped_backward(subject: Subject, case: str) -> Comparisons:
    """A rank that skips a backward pass raises the same ExchangeError on every rank; a second thread raises one."""
    world = subject.ranks
    if world.size < 2 or not world.can_be_late:
        raise SkipError("the group can carry nothing afterwards: it needs several ranks of one process, give --world 3")
    put, x = putter(subject.backend.arrays, subject.device), np.eye(4, _WIDTH)
    pair = put(x, subject.dtype), put(x, subject.dtype)
    for exchange in EXCHANGES:
        for skips in (0, world.size - 1):
            settings: dict[str, Any] = {"backend": subject.name, **subject.settings, "exchange": exchange}
            program = partial(_two_calls, skips=skips, given=(*pair, 10.0), settings=settings)
            yield f"{exchange}, rank {skips}", _told(world.run(partial(_said, ExchangeError, program)), "ExchangeError")
    # the others say first that the group has failed
    told = [text.rpartition(": ")[2] for text in world.run(partial(_said, ExchangeError, _two_threads))]
    yield "a second thread", _told(told, "ExchangeError")


def _said(kind: type[Exception], program: Callable[[Communicator], Any], communicator: Communicator) -> str:
    """The text of the error of this kind that a rank's program raises; "" for none."""
    try:
        program(communicator)
    except kind as error:
        return str(error)
    return ""


def _two_calls(communicator: Communicator, skips: int, given: Any, settings: dict[str, Any]) -> None:
    """Rank ``skips`` has no backward pass in the first of its calls."""
    both = evaluation.value_and_grad(losses.clip_loss, group=communicator, **settings)
    first = partial(losses.clip_loss, group=communicator, **settings) if communicator.rank == skips else both
    first(*given)
    both(*given)


def _two_threads(communicator: Communicator) -> None:
    """The second posts in the middle of a phase of the first."""
    communicator.agree(np.zeros(1, np.int64), Label(communicator.calls.begin()))
    communicator.exchange({}, {}).wait()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(communicator.exchange, {}, {}).result()


def mismatched_calls(subject: Subject, case: str) -> Comparisons:
    """Ranks whose calls do not fit together all raise the same MismatchError, and the group stays usable."""
    world, put, dtype = subject.ranks, putter(subject.backend.arrays, subject.device), subject.dtype
    if world.size < 2:
        raise SkipError("needs several ranks")
    x, other = np.eye(4, _WIDTH), "float64" if dtype == "float32" else "float32"
    pair, ids = [put(x, dtype), put(x, dtype)], put(np.arange(4), "int64")
    differences: dict[str, _Arguments] = {
        "another dtype": (losses.clip_loss, [put(x, other), put(x, other), 10.0], {}),
        "another width": (losses.clip_loss, [put(x[:, :7], dtype), put(x[:, :7], dtype), 10.0], {}),
        "another scale": (losses.clip_loss, [*pair, 10.0 * (1 + 2.0**-18)], {}),
        "another loss": (losses.nt_xent, [*pair, 10.0], {}),
        "ids": (losses.clip_loss, [*pair, 10.0], {"ids": ids}),
        "weights": (losses.clip_loss, [*pair, 10.0], {"weights": put(np.ones(4), state_dtype(dtype))}),
        "no such matrix": (losses.clip_loss, [pair[0], put(x[:3], dtype), 10.0], {}),
        "more negatives": (losses.info_nce, [*pair, 10.0], {"negatives": pair[1]}),
        "another exchange": (losses.clip_loss, [*pair, 10.0], {"exchange": "gather"}),
        "another tile": (losses.clip_loss, [*pair, 10.0], {"tile": 7}),
        "another precision": (losses.clip_loss, [*pair, 10.0], {"precision": "auto"}),
    }
    right: _Arguments = losses.clip_loss, [*pair, 10.0], {}
    beside: dict[str, _Arguments] = {"more negatives": (losses.info_nce, [*pair, 10.0], {})}
    if subject.device == "cpu":
        beside["a positive that is no column"] = losses.info_nce, [*pair, 10.0], {"positives": ids}
        bad = losses.info_nce, [*pair, 10.0], {"positives": ids + 4 * world.size}
        differences["a positive that is no column"] = bad
    if subject.backend.arrays.name == "torch":
        trained = [put(x, dtype).requires_grad_(), pair[1], 10.0]
        differences[_UNWANTED] = (losses.clip_loss, trained, {})
        number = put(np.asarray(10.0), state_dtype(subject.dtype))
        beside["a gradient of the scale"] = losses.clip_loss, [*pair, number], {}
        learnt = number.clone().requires_grad_()
        differences["a gradient of the scale"] = losses.clip_loss, [*pair, learnt], {}
    for label, wrong_one in differences.items():
        own = beside.get(label, right)
        told = world.run(partial(_error_of_a_mismatch, right=own, last=wrong_one, subject=subject))
        yield label, _told(told, "MismatchError")
    unlike = differences.get(_UNWANTED)
    if unlike is not None:
        import torch

        told = world.run(torch.no_grad()(partial(_error_of_a_mismatch, right=right, last=unlike, subject=subject)))
        yield "a gradient that nobody records", wrong(told[0]) if any(told) else NOTHING


_Arguments = tuple[Callable[..., Any], list[Any], dict[str, Any]]
"""A loss, its arguments and settings."""


def _error_of_a_mismatch(communicator: Communicator, right: _Arguments, last: _Arguments, subject: Subject) -> str:
    """The text of a rank's MismatchError, of which the last rank calls something else; all are then right once."""
    how: dict[str, Any] = {"backend": subject.name, "group": communicator, "exchange": "ring", **subject.settings}
    loss, args, more = last if communicator.rank == communicator.size - 1 else right
    said = _said(MismatchError, lambda _: loss(*args, **(how | more)), communicator)
    if said:
        right[0](*right[1], **how)
    return said
