"""The properties of calls that follow each other or run at once: none changes another's results, or the process."""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from contrastile.backends.contract import Array
from contrastile.verify import peak, process
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, identical, largest, wrong
from contrastile.verify.layouts import transposed
from contrastile.verify.losses.arguments import rounded
from contrastile.verify.losses.cases import LossCase, build, concerns
from contrastile.verify.losses.properties import UPSTREAM, LossTrial, by_autograd, gradient_fields, placed
from contrastile.verify.trial import SkipError

_MANY = 520
_LARGE = 263, 8
"""More than 40,000 logits, and more than 256 rows."""


def numbered(case: LossCase, scale: float, bias: float) -> LossCase:
    """The case with another scale and bias, where it has one."""
    given = replace(case.arguments, scale=scale, bias=None if case.arguments.bias is None else bias)
    return replace(case, arguments=rounded(given, case.dtype, case.facts))


def interleaved(trial: LossTrial) -> Comparisons:
    """Neither another call, nor its backward pass, nor who writes to its results changes those of a call."""
    case, claims = trial.case, trial.loss.claims
    b, d = claims.batch(_LARGE[0]), claims.width(_LARGE[1])
    rows, width = trial.shape
    sizes = [(rows, width)]
    if b is not None and d is not None and case.dtype == "float32" and trial.loss.block is None:
        sizes.append((b, d))
    for number, (rows, width) in enumerate([*sizes, *sizes[:1] * claims.negatives]):
        two = [trial.resized(rows, width, seed) for seed in (1, 2)]
        if number == len(sizes):
            # the keys in another order: a second block of columns
            more = [replace(x, negatives=(x.features[1][::-1] / 2,)) for x in (each.case.arguments for each in two)]
            two = [each.other(replace(each.case, arguments=x)) for each, x in zip(two, more, strict=True)]
        calls = [each.call() for each in two]
        returned = [call() for call in calls]
        label = f"b = {rows}, d = {width}{', negatives' * (number == len(sizes))}: "
        before = [call.bits() for call in calls]
        found = [call.finish(x) for call, x in zip(calls, returned, strict=True)]
        for name, each, result in zip(("first", "second"), two, found, strict=True):
            yield f"{label}the {name} of two calls, then their backward passes", each.compare(result, trial.fields)
        after = [call.bits() for call in calls]
        again = two[1].call()
        again.finish(again())
        same = all(x[: len(y)] == y for x, y in zip(after, before, strict=True)) and [c.bits() for c in calls] == after
        yield f"{label}results after another call", NOTHING if same else wrong("they were changed")
        for x in calls[0].given()[1:]:
            if getattr(x, "shape", ()):
                x[...] = 7
        yield f"{label}after results were written to", two[1].compare(two[1].run(), trial.fields)
        if trial.result.by_autograd:
            calls = [each.call() for each in two]
            for call in calls:
                # where a leaf's gradient is copied when it arrives, another's waits until both calls have gone backward
                call.passed = [x.view_as(x) for x in call.leaves]
            values = [next(iter(x.values())) if isinstance(x, dict) else x for x in [call() for call in calls]]
            joint = calls[1].finish(values[0] + values[1])
            yield f"{label}one backward pass of two calls", two[1].compare(joint, gradient_fields(claims))
    if not trial.result.by_autograd:
        return
    # where calls that repeat come from graphs, those of two signatures share memory
    two = [trial.resized(claims.batch(size) or 1, claims.width(24) or 1, size) for size in (48, 40)]
    for each in two * 4:
        each.run()
    for order in ((0, 1), (1, 0)):
        calls = [each.call() for each in two]
        losses = {number: calls[number]() for number in order}
        found = [call.finish(losses[number]) for number, call in enumerate(calls)]
        for each, result in zip(two, found, strict=True):
            yield "two signatures, called in either order", each.compare(result, trial.fields)


def rewritten(trial: LossTrial) -> Comparisons:
    """New values in the same arrays count; written between the passes they are an error, or their old ones count."""
    case = trial.case
    rows, width = trial.shape
    other = trial.other(numbered(trial.resized(rows, width, 3).case, case.arguments.scale, case.arguments.bias or 0.0))
    call, new = trial.call(), other.call()
    call.finish(call())
    for x, y in zip([*call.leaves, *call.labels], [*new.leaves, *new.labels], strict=True):
        _written(x, y)
    call.forget()
    yield "new values in the same arrays", other.compare(call.finish(call()), trial.fields)
    if not trial.loss.claims.by_autograd:
        return
    call = trial.call()
    value = call()
    _written(call.leaves[0], new.leaves[0])
    try:
        found = call.finish(value)
    except RuntimeError:
        yield "written between the passes", NOTHING
        return
    yield "written between the passes", trial.compare(found, gradient_fields(trial.loss.claims))


def _written(x: Array, y: Array) -> None:
    to, new = (z.detach() if hasattr(z, "detach") else z for z in (x, y))
    to[...] = new


