"""Torch's eager calls: how to tell one, and a cache of the vectors that every such call needs.

Nothing here imports torch first: whoever holds a tensor has imported it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from contrastile.backends.arrays import ArrayLibrary

Array = Any
F = TypeVar("F", bound=Callable[..., Any])

MOST = 32
"""Triples of vectors in the cache; the least recently used goes first."""

HOST_ROWS = 8192
"""The longest vectors of a host in the cache: longer ones take no time beside the loss, and memory."""

_ASKED = ("_are_functorch_transforms_active", "_len_torch_dispatch_stack", "_get_tracing_state")

_made: dict[Hashable, tuple[Array, Array, Array]] = {}
_known: dict[int, float | None] = {}
# ids outlive a tensor that two threads make at once and one of them drops
_changing = threading.Lock()


def asked_while_tracing(function: F) -> F:
    """Marks a function that ``torch.compile`` calls while it traces, instead of tracing it.

    Arguments and result are numbers, strings or booleans; a compiled graph takes the result for a constant. The
    function must not raise.
    """
    # what torch.compiler.assume_constant_result does, which would import torch and its compiler
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
    """Whether torch.jit.trace records what is called."""
    import torch

    state: Any = torch._C._get_tracing_state()
    return state is not None


def outside_of_graphs(function: F) -> F:
    """The function, which ``torch.compile`` calls and does not trace; itself where nothing was ever compiled."""
    if not imported("torch._dynamo"):
        return function
    import torch

    disable: Any = torch.compiler.disable
    outside: F = disable(function)
    return outside


def transforms_can_be_seen(torch: Any) -> bool:
    """Whether this version of torch has the functions that report transforms, modes and tracers."""
    return all(hasattr(torch._C, name) for name in _ASKED)


def direct(torch: Any, tensors: Iterable[Array | None]) -> bool:
    """Whether a call is plain eager: no compiler, tracer, transform, mode, tensor subclass or meta tensor."""
    if torch.compiler.is_compiling():
        return False
    known = torch._C
    try:
        seen = known._are_functorch_transforms_active() or known._len_torch_dispatch_stack()
        if seen or known._get_tracing_state() is not None:
            return False
    except AttributeError:  # see transforms_can_be_seen
        return False
    kinds = torch.Tensor, torch.nn.Parameter, type(None)
    return all(type(x) in kinds and (x is None or not x.is_meta) for x in tensors)


def pairs(
    arrays: ArrayLibrary, weight: float, start: int, stop: int, dtype: str, like: Array
) -> tuple[Array, Array, Array]:
    """Equal weights, targets of 1 and the positives start..stop-1 of as many rows; they are read-only.

    Args:
        arrays: the library of ``like``.
        weight: of each row.
        start: the first row's positive.
        stop: one more than the last row's.
        dtype: of weights and targets.
        like: gives the device.
    """

    def make() -> tuple[Array, Array, Array]:
        alike = (arrays.full((stop - start,), value, dtype, like) for value in (weight, 1.0))
        return *alike, arrays.arange(start, stop, like)

    if arrays.name != "torch":
        return make()
    import torch

    if not _can_be_shared(torch, stop - start, like):
        return make()
    device = like.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device) if like.is_cuda else None
    key = weight, start, stop, dtype, device, stream
    with _changing:
        found = _made.pop(key, None)
        if found is None:
            found = make()
            if len(_made) >= MOST:
                for x in _made.pop(next(iter(_made))):
                    del _known[id(x)]
            readable = device < 0 and start < stop
            _known.update((id(x), float(x[0]) if readable else None) for x in found)
        _made[key] = found
    return found


def constant(x: Array) -> bool:
    """Whether x is one of these vectors, whose values never change while somebody holds it."""
    return id(x) in _known


def first(x: Array) -> float | None:
    """The first element of one of these vectors on a host, of weights and targets each element; None of another."""
    return _known.get(id(x))


def _can_be_shared(torch: Any, rows: int, like: Array) -> bool:
    """Whether later eager calls can reuse a vector that is made now: on a GPU's current stream, or short on a host.

    A graph under capture has its own memory, which is written on replay; a tensor of inference mode cannot be saved
    for a backward pass.
    """
    if not direct(torch, (like,)) or torch.is_inference_mode_enabled():
        return False
    if not like.is_cuda:
        return rows <= HOST_ROWS and like.device.type == "cpu"
    return (
        like.get_device() == torch.cuda.current_device()
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
        and not torch.cuda.is_current_stream_capturing()
    )
