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
    """Return the facts if each is within its limit.

    Raises:
        FactsError: a fact is looser than its limit, or NaN.
    """
    state, smallest_state = backend.state(dtype), state_dtype(dtype)
    if state not in (smallest_state, "float64"):
        allowed = " or ".join(dict.fromkeys((smallest_state, "float64")))
        raise FactsError(f"state must be {allowed} for {dtype} features, got {state}")
    plain = f"a plain computation with {dtype} features and a {state} state"
    for name, limit in limits(state, dtype, precision).items():
        claimed = getattr(facts, name)
        # this form refuses NaN
        if not 0 <= claimed <= limit:
            raise FactsError(f"Accuracy.{name} must be at most {limit:.3g}, the accuracy of {plain}, got {claimed:.3g}")
    for terms in _TERMS:
        most_depth = (2 if precision == "ieee" else 6) * terms + 64
        if not 0 <= facts.depth(terms) <= most_depth:
            raise FactsError(f"Accuracy.depth({terms}) must be at most {most_depth}, got {facts.depth(terms):.3g}")
    return facts


def plain_accuracy(
    dtype: str, state: str, precision: str = "ieee", largest_weight: float = 1.0, terms: int = 1, bias: float = 0.0
) -> Accuracy:
    """The facts of a plain computation: each elementwise result is rounded to ``state``, sums of 16-bit terms are not.

    With a 16-bit state of unit roundoff w, sums are in float32, and the following roundings count in float32's units:

    * A logit has at most eight roundings, relative to ``|s| sum_k |q_ik| |k_jk|``: the scale, its product with a
      feature, the matrix product and one multiplication; the difference with the log-sum-exp L; and in L itself the
      maximum, the sum and the result, since ``|L| <= sum_j p_j |x_j| + log n``. They are added to ``depth``, which
      also allows them to the second products, although these have fewer.
    * The rest of L's roundings, ``3 w log n``, and two roundings of a bias are absolute in the exponent, like the four
      of exponential, sum, logarithm and quotient. They are added to ``exp_ulps``.
    * G is the difference of a probability and a target, times a weight: three roundings.

    Args:
        dtype: dtype of the features.
        state: dtype of logits, probabilities and their gradient.
        precision: precision of float32 products.
        largest_weight: of a row or column; the underflow of a float16 gradient of the logits is relative to it.
        terms: number of terms of the longest log-sum-exp.
        bias: added to every logit.
    """
    product = _product_rounding(precision)
    unit = UNIT["float64" if state == "float64" else "float32"]
    coarse = max((dtype, state), key=UNIT.__getitem__)
    accuracy = Accuracy(
        unit=unit,
        # tensor cores truncate when they add
        accumulate_unit=unit if precision == "ieee" and coarse in ("float32", "float64") else 2 * unit,
        input_rounding=UNIT[state] if UNIT[state] > UNIT[dtype] else product if dtype == "float32" else 0.0,
        gradient_rounding=UNIT[coarse] if coarse in ("float16", "bfloat16") else 0.0,
        gradient_underflow=UNDERFLOW["float16"] / largest_weight if coarse == "float16" else 0.0,
    )
    if state not in ("float16", "bfloat16"):
        return accuracy
    units = UNIT[state] / unit
    return replace(
        accuracy,
        gradient_rounding=3 * UNIT[state],
        exp_ulps=units * (4 + 3 * math.log(max(terms, 1)) + 2 * abs(bias)),
        depth=lambda k: k + math.ceil(8 * units),
    )


def limits(state: str, dtype: str, precision: str) -> dict[str, float]:
    """The largest value of each fact.

    * unit: the state's unit. accumulate_unit: twice the unit, since tensor cores truncate when they add.
    * input_rounding: twice the unit; 2^-10 with precision "tf32" and 2^-20 with "split"; or torch's own setting for
      float32 products.
    * gradient_rounding: like input_rounding for wide features; 16-bit features round a probability and G, once each.
    * gradient_underflow: twice half the spacing of float16's subnormals.
    * exp_ulps: 16; good libraries need 1 to 4.
    """
    unit, is_narrow = UNIT[state], dtype in ("float16", "bfloat16")
    rounding = max(2 * unit, _product_rounding(precision if dtype == "float32" else "ieee"))
    return {
        "unit": unit,
        "accumulate_unit": 2 * unit,
        "input_rounding": rounding,
        "gradient_rounding": max(rounding, (1 + UNIT[dtype]) ** 2 - 1) if is_narrow else rounding,
        "gradient_underflow": 2.0**-24 if dtype == "float16" else 0.0,
        "exp_ulps": 16.0,
    }


def _product_rounding(precision: str) -> float:
    """Relative rounding of the inputs of a float32 product: by its precision, or as torch is currently set."""
    rounding = {"tf32": 2.0**-10, "split": 2.0**-20}.get(precision, 0.0)
    if "torch" not in sys.modules:
        return rounding
    from contrastile.backends.torch.products import product_rounding

    return max(rounding, product_rounding("cpu"), product_rounding("cuda"))