def retained(trial: LossTrial) -> Comparisons:
    """A graph that is retained gives the same gradients a second time, with another upstream gradient too."""
    trial.only_by_autograd()
    claims, fields, trials = trial.loss.claims, gradient_fields(trial.loss.claims), {"": trial}
    for name, has in (("few-keys", claims.positives), ("ids", claims.ids), ("several", claims.options)):
        if has and concerns(name, "retained", None, claims.objective):
            trials[f"{name}, "] = trial.other(build(name, trial.case.dtype, claims, trial.case.facts))
    for kind, each in trials.items():
        call = each.call()
        value = call()
        call.finish(value, retain=True)
        for label, upstream in (("a second backward pass", UPSTREAM), ("a third, upstream 1 / 30", 1.0)):
            call.forget()
            found = call.finish(value, upstream, retain=True)
            yield kind + label, each.compare(found, fields, upstream)


def settings(trial: LossTrial) -> Comparisons:
    """A call moves no generator, and changes no setting of the process."""
    process.advance()
    case, threads = trial.case, 0
    if trial.loss.claims.library == "torch":
        import torch

        threads = torch.get_num_threads()
        # not the number that verify itself sets
        torch.set_num_threads(threads + 1)
    with np.errstate(all="warn"):
        before = process.state()
        trial.run()
        if trial.loss.claims.strided:
            trial.run(layout=partial(placed, transposed, trial.loss.arrays))
        changed = process.changed(before, process.state())
    if case.facts is not None:
        # exponentials may underflow, whatever the caller has NumPy do then
        with np.errstate(all="raise"):
            trial.other(numbered(case, 900.0, case.arguments.bias or 0.0)).run()
    if threads:
        sys.modules["torch"].set_num_threads(threads)
    if threads and case.facts is not None:
        # where the caller's own tensors go, unless they say it
        with sys.modules["torch"].device("meta"):
            yield "another default device", trial.compare(trial.run(), trial.fields)
    yield "", NOTHING if changed is None else wrong(changed)


def threads(trial: LossTrial) -> Comparisons:
    """Calls are right in another thread, in two threads at once, and if one thread goes back what another went."""
    rows, width = trial.shape
    two = [trial.resized(rows, width, seed) for seed in (4, 5)]

    def judged(each: LossTrial) -> Worst:
        return each.compare(each.run(), trial.fields)

    interval = sys.getswitchinterval()
    for label, some in (("in another thread", two[:1]), ("in two threads at once", two)):
        # in the middle of a call
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(len(some)) as pool:
                worst = largest(list(pool.map(judged, some * 8)))
        finally:
            sys.setswitchinterval(interval)
        yield label, worst
    if by_autograd(trial.loss.claims) == "":
        call = trial.call()
        value = call()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(call.finish, value).result()
        yield "backwards in another thread", trial.compare(found, trial.fields)


def repeats(trial: LossTrial) -> Comparisons:
    """After 520 calls a call gives what the first gave."""
    claims = trial.loss.claims
    small = trial.resized(claims.batch(4) or 1, claims.width(3) or 1)
    call = small.call()
    first = call.finish(call())
    for _ in range(_MANY):
        call()
    again = small.run()
    yield f"call {_MANY}", small.compare(again, trial.fields)
    if claims.deterministic:
        yield f"call {_MANY}", identical(again, first)


_ROUNDS, _STEPS = 24, 32
"""Caches fill for some rounds; what leaks one object a call does so in each."""


def leaks(trial: LossTrial) -> Comparisons:
    """What a call allocates is freed with its results."""
    b = trial.loss.claims.batch(64)
    if b is None:
        raise SkipError("needs a batch of 64 rows")
    many_rows = trial.resized(b, trial.case.batch.width)

    def step() -> weakref.ref[Array]:
        call = many_rows.call()
        call.finish(call())
        return weakref.ref(call.leaves[0])

    # what is there already need not be searched each time
    gc.freeze()
    try:
        # first calls fill caches
        first, _ = step(), step()
        few, many = (
            peak.peak_bytes(trial.loss.arrays.name, trial.device, partial(peak.repeated, step, times))
            for times in (1, 5)
        )
        # less than the logits of one of them
        limit = few + 2 * b * b
        yield "5 calls", Worst(many / limit, "bytes", (), many, limit)
        gc.collect()
        yield "features of the first call", NOTHING if first() is None else wrong("they are held")
        held = sys.maxsize
        for _ in range(_ROUNDS):
            before = sys.getallocatedblocks()
            peak.repeated(step, _STEPS)
            gc.collect()
            held = min(held, max(0, sys.getallocatedblocks() - before))
            if held < _STEPS:
                break
    finally:
        gc.unfreeze()
    yield f"{_STEPS} calls", Worst(held / _STEPS, "objects", (), held, _STEPS)
