"""What belongs to the process, and no call of a backend or a loss may change."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from typing import Any

import numpy as np


def modes() -> dict[str, Any]:
    """Settings of torch that change what other code computes, by name; none where nobody has imported it."""
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


def advance() -> None:
    """Move the generators on: one that a call seeds anew must not happen to be where it was."""
    random.random()
    np.random.random()
    if "torch" in sys.modules:
        sys.modules["torch"].rand(())


def state() -> dict[str, Any]:
    """What harmless code moves on, or puts back when it is done: random states, threads, what NumPy warns of."""
    numbers: Any = np.random.get_state()
    found: dict[str, Any] = {
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
        found["torch's random state"] = torch.get_rng_state().numpy().tobytes()
        found["torch's number of threads"] = torch.get_num_threads()
        found["torch's autocast"] = torch.is_autocast_enabled("cpu")
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The first of what there was before that is another now, in words."""
    name = next((name for name, value in before.items() if value != after[name]), None)
    return None if name is None else f"{name} was changed"
