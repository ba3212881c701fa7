import pytest
from drawn_calls import check


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_drawn_calls_are_right(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)
