from drawn_calls import check


def test_drawn_calls_are_right() -> None:
    for seed in range(250):
        check(seed)
