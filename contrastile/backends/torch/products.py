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
# |G| stays below 4 times the largest weight: 2^12 keeps it below the largest float16, and far above the smallest
_FLOAT16_HEADROOM = 2.0**12
# the product of so few rows has too few elements to show that products may be asymmetric
_FEW = 32


def has_mixed_product() -> bool:
    """Whether this torch multiplies 16-bit matrices into a float32 result (on CUDA)."""
    return hasattr(torch.ops.aten.mm, "dtype")


def product_rounding(device: str) -> float:
    """Relative rounding of the factors of a float32 product: tf32 or bfloat16 where the user has allowed them.

    Newer versions of torch have a setting for each kind of device; once it is set, the older setting cannot be read.
    """
    matmul = getattr(torch.backends.cuda if device == "cuda" else torch.backends.mkldnn, "matmul", None)
    name = getattr(matmul, "fp32_precision", None)
    if name is None:
        name = {"highest": "ieee", "high": "tf32", "medium": "bf16"}[torch.get_float32_matmul_precision()]
        if device == "cuda" and (name == "bf16" or torch.backends.cuda.matmul.allow_tf32):
            name = "tf32"
    return {"tf32": 2.0**-10, "bf16": 2.0**-8}.get(name, 0.0)


def converted(x: torch.Tensor, *, binary: bool) -> torch.Tensor:
    """Convert float64 log-sum-exps, to base 2 from natural ones where ``binary``, else back; (m,), or pairs (m, 2).

    The product with the first number of a pair is exact, because its rounding would be larger than the second number.
    """
    first, second = _PARTS[binary]
    if x.ndim == 1:
        return x * (first + second)
    head, remainder = x.unbind(1)
    high = head.float().double()
    # 24 bits times 24 bits
    product = pair(torch, high * first, (head - high) * first + head * second + remainder * (first + second))
    return torch.where(high.isfinite()[:, None], product, x * (first + second))


def paired(x: torch.Tensor) -> torch.Tensor:
    """Numbers, (m,), as pairs with a second number of 0; pairs unchanged."""
    return x if x.ndim == 2 else torch.stack((x, torch.zeros_like(x)), 1)


@cache
def _is_symmetric(rows: int, width: int, state: torch.dtype, threads: int) -> bool:
    """Whether the product of (rows, width) with its transpose is symmetric here: no BLAS promises it."""
    if rows <= _FEW:
        return False
    x = torch.randn(rows, width, dtype=state, device="cpu", generator=torch.Generator("cpu").manual_seed(0))
    product = torch.mm(x, x.t())
    return torch.equal(product, product.t())


def on_host(x: torch.Tensor) -> bool:
    """Whether x is in host memory, where reading a value waits for nothing."""
    return x.device.type == "cpu"


def state_of(features: torch.Tensor) -> torch.dtype:
    """Dtype of logits, of G and of every accumulator."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


class Products:
    """The products of one block.

    Attributes:
        state: see ``state_of``.
        sync: whether the code may read values: only ``on_host``.
        gain: a power of two by which G is multiplied; ``add`` divides it out again.
    """

    def __init__(self, block: Block, unit: float) -> None:
        """For logits in units of 1 / ``unit`` nats: 1 for the natural logarithm, log2 e for base 2."""
        rows = block.rows
        self.state = state_of(rows)
        self.sync = on_host(rows)
        self._narrow = rows.dtype if rows.dtype != self.state else None
        self._mixed = self._narrow is not None and not self.sync and has_mixed_product()
        # scale and bias are multiplied by the unit in float64, and rounded once
        self._scale = self._in_units(block.scale, unit)
        self._bias = None if block.bias is None else self._in_units(block.bias, unit)
        # BLAS skips the product when alpha is 0, and would lose a NaN in the features
        info = torch.finfo(self.state)
        self._alpha: float | None = None
        # symmetric products take no alpha, because BLAS may round alpha times one of the factors
        self._symmetric = block.symmetric and self.sync
        if isinstance(self._scale, float) and info.tiny <= abs(self._scale) <= info.max and not self._symmetric:
            self._alpha = self._scale
        self.gain = 1.0
        self._float16_gain: torch.Tensor | None = None

    def _in_units(self, x: torch.Tensor, unit: float) -> torch.Tensor | float:
        """X times the unit: a float on the host, a tensor in the state dtype elsewhere."""
        return float(x) * unit if self.sync else (x.double() * unit).to(self.state).reshape(())

    def operand(self, features: torch.Tensor) -> torch.Tensor:
        """A chunk of features as an operand of the products: unchanged, or in the state dtype. (t, d)."""
        return features if self._mixed or features.dtype == self.state else features.to(self.state)

    def logits(self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, *, diagonal: bool) -> torch.Tensor:
        """``x_ij = scale <q_i, k_j> + bias`` into ``out`` (rows, columns), from operands (rows, d) and (columns, d).

        ``diagonal``: the rows and the columns have the same indices in the block.
        """
        if self._alpha is not None:
            torch.addmm(out, q, k.t(), beta=0, alpha=self._alpha, out=out)
        else:
            if self._mixed:
                out.copy_(torch.mm(q, k.t(), out_dtype=self.state))
            else:
                torch.mm(q, k.t(), out=out)
            # kernels for few rows may add in another order above the diagonal than below
            if self._symmetric and diagonal and not _is_symmetric(*q.shape, self.state, torch.get_num_threads()):
                out.copy_(torch.maximum(out, out.t()))
            out.mul_(self._scale)
        return out if self._bias is None else out.add_(self._bias)

    @property
    def bounds_gradient(self) -> bool:
        """Whether ``bound_gradient`` has an effect."""
        return self._mixed and self._narrow == torch.float16

    def bound_gradient(self, *weights: torch.Tensor | None) -> None:
        """Scale G by its largest possible magnitude, so that float16 neither overflows nor underflows."""
        peaks = [w.abs().amax() for w in weights if w is not None and w.numel()]
        if peaks:
            peak = torch.stack(peaks).amax()
            # mantissa / peak is exactly a power of two, and needs no trip to the host
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
