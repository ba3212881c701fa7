"""Rounding is to the nearest representable value, with ties to even, in every dtype."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrastile.verify.rounding import UNDERFLOW, UNIT, round_to

# precision in bits, least exponent of a normal number, largest finite value
FORMATS = {
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, (2 - 2.0**-7) * 2.0**127),
    "float32": (24, -126, float(np.finfo(np.float32).max)),
    "float64": (53, -1022, float(np.finfo(np.float64).max)),
}


def nearest(x: float, dtype: str) -> float:
    """The definition, in exact rational arithmetic."""
    bits, least, largest = FORMATS[dtype]
    if x == 0:
        return x
    _, exponent = np.frexp(abs(x))
    spacing = Fraction(2) ** (max(int(exponent) - 1, least) - bits + 1)
    # round() of a Fraction rounds ties to even
    rounded = round(Fraction(x) / spacing) * spacing
    if abs(rounded) > Fraction(largest):
        return float(np.copysign(np.inf, x))
    return float(np.copysign(float(rounded), x))


TIES = st.builds(np.ldexp, st.integers(-(2**14), 2**14), st.integers(-150, 128)).map(float)
NEAR_TIES = st.builds(lambda tie, nudge: tie * (1 + nudge), TIES, st.sampled_from([2.0**-30, -(2.0**-30)]))


@given(
    x=st.floats(allow_nan=False, allow_infinity=False) | TIES | NEAR_TIES,
    dtype=st.sampled_from(sorted(FORMATS)),
)
def test_any_number_ties_and_their_neighbours(x: float, dtype: str) -> None:
    assert float(round_to(x, dtype)) == nearest(x, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_representable_values_stay(dtype: str) -> None:
    bits, least, largest = FORMATS[dtype]
    smallest = 2.0 ** (least - bits + 1)
    values = np.array([0.0, -0.0, 1.0, largest, -largest, smallest, 2.0**least, np.inf, -np.inf])
    assert np.array_equal(round_to(values, dtype), values)
    assert np.array_equal(np.signbit(round_to(values, dtype)), np.signbit(values))
    assert np.isnan(round_to(np.nan, dtype))


def test_units_are_half_the_spacing_above_1() -> None:
    for dtype, (bits, least, _) in FORMATS.items():
        assert UNIT[dtype] == 2.0**-bits
        assert 0 < UNDERFLOW[dtype] <= 2.0**least
