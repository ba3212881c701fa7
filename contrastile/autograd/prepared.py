"""Prepared calls: what depends on a call's signature alone is checked, chosen and made once per signature.

The signature is everything but the values of tensors and numbers: the loss, the settings, dtypes, shapes, devices,
which gradients are wanted, autocast's dtype, the stream. In a call of a known signature only values can be wrong. Its
plan is made of them, of the constant vectors that an earlier call made, and of the backend and options that it chose.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contrastile import compute
from contrastile.autograd import functions, steps
from contrastile.autograd.arguments import Call
from contrastile.backends import eager
from contrastile.backends.replay import is_plain
from contrastile.backends.settings import KEEP
from contrastile.plan import Plan
from contrastile.schedules.handshake import Handshake
from contrastile.validation import Known

MOST = 32
"""Signatures held; the oldest is dropped first. Each holds O(b) numbers."""

Make = Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]
"""Takes a loss's builder, the settings, and the loss's own arguments."""


class Prepared:
    """A signature's checks, constant vectors and choices, from the plan of its first call."""

    def __init__(self, plan: Plan, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        known = Known(plan.library, plan.problem.rows.dtype)
        self._world = Handshake(known=known)
        form, _ = plan.split()
        self._settings = plan.name, plan.options, plan.library, form
        self.bound: functions.BoundLoss | None = None
        problem, whole = plan.problem, compute.whole_of(plan.problem, plan.library, plan.backend, plan.options)
        given = problem.rows, problem.others, problem.scale, problem.bias
        # its arguments are the problem's arrays as they are, or numbers
        alike = (x is y or type(y) in (int, float) for x, y in zip(given, (*args, None), strict=False))
        if whole is not None and all(alike):
            self.bound = functions.BoundLoss(whole, plan, lambda args: self.plan(build, args, kwargs))

    def plan(self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
        """The plan of another call.

        Raises:
            ValueError: a value is wrong.
        """
        return Plan(build(*args, **kwargs, world=self._world).problem, *self._settings)


def plain_call(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The arguments of a plain eager call; None for one whose signature cannot be told."""
    if torch.compiler.is_compiling():
        return None
    call = Call(args, kwargs, torch.is_grad_enabled())
    if not call.known or not eager.direct(torch, ()) or functions.tangents(call.tensors):
        return None
    # later calls may save the vectors that are made now for their backward: inference tensors cannot be saved
    return None if torch.is_inference_mode_enabled() else call


def signature(build: Hashable, settings: Any) -> tuple[Hashable, ...]:
    """What is computed, and how: to a dict 1, 1.0 and True are one key."""
    sides = map(type, settings["tile"]) if type(settings.get("tile")) is tuple else ()
    return build, *settings.items(), *map(type, settings.values()), *sides


def replayed(
    what: Hashable, settings: Any, args: Sequence[Any], make: Callable[..., Any], launch: Callable[..., Tensor]
) -> Tensor | None:
    """What ``launch`` gives of tensors on a GPU, differentiable, from graphs; None where it is to be launched.

    See ``Steps.loss``.
    """
    call = plain_call(args, {})
    if call is None or not getattr(args[0], "is_cuda", False) or not is_plain():
        return None
    return steps.STEPS.loss(signature(what, settings), call, make, launch)


class Calls:
    """The call signatures of this process."""

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Prepared] = {}
        self._changing = threading.Lock()

    def loss(
        self,
        build: Callable[..., Any],
        settings: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        make: Make,
        launch: Make,
    ) -> Tensor | None:
        """The loss of a plain eager call, differentiable; None for a call whose signature cannot be told.

        ``build`` makes the problem of ``args``, the features first, and ``kwargs``; ``make`` gives the plan, first of
        what it gives, and ``launch`` the loss. The settings are of a process alone.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError: see ``contrastile.clip_loss``.
        """
        call = plain_call(args, kwargs)
        if call is None:
            return None
        grad, what, stream, kind = call.grad, signature(build, settings), None, "cpu"
        if getattr(args[0], "is_cuda", False):
            # a graph under capture has its own memory, which is written on replay
            if not is_plain():
                return None
            loss = steps.STEPS.loss(what, call, partial(make, build, settings), partial(launch, build, settings))
            if loss is not None:
                return loss
            stream, kind = torch._C._cuda_getCurrentRawStream(args[0].get_device()), "cuda"
        elif not args[0].is_cpu:
            return None
        cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = what, stream, cast_to, os.environ.get(KEEP), *call.kinds
        try:
            prepared = self.prepared.get(key)
        except TypeError:  # of a setting that is a list, say
            return None
        plan = None
        if prepared is None:
            plan = make(build, settings, args, kwargs)[0]
            prepared = Prepared(plan, build, args, kwargs)
            with self._changing:
                if len(self.prepared) >= MOST:
                    del self.prepared[next(iter(self.prepared))]
                self.prepared[key] = prepared
        if prepared.bound is not None:
            loss = prepared.bound.loss(args, grad=grad)
            if loss is not None:
                return loss
        return functions.eager_loss(plan or prepared.plan(build, args, kwargs), grad=grad)


CALLS = Calls()
