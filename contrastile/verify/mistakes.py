"""Mistakes of ranks that share a public loss: each is one error, the same on every rank, and never a wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from contrastile import evaluation, losses
from contrastile.backends.contract import state_dtype
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
    """A rank that skips one backward pass raises the same ExchangeError on every rank."""
    world = subject.ranks
    if world.size < 2 or not world.can_be_late:
        raise SkipError("the group can carry nothing afterwards: it needs several ranks of one process, give --world 3")
    put, x = putter(subject.backend.arrays, subject.device), np.eye(4, _WIDTH)
    pair = put(x, subject.dtype), put(x, subject.dtype)
    for exchange in EXCHANGES:
        for skips in (0, world.size - 1):
            settings: dict[str, Any] = {"backend": subject.name, **subject.settings, "exchange": exchange}
            program = partial(_error_of_two_calls, skips=skips, given=(*pair, 10.0), settings=settings)
            yield f"{exchange}, rank {skips}", _told(world.run(program), "ExchangeError")


def _error_of_two_calls(communicator: Communicator, skips: int, given: Any, settings: dict[str, Any]) -> str:
    """The text of a rank's ExchangeError; rank ``skips`` has no backward pass in the first of its calls."""
    both = evaluation.value_and_grad(losses.clip_loss, group=communicator, **settings)
    try:
        if communicator.rank == skips:
            losses.clip_loss(*given, group=communicator, **settings)
        else:
            both(*given)
        both(*given)
    except ExchangeError as error:
        return str(error)
    return ""


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
        "another exchange": (losses.clip_loss, [*pair, 10.0], {"exchange": "gather"}),
        "another tile": (losses.clip_loss, [*pair, 10.0], {"tile": 7}),
        "another precision": (losses.clip_loss, [*pair, 10.0], {"precision": "auto"}),
    }
    right: _Arguments = losses.clip_loss, [*pair, 10.0], {}
    beside: dict[str, _Arguments] = {}
    for name in ("margin", "label_smoothing", *["threshold"] * subject.backend.limits):
        beside[f"another {name}"], differences[f"another {name}"] = (
            (losses.clip_loss, [*pair, 10.0], {name: x}) for x in (0.1, 0.2)
        )
    if subject.device == "cpu":
        beside["a positive that is no column"] = losses.info_nce, [*pair, 10.0], {"positives": ids}
        bad = losses.info_nce, [*pair, 10.0], {"positives": ids + 4 * world.size}
        differences["a positive that is no column"] = bad
    if subject.backend.arrays.name == "torch":
        from contrastile import nn

        trained = [put(x, dtype).requires_grad_(), pair[1], 10.0]
        differences[_UNWANTED] = (losses.clip_loss, trained, {})
        number = put(np.asarray(10.0), state_dtype(subject.dtype))
        beside["a gradient of the scale"] = losses.clip_loss, [*pair, number], {}
        learnt = number.clone().requires_grad_()
        differences["a gradient of the scale"] = losses.clip_loss, [*pair, learnt], {}

        def of_more(*args: Any, **how: Any) -> Any:
            return nn.ClipLoss(world_size=world.size + 1, **how)(*args)

        differences["a module for another world"] = of_more, [*pair, 10.0], {}
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
    try:
        loss(*args, **(how | more))
    except MismatchError as error:
        right[0](*right[1], **how)
        return str(error)
    return ""
