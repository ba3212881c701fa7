"""The properties of consecutive and of concurrent calls: no call changes another call's results, or the process."""

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
from contrastile.verify.losses.properties import UPSTREAM, LossTrial, by_autograd, gradient_fields, in_layout
from contrastile.verify.trial import SkipError

_MANY = 520
_LARGE = 263, 8
"""A shape of more than 40,000 logits and more than 256 rows."""


def numbered(case: LossCase, scale: float, bias: float) -> LossCase:
    """The case with another scale and, if it has one, another bias."""
    arguments = replace(case.arguments, scale=scale, bias=None if case.arguments.bias is None else bias)
    return replace(case, arguments=rounded(arguments, case.dtype, case.facts))


def interleaved(trial: LossTrial) -> Comparisons:
    """The results of a call stay the same after other calls, their backward passes, and writes to other results."""
    case, claims = trial.case, trial.loss.claims
    b, d = claims.batch(_LARGE[0]), claims.width(_LARGE[1])
    rows, width = trial.shape
    sizes = [(rows, width)]
    if b is not None and d is not None and case.dtype == "float32" and trial.loss.block is None:
        sizes.append((b, d))
    for index, (rows, width) in enumerate([*sizes, *sizes[:1] * claims.negatives]):
        trials = [trial.resized(rows, width, seed) for seed in (1, 2)]
        if index == len(sizes):
            # The reversed keys are negatives: a second block of columns.
            changed = [replace(x, negatives=(x.features[1][::-1] / 2,)) for x in (t.case.arguments for t in trials)]
            trials = [t.other(replace(t.case, arguments=x)) for t, x in zip(trials, changed, strict=True)]
        calls = [resized.call() for resized in trials]
        returned = [call() for call in calls]
        label = f"b = {rows}, d = {width}{', negatives' * (index == len(sizes))}: "
        before = [call.bits() for call in calls]
        results = [call.finish(x) for call, x in zip(calls, returned, strict=True)]
        for name, resized, result in zip(("first", "second"), trials, results, strict=True):
            yield f"{label}the {name} of two calls, then their backward passes", resized.compare(result, trial.fields)
        after = [call.bits() for call in calls]
        other_call = trials[1].call()
        other_call.finish(other_call())
        same = all(x[: len(y)] == y for x, y in zip(after, before, strict=True)) and [c.bits() for c in calls] == after
        yield f"{label}results after another call", NOTHING if same else wrong("they were changed")
        for x in calls[0].outputs()[1:]:
            if getattr(x, "shape", ()):
                x[...] = 7
        yield f"{label}after results were written to", trials[1].compare(trials[1].run(), trial.fields)
        if trial.result.by_autograd:
            calls = [resized.call() for resized in trials]
            for call in calls:
                # A leaf's gradient may be copied on arrival. A view's gradient waits until both calls went backward.
                call.passed = [x.view_as(x) for x in call.leaves]
            values = [next(iter(x.values())) if isinstance(x, dict) else x for x in [call() for call in calls]]
            joint = calls[1].finish(values[0] + values[1])
            yield f"{label}one backward pass of two calls", trials[1].compare(joint, gradient_fields(claims))
    if not trial.result.by_autograd:
        return
    # Graphs that replay the calls of two signatures share memory.
    trials = [trial.resized(claims.batch(size) or 1, claims.width(24) or 1, size) for size in (48, 40)]
    for resized in trials * 4:
        resized.run()
    for order in ((0, 1), (1, 0)):
        calls = [resized.call() for resized in trials]
        losses = {index: calls[index]() for index in order}
        results = [call.finish(losses[index]) for index, call in enumerate(calls)]
        for resized, result in zip(trials, results, strict=True):
            yield "two signatures, called in either order", resized.compare(result, trial.fields)


def rewritten(trial: LossTrial) -> Comparisons:
    """A call reads new values in the same arrays. If they change between its passes, it raises or uses the old ones."""
    case = trial.case
    rows, width = trial.shape
    other = trial.other(numbered(trial.resized(rows, width, 3).case, case.arguments.scale, case.arguments.bias or 0.0))
    call, new = trial.call(), other.call()
    call.finish(call())
    for x, y in zip([*call.leaves, *call.labels], [*new.leaves, *new.labels], strict=True):
        _write(x, y)
    call.forget()
    yield "new values in the same arrays", other.compare(call.finish(call()), trial.fields)
    if not trial.loss.claims.by_autograd:
        return
    call = trial.call()
    value = call()
    _write(call.leaves[0], new.leaves[0])
    try:
        result = call.finish(value)
    except RuntimeError:
        yield "written between the passes", NOTHING
        return
    yield "written between the passes", trial.compare(result, gradient_fields(trial.loss.claims))


def _write(destination: Array, source: Array) -> None:
    target, values = (x.detach() if hasattr(x, "detach") else x for x in (destination, source))
    target[...] = values


