import pytest
from drawn_calls import check


@pytest.mark.parametrize("first", range(0, 250, 25))
def test_drawn_calls_are_right(first: int) -> None:
    for seed in range(first, first + 25):
        check(seed)
