"""Whether a call of torch is plain eager.

No function here is the first to import torch: a caller with a tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Array = Any
F = TypeVar("F", bound=Callable[..., Any])

_ASKED = ("_are_functorch_transforms_active", "_len_torch_dispatch_stack", "_get_tracing_state")


def asked_while_tracing(function: F) -> F:
    """Marks a function that ``torch.compile`` calls while it traces, instead of tracing it.

    Arguments and result are numbers, strings or booleans; a compiled graph takes the result for a constant. The
    function must not raise.
    """
    # as torch.compiler.assume_constant_result, which would import torch and its compiler
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@asked_while_tracing
def imported(name: str) -> bool:
    """Whether a module has been imported.

    A compiler that traced the look-up would iterate over ``sys.modules``, which other threads change.
    """
    return sys.modules.get(name) is not None


@asked_while_tracing
def recorded() -> bool:
    """Whether torch.jit.trace is recording."""
    import torch

    state: Any = torch._C._get_tracing_state()
    return state is not None


def outside_of_graphs(function: F) -> F:
    """The function, which ``torch.compile`` will call and not trace; unchanged if torch._dynamo is not imported."""
    if not imported("torch._dynamo"):
        return function
    import torch

    disable: Any = torch.compiler.disable
    untraced: F = disable(function)
    return untraced


def transforms_can_be_seen(torch: Any) -> bool:
    """Whether this version of torch has the functions that report transforms, modes and tracers."""
    return all(hasattr(torch._C, name) for name in _ASKED)


def direct(torch: Any, tensors: Iterable[Array | None]) -> bool:
    """Whether a call is plain eager: no compiler, tracer, transform, mode, tensor subclass or meta tensor."""
    if torch.compiler.is_compiling():
        return False
    torch_c = torch._C
    try:
        is_transformed = torch_c._are_functorch_transforms_active() or torch_c._len_torch_dispatch_stack()
        if is_transformed or torch_c._get_tracing_state() is not None:
            return False
    except AttributeError:  # see transforms_can_be_seen
        return False
    tensor_type, parameter_type = torch.Tensor, torch.nn.Parameter
    # no generator: small calls are bound by the host
    for x in tensors:  # noqa: SIM110
        if x is not None and (type(x) not in (tensor_type, parameter_type) or x.is_meta):
            return False
    return True