def retained(trial: LossTrial) -> Comparisons:
    """A graph that is retained gives the same gradients a second time, with another upstream gradient too."""
    trial.only_by_autograd()
    claims, fields, trials = trial.loss.claims, gradient_fields(trial.loss.claims), {"": trial}
    for name, is_claimed in (("few-keys", claims.positives), ("ids", claims.ids), ("several", claims.options)):
        if is_claimed and concerns(name, "retained", None, claims.objective):
            trials[f"{name}, "] = trial.other(build(name, trial.case.dtype, claims, trial.case.facts))
    for prefix, variant in trials.items():
        call = variant.call()
        value = call()
        call.finish(value, retain=True)
        for label, upstream in (("a second backward pass", UPSTREAM), ("a third, upstream 1 / 30", 1.0)):
            call.forget()
            result = call.finish(value, upstream, retain=True)
            yield prefix + label, variant.compare(result, fields, upstream)


def settings(trial: LossTrial) -> Comparisons:
    """A call advances no random generator, and changes no setting of the process."""
    process.advance()
    case, threads = trial.case, 0
    if trial.loss.claims.library == "torch":
        import torch

        threads = torch.get_num_threads()
        # Use numbers that no loss sets, because an earlier call may have set the loss's own.
        torch.set_num_threads(threads + 6)
        torch.set_flush_denormal(False)
    gc.enable()
    with np.errstate(all="warn"):
        before = process.state()
        trial.run()
        if trial.loss.claims.strided:
            trial.run(layout=partial(in_layout, transposed, trial.loss.arrays))
        changed = process.changed(before, process.state())
    if case.facts is not None:
        # Exponentials may underflow even if the caller has NumPy raise.
        with np.errstate(all="raise"):
            trial.other(numbered(case, 900.0, case.arguments.bias or 0.0)).run()
    if threads:
        sys.modules["torch"].set_num_threads(threads)
    if threads and case.facts is not None:
        # The default device is for the caller's tensors: the loss must not create its own there.
        with sys.modules["torch"].device("meta"):
            yield "another default device", trial.compare(trial.run(), trial.fields)
    yield "", NOTHING if changed is None else wrong(changed)


def threads(trial: LossTrial) -> Comparisons:
    """Calls are right in another thread, in two threads at once, and with their two passes in different threads."""
    rows, width = trial.shape
    trials = [trial.resized(rows, width, seed) for seed in (4, 5)]

    def comparison(resized: LossTrial) -> Worst:
        return resized.compare(resized.run(), trial.fields)

    interval = sys.getswitchinterval()
    for label, chosen in (("in another thread", trials[:1]), ("in two threads at once", trials)):
        # Switch threads in the middle of a call.
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(len(chosen)) as pool:
                worst = largest(list(pool.map(comparison, chosen * 8)))
        finally:
            sys.setswitchinterval(interval)
        yield label, worst
    if by_autograd(trial.loss.claims) == "":
        call = trial.call()
        value = call()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(call.finish, value).result()
        yield "backwards in another thread", trial.compare(result, trial.fields)


def repeats(trial: LossTrial) -> Comparisons:
    """After 520 calls, a call gives the results of the first."""
    claims = trial.loss.claims
    small = trial.resized(claims.batch(4) or 1, claims.width(3) or 1)
    call = small.call()
    first = call.finish(call())
    for _ in range(_MANY):
        call()
    repeated = small.run()
    yield f"call {_MANY}", small.compare(repeated, trial.fields)
    if claims.deterministic:
        yield f"call {_MANY}", identical(repeated, first)


_ROUNDS, _STEPS = 24, 32
"""Caches fill during some rounds only; a leak of one object per call shows in every round."""


def leaks(trial: LossTrial) -> Comparisons:
    """The memory of a call is freed with its results."""
    b = trial.loss.claims.batch(64)
    if b is None:
        raise SkipError("needs a batch of 64 rows")
    resized = trial.resized(b, trial.case.batch.width)

    def step() -> weakref.ref[Array]:
        call = resized.call()
        call.finish(call())
        return weakref.ref(call.leaves[0])

    # The collector need not search the objects that exist already.
    gc.freeze()
    try:
        # The first calls fill caches.
        features, _ = step(), step()
        one_call, five_calls = (
            peak.peak_bytes(trial.loss.arrays.name, trial.device, partial(peak.repeated, step, times))
            for times in (1, 5)
        )
        # The allowance is smaller than the logits of one call.
        limit = one_call + 2 * b * b
        yield "5 calls", Worst(five_calls / limit, "bytes", (), five_calls, limit)
        gc.collect()
        yield "features of the first call", NOTHING if features() is None else wrong("they are held")
        leaked = sys.maxsize
        for _ in range(_ROUNDS):
            before = sys.getallocatedblocks()
            peak.repeated(step, _STEPS)
            gc.collect()
            leaked = min(leaked, max(0, sys.getallocatedblocks() - before))
            if leaked < _STEPS:
                break
    finally:
        gc.unfreeze()
    yield f"{_STEPS} calls", Worst(leaked / _STEPS, "objects", (), leaked, _STEPS)
