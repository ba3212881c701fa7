"""Real trainers: DDP, FSDP2 and a sum by hand over the processes of torchrun, with uneven parts of the batch."""

from __future__ import annotations

import pytest
from launching import launch


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4])
def test_parameter_gradients_are_those_of_the_global_loss(ranks: int) -> None:
    ended = launch("torch", "train_towers.py", ranks=ranks, seconds=120)
    assert ended.code == 0, ended.output
    for rank in range(ranks):
        found = dict(line.rsplit(": ", 1) for line in ended.said(rank))
        wrong = float(found.pop("wrong"))
        assert len(found) == 18
        assert all(float(ratio) < 1 for ratio in found.values()), found
        # 1 / n of the gradient
        assert wrong > 1000
    assert ended.orphans == 0
