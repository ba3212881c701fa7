"""The choices behind "auto": a backend, from a table of measurements, and a precision, from the backend's record.

A call's plan makes both choices once: kernels and operators know only names.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from contrastile.backends.contract import Options
from contrastile.backends.eager import asked_while_tracing
from contrastile.backends.registry import BUILT_IN, load

_log = logging.getLogger(__name__)

_HALF = ("float16", "bfloat16")
_HOPPER = 90


@dataclass(frozen=True, slots=True)
class Preference:
    """The fastest backends for some calls with torch tensors on a GPU.

    Attributes:
        capability: the GPU's compute capability times 10; None for any.
        dtypes: of the features; float32 with a precision that the caller named is "float32/tf32" and the like.
        order: backends, the fastest first. The first usable one is chosen.
        measured: the measurement behind the order.
    """

    capability: int | None
    dtypes: tuple[str, ...]
    order: tuple[str, ...]
    measured: str


# the first matching row counts; sizes play no part, because a compiled graph may serve several
TABLE = (
    Preference(
        _HOPPER,
        _HALF,
        ("cupy", "triton", "torch"),
        "bfloat16: clip_loss, b = 65,536, d = 512, H100: cupy 27.5 ms, triton 31.2; 32,768 on each of four by gather: "
        "cupy 30.3, triton 33.9; nt_xent, 2 x 16,384, d = 128, H200: cupy 1.45 ms, triton 2.36; sigmoid_loss, "
        "b = 16,384, d = 768, H200: cupy 2.05 ms, triton 2.26",
    ),
    # triton has no "ieee" on a GPU
    Preference(
        _HOPPER,
        ("float32/ieee",),
        ("cupy", "torch"),
        "clip_loss, float32, b = 16,384, d = 512, H200: cupy 23.6 ms, full logits in plain torch 36.6",
    ),
    Preference(None, ("float32/ieee",), ("torch", "cupy"), "not measured"),
    Preference(
        None,
        ("float32", "float32/tf32"),
        ("triton", "cupy", "torch"),
        "clip_loss, float32, b = 16,384, d = 512, H200: triton 10.4 ms by split, cupy 23.6; 4.5 by tf32, cupy 15.8",
    ),
    Preference(None, ("float32/split",), ("triton", "torch"), "no other has it"),
    Preference(None, _HALF, ("triton", "cupy", "torch"), "not measured"),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name, and why it was chosen."""

    name: str
    why: str


@asked_while_tracing
def choose(library: str, place: str, dtype: str = "float32", precision: str = "auto", *, guide: bool = False) -> str:
    """The name that ``backend="auto"`` stands for.

    Args:
        library: the features' array library.
        place: the features' device: "cpu", "cuda:1"; "cuda" for torch's current one.
        dtype: the features' dtype.
        precision: the precision that the caller requests.
        guide: whether the call has a guide.
    """
    return explained(library, place, dtype, precision, guide=guide).name


@cache
def explained(library: str, place: str, dtype: str, precision: str, *, guide: bool = False) -> Choice:
    """The choice of ``choose``, with its reason."""
    choice = _found(library, place, dtype, precision, guide)
    _log.debug("backend='auto' is %s for %s %s arrays on %s: %s", choice.name, library, dtype, place, choice.why)
    return choice


def _found(library: str, place: str, dtype: str, precision: str, guide: bool) -> Choice:
    if library in ("numpy", "cupy"):
        return Choice(library, f"it computes {library} arrays where they are")
    device = place.partition(":")[0]
    if device != "cuda" or dtype == "float64":
        return Choice("torch", "the others run on NVIDIA GPUs" if device != "cuda" else "tensor cores have no float64")
    dtype_key = dtype if dtype != "float32" or precision == "auto" else f"{dtype}/{precision}"
    gpu = capability(place)
    row = next(x for x in TABLE if dtype_key in x.dtypes and x.capability in (None, gpu))
    why = row.measured
    # backends after the chosen one are not loaded, because importing CuPy takes a while
    for name in row.order:
        reason = unusable(name, device)
        if reason is None and guide and dtype not in load(name).guides:
            reason = "it takes no guide"
        if reason is None:
            if name == "torch" != row.order[0]:
                _log.warning("backend='auto' is torch, which is slow on a GPU: %s", why)
            return Choice(name, why)
        why += f"; {name} cannot be used: {reason}"
    return Choice("torch", why)


@cache
def capability(place: str) -> int:
    """Compute capability, times 10, of one of torch's GPUs; 0 where torch sees no NVIDIA GPU."""
    if BUILT_IN["torch"].missing() is not None:
        return 0
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability(place)
    return 10 * int(major) + int(minor)


@cache
def unusable(name: str, device: str) -> str | None:
    """Why a backend cannot compute here, or None. It is loaded, so that "auto" never chooses one that fails."""
    missing = BUILT_IN[name].missing()
    if missing is not None:
        return missing
    try:
        backend = load(name)
    except Exception as error:  # a package that does not fit the machine may raise anything
        return " ".join(str(error).split())
    return None if device in backend.devices else f"it runs on {' and '.join(sorted(backend.devices))} here"


def settled(options: Options, name: str, dtype: str) -> Options:
    """The options, with "auto" replaced by the backend's own precision."""
    if options.precision != "auto":
        return options
    chosen = auto_precision(name) if dtype == "float32" else "ieee"
    return Options(options.tile, chosen, options.workspace, options.keep)


@asked_while_tracing
def auto_precision(name: str) -> str:
    """The precision that "auto" stands for in the backend of this name."""
    try:
        return load(name).auto_precision
    except Exception:  # the computation loads it again, and raises
        return "ieee"
