"""State of the process, which no call of a backend or a loss may change."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np


def modes() -> dict[str, Any]:
    """Settings of torch, by name, that change the results of other code; empty if torch has not been imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from contrastile.backends.torch.products import product_rounding

    return {
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's float32 precision": (product_rounding("cpu"), product_rounding("cuda")),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
    }


@contextmanager
def exact_products() -> Iterator[None]:
    """A context in which torch multiplies float32 in float32, whatever the process has set.

    If the setting changes inside, it stays changed, so that ``modes`` shows it.
    """
    name = "torch's float32 precision"
    if not any(modes().get(name, ())):
        yield
        return
    torch = sys.modules["torch"]
    # newer versions of torch have a setting for each kind of device, too
    owners: list[Any] = [getattr(x, "matmul", None) for x in (torch.backends.mkldnn, torch.backends.cuda)]
    owners = [x for x in owners if hasattr(x, "fp32_precision")]
    precisions = [x.fp32_precision for x in owners]
    before = "highest"
    with suppress(RuntimeError):
        before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if not any(modes()[name]):
            torch.set_float32_matmul_precision(before)
            for owner, precision in zip(owners, precisions, strict=True):
                if owner.fp32_precision != precision:
                    owner.fp32_precision = precision


def advance() -> None:
    """Advance the generators, so that a call that seeds one with its initial seed changes its state."""
    random.random()
    np.random.random()
    if "torch" in sys.modules:
        sys.modules["torch"].rand(())


def state() -> dict[str, Any]:
    """Random states, threads, warnings and more, by name: a whole check may change them, but no single call."""
    numbers: Any = np.random.get_state()
    values: dict[str, Any] = {
        "Python's random state": random.getstate(),
        "NumPy's random state": (numbers[1].tobytes(), *numbers[2:]),
        "numpy.errstate": tuple(np.geterr().items()),
        "Python's warnings": tuple(warnings.filters),
        "an environment variable": dict(os.environ),
        "garbage collection": gc.isenabled(),
        "the flushing of subnormal numbers": float(np.float32(2.0**-149) * np.float32(1.0)),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        values["torch's random state"] = torch.get_rng_state().numpy().tobytes()
        values["torch's number of threads"] = torch.get_num_threads()
        values["torch's autocast"] = torch.is_autocast_enabled("cpu")
    return values


def changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """A sentence that names the first changed value; None if nothing has changed."""
    name = next((name for name, value in before.items() if value != after[name]), None)
    return None if name is None else f"{name} was changed"
