"""Prepared calls: checks, choices and vectors that depend on a call's signature alone are made once per signature.

The signature is everything except the values of tensors and numbers: the loss, the settings, dtypes, shapes, devices,
the wanted gradients, autocast's dtype, the stream. In a call of a known signature only values can be wrong. Its plan
combines these values with an earlier call's constant vectors, backend and options.
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
"""The largest number of stored signatures, each with O(b) numbers; the oldest is dropped first."""

Make = Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]
"""A function of a loss's builder, the settings, and the loss's own ``args`` and ``kwargs``."""


class Prepared:
    """A signature's checks, constant vectors, backend and options, from the plan of its first call."""

    def __init__(self, plan: Plan, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        known = Known(plan.library, plan.problem.rows.dtype)
        self._world = Handshake(known=known)
        form, _ = plan.split()
        self._settings = plan.name, plan.options, plan.library, form
        self.bound: functions.BoundLoss | None = None
        problem, whole = plan.problem, compute.whole_of(plan.problem, plan.library, plan.backend, plan.options)
        arrays = problem.rows, problem.others, problem.scale, problem.bias
        # a bound call needs arguments that are numbers or the problem's own arrays
        are_arguments = (x is y or type(y) in (int, float) for x, y in zip(arrays, (*args, None), strict=False))
        if whole is not None and all(are_arguments):
            self.bound = functions.BoundLoss(whole, plan, lambda args: self.plan(build, args, kwargs))

    def plan(self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
        """The plan of another call of the signature.

        Raises:
            ValueError: a value is wrong.
        """
        return Plan(build(*args, **kwargs, world=self._world).problem, *self._settings)


def plain_call(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The arguments of a plain eager call; None for another call, or one whose signature is unknown."""
    if torch.compiler.is_compiling():
        return None
    call = Call(args, kwargs, torch.is_grad_enabled())
    if not call.is_known or not eager.direct(torch, ()) or functions.has_tangent(call.tensors):
        return None
    # in inference mode the constant vectors would be inference tensors, which later calls cannot save for backward
    return None if torch.is_inference_mode_enabled() else call


def signature(build: Hashable, settings: Any) -> tuple[Hashable, ...]:
    """The builder, and the settings with their types, because 1, 1.0 and True are equal keys of a dict."""
    sides = map(type, settings["tile"]) if type(settings.get("tile")) is tuple else ()
    return build, *settings.items(), *map(type, settings.values()), *sides


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
        """The differentiable loss of a plain eager call; None for another call, or one whose signature is unknown.

        ``build`` builds the problem from ``args``, the features first, and ``kwargs``. ``make`` returns the plan as its
        first result, and ``launch`` the loss. The settings have no group.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError: see ``contrastile.clip_loss``.
        """
        call = plain_call(args, kwargs)
        if call is None:
            return None
        grad, task, stream, device_type = call.grad, signature(build, settings), None, "cpu"
        if getattr(args[0], "is_cuda", False):
            # under capture, memory belongs to the graph, whose replays write to it
            if not is_plain():
                return None
            loss = steps.STEPS.loss(task, call, partial(make, build, settings), partial(launch, build, settings))
            if loss is not None:
                return loss
            stream, device_type = torch._C._cuda_getCurrentRawStream(args[0].get_device()), "cuda"
        elif not args[0].is_cpu:
            return None
        cast_to = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        key = task, stream, cast_to, os.environ.get(KEEP), *call.kinds
        try:
            prepared = self.prepared.get(key)
        except TypeError:  # for example a setting that is a list
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
