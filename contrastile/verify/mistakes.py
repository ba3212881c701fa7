"""Mistakes of ranks that share a public loss: all ranks must raise the same error, and none may wait for ever."""

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


def _all_raised(messages: list[str], error: str) -> Worst:
    """Check that every rank has raised an error, and that all messages are equal."""
    if not all(messages):
        return wrong(f"a rank raised no {error}")
    return NOTHING if len(set(messages)) == 1 else wrong(f"ranks raised different errors: {sorted(set(messages))}")


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
            program = partial(_two_calls, skips=skips, args=(*pair, 10.0), settings=settings)
            messages = world.run(partial(_message_of, ExchangeError, program))
            yield f"{exchange}, rank {skips}", _all_raised(messages, "ExchangeError")
    # on other ranks a prefix of the message says that the group has failed
    messages = [text.rpartition(": ")[2] for text in world.run(partial(_message_of, ExchangeError, _two_threads))]
    yield "a second thread", _all_raised(messages, "ExchangeError")


def _message_of(kind: type[Exception], program: Callable[[Communicator], Any], communicator: Communicator) -> str:
    """The text of the error of this kind that a program raises on this rank; "" for none."""
    try:
        program(communicator)
    except kind as error:
        return str(error)
    return ""


def _two_calls(communicator: Communicator, skips: int, args: Any, settings: dict[str, Any]) -> None:
    """Call twice; rank ``skips`` skips the backward pass of the first call."""
    with_grad = evaluation.value_and_grad(losses.clip_loss, group=communicator, **settings)
    first = partial(losses.clip_loss, group=communicator, **settings) if communicator.rank == skips else with_grad
    first(*args)
    with_grad(*args)


def _two_threads(communicator: Communicator) -> None:
    """A second thread posts a message in the middle of a phase of the first thread."""
    communicator.agree(np.zeros(1, np.int64), Label(communicator.calls.begin()))
    communicator.exchange({}, {}).wait()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(communicator.exchange, {}, {}).result()


def mismatched_calls(subject: Subject, case: str) -> Comparisons:
    """Ranks whose calls do not fit together all raise the same MismatchError, and the group stays usable."""
    world, put, dtype = subject.ranks, putter(subject.backend.arrays, subject.device), subject.dtype
    if world.size < 2:
        raise SkipError("needs several ranks")
    x, other_dtype = np.eye(4, _WIDTH), "float64" if dtype == "float32" else "float32"
    pair, ids = [put(x, dtype), put(x, dtype)], put(np.arange(4), "int64")
    differences: dict[str, _Arguments] = {
        "another dtype": (losses.clip_loss, [put(x, other_dtype), put(x, other_dtype), 10.0], {}),
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
    right_calls: dict[str, _Arguments] = {"more negatives": (losses.info_nce, [*pair, 10.0], {})}
    if subject.device == "cpu":
        right_calls["a positive that is no column"] = losses.info_nce, [*pair, 10.0], {"positives": ids}
        far_positives = losses.info_nce, [*pair, 10.0], {"positives": ids + 4 * world.size}
        differences["a positive that is no column"] = far_positives
    if subject.backend.arrays.name == "torch":
        learning_pair = [put(x, dtype).requires_grad_(), pair[1], 10.0]
        differences[_UNWANTED] = (losses.clip_loss, learning_pair, {})
        scale = put(np.asarray(10.0), state_dtype(subject.dtype))
        right_calls["a gradient of the scale"] = losses.clip_loss, [*pair, scale], {}
        learning_scale = scale.clone().requires_grad_()
        differences["a gradient of the scale"] = losses.clip_loss, [*pair, learning_scale], {}
    for label, bad_call in differences.items():
        right_call = right_calls.get(label, right)
        messages = world.run(partial(_mismatch, right=right_call, bad=bad_call, subject=subject))
        yield label, _all_raised(messages, "MismatchError")
    unwanted = differences.get(_UNWANTED)
    if unwanted is not None:
        import torch

        messages = world.run(torch.no_grad()(partial(_mismatch, right=right, bad=unwanted, subject=subject)))
        yield "a gradient that nobody records", wrong(messages[0]) if any(messages) else NOTHING


_Arguments = tuple[Callable[..., Any], list[Any], dict[str, Any]]
"""A loss, its positional arguments and its keywords."""


def _mismatch(communicator: Communicator, right: _Arguments, bad: _Arguments, subject: Subject) -> str:
    """The text of this rank's MismatchError when the last rank makes the bad call; all then make the right call."""
    settings: dict[str, Any] = {"backend": subject.name, "group": communicator, "exchange": "ring", **subject.settings}
    loss, args, keywords = bad if communicator.rank == communicator.size - 1 else right
    message = _message_of(MismatchError, lambda _: loss(*args, **(settings | keywords)), communicator)
    if message:
        right[0](*right[1], **settings)
    return message
