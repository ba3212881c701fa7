"""Matrix products of one block, accumulated in the state dtype whatever the features' dtype."""

from __future__ import annotations

import math
from functools import cache

import torch

from contrastile.backends.contract import Block
from contrastile.backends.pairs import pair

LOG2_E = 1.0 / math.log(2.0)
# log2 e and its reciprocal, each in two parts: the first is a float32
_PARTS = {True: (1.4426950216293335, 1.9259629911266175e-08), False: (0.6931471824645996, -1.904654299957768e-09)}
# |G| stays below 4 largest weights, so 2^12 leaves it below the largest float16 and lifts it off the smallest
_FLOAT16_HEADROOM = 2.0**12
# rows whose products are too few numbers to show that some are not symmetric
_FEW = 32


def has_mixed_product() -> bool:
    """Whether this torch multiplies 16-bit matrices into a float32 result (on CUDA)."""
    return hasattr(torch.ops.aten.mm, "dtype")


def product_rounding(device: str) -> float:
    """Relative rounding of what enters a float32 product, tf32 or bfloat16 where the user has allowed them.

    Newer versions of torch say it for each kind of device, and refuse to say it in the older way once it was set so.
    """
    matmul = getattr(torch.backends.cuda if device == "cuda" else torch.backends.mkldnn, "matmul", None)
    name = getattr(matmul, "fp32_precision", None)
    if name is None:
        name = {"highest": "ieee", "high": "tf32", "medium": "bf16"}[torch.get_float32_matmul_precision()]
        if device == "cuda" and (name == "bf16" or torch.backends.cuda.matmul.allow_tf32):
            name = "tf32"
    return {"tf32": 2.0**-10, "bf16": 2.0**-8}.get(name, 0.0)


def converted(x: torch.Tensor, *, binary: bool) -> torch.Tensor:
    """Float64 log-sum-exps of one base in another: in base 2 where ``binary``, else natural; (m,), or pairs (m, 2).

    Of pairs both parts are kept: what a product of the first would be rounded by is large where it is.
    """
    first, second = _PARTS[binary]
    if x.ndim == 1:
        return x * (first + second)
    number, rest = x.unbind(1)
    high = number.float().double()
    # 24 bits times 24 bits
    found = pair(torch, high * first, (number - high) * first + number * second + rest * (first + second))
    return torch.where(high.isfinite()[:, None], found, x * (first + second))


def paired(x: torch.Tensor) -> torch.Tensor:
    """Numbers, (m,), as pairs that lack nothing; pairs as they are."""
    return x if x.ndim == 2 else torch.stack((x, torch.zeros_like(x)), 1)


@cache
def _symmetric(rows: int, width: int, state: torch.dtype, threads: int) -> bool:
    """Whether a product of so many rows with their own transpose is symmetric here: no BLAS promises it."""
    if rows <= _FEW:
        return False
    x = torch.randn(rows, width, dtype=state, device="cpu", generator=torch.Generator("cpu").manual_seed(0))
    found = torch.mm(x, x.t())
    return torch.equal(found, found.t())


def on_host(x: torch.Tensor) -> bool:
    """Whether x is in the host's memory, so that reading a value of it waits for nothing."""
    return x.device.type == "cpu"


def state_of(features: torch.Tensor) -> torch.dtype:
    """Dtype of logits, of G and of every accumulator."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


class Products:
    """The products of one block.

    Attributes:
        state: see ``state_of``.
        sync: whether the code may read values: only ``on_host``.
        gain: a power of two that G is multiplied by, and sums of it are not.
    """

    def __init__(self, block: Block, unit: float) -> None:
        """For logits in units of 1 / ``unit`` nats: 1 for the natural logarithm, log2 e for base 2."""
        rows = block.rows
        self.state = state_of(rows)
        self.sync = on_host(rows)
        self._narrow = rows.dtype if rows.dtype != self.state else None
        self._mixed = self._narrow is not None and not self.sync and has_mixed_product()
        # rounded once, where they are used: the constant joins them in float64
        self._scale = self._number(block.scale, unit)
        self._bias = None if block.bias is None else self._number(block.bias, unit)
        # BLAS skips the product when alpha is 0, and would lose a NaN in the features
        info = torch.finfo(self.state)
        self._alpha: float | None = None
        # BLAS may round alpha times one of the factors
        self._symmetric = block.symmetric and self.sync
        if isinstance(self._scale, float) and info.tiny <= abs(self._scale) <= info.max and not self._symmetric:
            self._alpha = self._scale
        self.gain = 1.0
        self._float16_gain: torch.Tensor | None = None

    def _number(self, x: torch.Tensor, unit: float) -> torch.Tensor | float:
        """A number times the unit, in float64 on the host, in the state dtype elsewhere."""
        return float(x) * unit if self.sync else (x.double() * unit).to(self.state).reshape(())

    def operand(self, features: torch.Tensor) -> torch.Tensor:
        """A chunk of features as the products want it: as it is, or in the state dtype. (t, d)."""
        return features if self._mixed or features.dtype == self.state else features.to(self.state)

    def logits(self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, *, diagonal: bool) -> torch.Tensor:
        """``x_ij = scale <q_i, k_j> + bias`` into ``out`` (rows, columns), from operands (rows, d) and (columns, d).

        ``diagonal``: the rows and the columns of the block have the same numbers here.
        """
        if self._alpha is not None:
            torch.addmm(out, q, k.t(), beta=0, alpha=self._alpha, out=out)
        else:
            if self._mixed:
                out.copy_(torch.mm(q, k.t(), out_dtype=self.state))
            else:
                torch.mm(q, k.t(), out=out)
            # kernels for few rows add in another order beside the diagonal
            if self._symmetric and diagonal and not _symmetric(*q.shape, self.state, torch.get_num_threads()):
                out.copy_(torch.maximum(out, out.t()))
            out.mul_(self._scale)
        return out if self._bias is None else out.add_(self._bias)

    @property
    def bounds_gradient(self) -> bool:
        """Whether ``bound_gradient`` has an effect."""
        return self._mixed and self._narrow == torch.float16

    def bound_gradient(self, *weights: torch.Tensor | None) -> None:
        """Say how large G can get, so that rounding it to float16 neither overflows nor underflows."""
        peaks = [w.abs().amax() for w in weights if w is not None and w.numel()]
        if peaks:
            peak = torch.stack(peaks).amax()
            # mantissa / peak is a power of two, exactly, and takes no trip to the host
            power = torch.frexp(peak).mantissa / peak
            self._float16_gain = torch.where(peak > 0, power, 1.0) * _FLOAT16_HEADROOM

    def add(self, total: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> None:
        """``total += g @ x``: total (a, d) and g (a, b) in the state dtype, x (b, d) an operand."""
        if not self._mixed:
            total.addmm_(g, x, alpha=1.0 / self.gain)
        elif self._float16_gain is None:
            total.add_(torch.mm(g.to(x.dtype), x, out_dtype=self.state))
        else:
            total.add_(torch.mm((g * self._float16_gain).to(x.dtype), x, out_dtype=self.state).div_(self._float16_gain))
