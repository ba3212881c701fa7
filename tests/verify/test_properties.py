"""Every property has a planted defect that it catches, and says what it is."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from contrastile.mutate.registry import every
from contrastile.verify.comparison import identical
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.truth import Outcome

RECORD = Path(__file__).resolve().parents[2] / "docs" / "results" / "mutants.json"


def test_every_property_catches_a_defect_and_says_what_it_is():
    caught = {each["property"] for each in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"]}
    caught |= {word for each in every() for word in each.checks}
    assert set(PROPERTIES) <= caught
    assert all(each.about.endswith(".") for each in PROPERTIES.values())


def test_what_is_missing_the_second_time_is_not_the_same():
    one = np.ones(())
    whole = Outcome(loss=one, rows=np.ones((2, 3)), columns=(), scale=one)
    assert identical(whole, whole).ratio == 0.0
    assert "rows is missing" in str(identical(replace(whole, rows=None), whole))
