"""The implementations that are measured: contrastile's backends, and a plain loss that forms the full logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from contrastile.backends.contract import Accuracy, Options
from contrastile.backends.registry import load
from contrastile.bench.workloads import Arguments, Workload
from contrastile.evaluation import value_and_grad
from contrastile.losses import clip_loss
from contrastile.verify.rounding import UNDERFLOW, UNIT

PLAIN = "plain"
CHECK_ROWS = 1031
"""Pairs of the check against the oracle: prime, and more than one chunk of any backend."""

StepResult = tuple[Any, tuple[Any, Any, Any]]
Step = Callable[[], StepResult]


@dataclass(frozen=True, slots=True)
class Implementation:
    """Something that computes the symmetric loss and its gradients.

    Attributes:
        name: a backend's name, or "plain".
        library: whose arrays it is given: "numpy", "torch", or "cupy" where there is no torch.
        step: binds arguments; each call of the result is one forward and backward, and returns
            ``loss, (d_image, d_text, d_scale)``. No gradient accumulates.
        accuracy: facts for the bounds of its check, given the dtype and the device.
        predicted_bytes: bytes that it is expected to hold at its peak, given the workload and the size of one feature.
        refuses: why it cannot run in a dtype on a device, or None.
        separate_positives: whether positives stay out of its log-sum-exps: see ``verify.bounds.bounds``.
    """

    name: str
    library: str
    step: Callable[[Arguments], Step]
    accuracy: Callable[[str, str], Accuracy]
    predicted_bytes: Callable[[Workload, int], int]
    refuses: Callable[[str, str], str | None]
    separate_positives: bool = True


def ours(name: str) -> Implementation:
    """A backend behind the public functions, so that the calls timed are the calls that users make.

    Raises:
        ValueError, BackendUnavailableError, TypeError: see ``contrastile.backends.load``.
    """
    backend = load(name)
    library = backend.arrays.name if backend.arrays.name == "numpy" or find_spec("torch") is None else "torch"

    def loss(image: Any, text: Any, scale: Any, ids: Any) -> Any:
        return clip_loss(image, text, scale, ids=ids, backend=name)

    def without_autograd(given: Arguments) -> Step:
        both = value_and_grad(clip_loss, backend=name)

        def step() -> StepResult:
            value, gradients = both(given.image, given.text, given.scale, ids=given.ids)
            return value, (gradients[0], gradients[1], gradients[2])

        return step

    def refuses(dtype: str, device: str) -> str | None:
        if device not in backend.devices:
            return f"runs on {' or '.join(sorted(backend.devices))} only"
        return None if dtype in backend.dtypes else f"takes {', '.join(sorted(backend.dtypes))} only"

    def accuracy(dtype: str, device: str) -> Accuracy:
        options = Options(precision=backend.auto_precision)
        return backend.accuracy(dtype, device, *(() if options == Options() else (options,)))

    def predicted(workload: Workload, itemsize: int) -> int:
        b, d = workload.shape
        # both gradients, and their accumulators in the state dtype
        return 2 * b * d * (itemsize + 8)

    step = with_autograd(loss) if library == "torch" else without_autograd
    return Implementation(name, library, step, accuracy, predicted, refuses)


def plain() -> Implementation:
    """open_clip's formula in plain torch: two matrices of logits, two cross entropies, halved.

    Raises:
        ImportError: torch is not installed.
    """
    from contrastile.bench import plain as losses

    def accuracy(dtype: str, device: str) -> Accuracy:
        # logits and their gradients are rounded to the features' dtype, and gradients underflow in it
        underflow = UNDERFLOW["float16"] * 2 * CHECK_ROWS if dtype == "float16" else 0.0
        return Accuracy(
            unit=UNIT[dtype],
            accumulate_unit=min(UNIT[dtype], UNIT["float32"]),
            gradient_rounding=0.0 if dtype in ("float32", "float64") else UNIT[dtype],
            gradient_underflow=underflow,
        )

    def predicted(workload: Workload, itemsize: int) -> int:
        b, d = workload.shape
        # two matrices of logits, two of log-probabilities, and the mask of false negatives
        return b * b * (4 * itemsize + (workload.variant == "ids")) + 4 * b * d * itemsize

    step = with_autograd(losses.clip)
    return Implementation(PLAIN, "torch", step, accuracy, predicted, lambda *where: None, separate_positives=False)


def with_autograd(loss: Callable[[Any, Any, Any, Any], Any]) -> Callable[[Arguments], Step]:
    """Forward and backward of a differentiable loss of torch tensors; gradients are returned, not accumulated."""

    def bind(given: Arguments) -> Step:
        import torch

        leaves = (given.image, given.text, given.scale)

        def step() -> StepResult:
            value = loss(*leaves, given.ids)
            d_image, d_text, d_scale = torch.autograd.grad(value, leaves)
            return value.detach(), (d_image, d_text, d_scale)

        return step

    return bind
