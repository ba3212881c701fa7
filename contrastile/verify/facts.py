"""Limits on the accuracy facts that a backend states: no looser than a plain computation in the same dtype.

Every bound is derived from these facts; without limits, loose facts would let any result pass.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

from contrastile.backends.contract import Accuracy, Backend, state_dtype
from contrastile.verify.rounding import UNDERFLOW, UNIT

_TERMS = (1, 64, 4096, 2**20)


class FactsError(ValueError):
    """A backend's facts are looser than a plain computation; the message names the fact and its limit."""


def checked(facts: Accuracy, backend: Backend, dtype: str, precision: str) -> Accuracy:
    """The facts.

    Raises:
        FactsError: one of them is looser than its limit, or NaN.
    """
    state, least = backend.state(dtype), state_dtype(dtype)
    if state not in (least, "float64"):
        allowed = " or ".join(dict.fromkeys((least, "float64")))
        raise FactsError(f"state must be {allowed} for {dtype} features, got {state}")
    plain = f"a plain computation with {dtype} features and a {state} state"
    for name, limit in limits(state, dtype, precision).items():
        claimed = getattr(facts, name)
        # written so that NaN is refused
        if not 0 <= claimed <= limit:
            raise FactsError(f"Accuracy.{name} must be at most {limit:.3g}, the accuracy of {plain}, got {claimed:.3g}")
    for terms in _TERMS:
        longest = (2 if precision == "ieee" else 6) * terms + 64
        if not 0 <= facts.depth(terms) <= longest:
            raise FactsError(f"Accuracy.depth({terms}) must be at most {longest}, got {facts.depth(terms):.3g}")
    return facts


def plain_accuracy(
    dtype: str, state: str, precision: str = "ieee", largest_weight: float = 1.0, terms: int = 1, bias: float = 0.0
) -> Accuracy:
    """The facts of a plain computation: each elementwise result is rounded to ``state``, sums of 16-bit terms are not.

    With a 16-bit state of unit roundoff w, and sums in float32, counted in float32's units:

    * A logit has at most eight roundings, relative to ``|s| sum_k |q_ik| |k_jk|``: the scale, its product with a
      feature, the matrix product and one multiplication; the difference with the log-sum-exp L; and of L itself the
      maximum, the sum and the result, since ``|L| <= sum_j p_j |x_j| + log n``. They lengthen ``depth``, and with it
      the second products, which have fewer.
    * What L's roundings cost beyond that, ``3 w log n``, and those of a bias, twice, are absolute in the exponent; as
      are four of exponential, sum, logarithm and quotient. They are ``exp_ulps``.
    * G is the difference of a probability and a target, times a weight: three roundings.

    Args:
        dtype: of the features.
        state: of logits, probabilities and their gradient.
        precision: of float32 products.
        largest_weight: of a row or column; a float16 gradient of the logits underflows beside it.
        terms: of the longest log-sum-exp.
        bias: added to every logit.
    """
    product = _product_rounding(precision)
    unit = UNIT["float64" if state == "float64" else "float32"]
    coarse = max((dtype, state), key=UNIT.__getitem__)
    found = Accuracy(
        unit=unit,
        # tensor cores truncate as they add
        accumulate_unit=unit if precision == "ieee" and coarse in ("float32", "float64") else 2 * unit,
        input_rounding=UNIT[state] if UNIT[state] > UNIT[dtype] else product if dtype == "float32" else 0.0,
        gradient_rounding=UNIT[coarse] if coarse in ("float16", "bfloat16") else 0.0,
        gradient_underflow=UNDERFLOW["float16"] / largest_weight if coarse == "float16" else 0.0,
    )
    if state not in ("float16", "bfloat16"):
        return found
    units = UNIT[state] / unit
    return replace(
        found,
        gradient_rounding=3 * UNIT[state],
        exp_ulps=units * (4 + 3 * math.log(max(terms, 1)) + 2 * abs(bias)),
        depth=lambda k: k + math.ceil(8 * units),
    )


def limits(state: str, dtype: str, precision: str) -> dict[str, float]:
    """The largest value of each fact.

    * unit: the state's. accumulate_unit: twice that, since tensor cores truncate as they add.
    * input_rounding: the state's; 2^-10 with precision "tf32" and 2^-20 with "split"; or torch's own setting for
      float32 products.
    * gradient_rounding: the same for wide features; 16-bit features round a probability and G, each once.
    * gradient_underflow: half the spacing of float16's subnormals, twice.
    * exp_ulps: 16; good libraries need 1 to 4.
    """
    unit, narrow = UNIT[state], dtype in ("float16", "bfloat16")
    product = max(2 * unit, _product_rounding(precision if dtype == "float32" else "ieee"))
    return {
        "unit": unit,
        "accumulate_unit": 2 * unit,
        "input_rounding": product,
        "gradient_rounding": max(product, (1 + UNIT[dtype]) ** 2 - 1) if narrow else product,
        "gradient_underflow": 2.0**-24 if dtype == "float16" else 0.0,
        "exp_ulps": 16.0,
    }


def _product_rounding(precision: str) -> float:
    """Relative rounding of the inputs of a float32 product: by its precision, or as torch is currently set."""
    own = {"tf32": 2.0**-10, "split": 2.0**-20}.get(precision, 0.0)
    if "torch" not in sys.modules:
        return own
    from contrastile.backends.torch.products import product_rounding

    return max(own, product_rounding("cpu"), product_rounding("cuda"))
