"""Bytes saved for the backward pass, and uninitialised memory."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.settings import KEEP
from contrastile.losses import clip_loss
from contrastile.verify.comparison import Comparisons, Worst
from contrastile.verify.trial import SkipError, Subject

# many rows of few features: b^2 outweighs b d
_BATCH, _WIDTH = 251, 8


def saved_bytes(subject: Subject, case: str) -> Comparisons:
    """A batch twice as large saves at most twice the bytes for the backward pass, not four times."""
    if subject.backend.arrays.name != "torch":
        raise SkipError(f"autograd is torch's, and its arrays are {subject.backend.arrays.name}'s")
    small, large = (_saved(subject, b, keep=0) for b in (_BATCH, 2 * _BATCH))
    # twice the batch: linear memory gives a factor of at most 2, quadratic nearly 4; 3 lies between
    yield f"b = {_BATCH} and {2 * _BATCH}", Worst(large / (3 * small), "bytes", (), large, 3 * small)
    keeps = subject.backend.keeps
    most_kept = 0 if keeps is None else keeps(2 * _BATCH, 2 * _BATCH, subject.dtype, subject.device, subject.options)
    # a backend may use all of the kept bytes that it allows itself
    kept, allowed = _saved(subject, 2 * _BATCH, keep=subject.keep), large + most_kept + 1
    yield "what is kept", Worst(kept / allowed, "bytes", (), kept, allowed)
    # more than 1 MiB of exponentials: kept by default, but not under a limit of 1 MiB
    _saved(subject, 3 * _BATCH, keep=None)
    with mock.patch.dict(os.environ, {KEEP: "1"}):
        kept, allowed = _saved(subject, 3 * _BATCH, keep=None), 2 * large + 2**20
    yield f"{KEEP}=1", Worst(kept / allowed, "bytes", (), kept, allowed)


def _saved(subject: Subject, batch: int, keep: int | None) -> float:
    """Bytes that ``clip_loss`` saves for its backward pass, each storage once."""
    import torch

    random = np.random.default_rng(subject.seed)
    image, text = (
        torch.as_tensor(random.standard_normal((batch, _WIDTH)), device=subject.device)
        .to(getattr(torch, subject.dtype))
        .requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(0.5, dtype=getattr(torch, subject.backend.state(subject.dtype)), device=subject.device)
    bytes_of_storage: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        bytes_of_storage[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = clip_loss(image, text, scale.requires_grad_(), backend=subject.name, keep=keep)
    total = float(sum(bytes_of_storage.values()))
    loss.backward()
    return total


@contextmanager
def poisoned(arrays: ArrayLibrary) -> Iterator[None]:
    """A context in which uninitialised memory of the library holds NaN (integers: a large number).

    Raises:
        SkipError: this library's memory cannot be poisoned.
    """
    if arrays.name == "torch":
        with _poisoned_torch():
            yield
    elif arrays.name == "cupy":
        cupy: Any = importlib.import_module("cupy")
        with cupy.cuda.using_allocator(_poisonous_pool(cupy.get_default_memory_pool())):
            yield
    elif arrays.name == "numpy":
        with mock.patch.multiple(np, empty=_poisonous(np.empty), empty_like=_poisonous(np.empty_like)):
            yield
    else:
        raise SkipError(f"no way to poison the memory of {arrays.name}")


def _poisonous_pool(pool: Any) -> Callable[[int], Any]:
    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        if size:
            # all bits set: NaN in every float format
            memory.memset_async(0xFF, size)
        return memory

    return allocate


def _poisonous(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned_allocate(*args: Any, **kwargs: Any) -> Any:
        x = allocate(*args, **kwargs)
        if x.dtype.kind == "f":
            x.fill(np.nan)
        elif x.dtype.kind in "iu":
            x.fill(np.iinfo(x.dtype).max)
        return x

    return poisoned_allocate


@contextmanager
def _poisoned_torch() -> Iterator[None]:
    import torch

    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        # the public function imports torch's compiler, which takes seconds
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            # torch warns of operations without a deterministic implementation, which do not matter here
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        deterministic.fill_uninitialized_memory = fill
        torch._C._set_deterministic_algorithms(strict, warn_only=warn)
