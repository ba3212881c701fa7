"""Steps, cached or not, under DDP and FSDP2 on gloo, with uneven parts of the batch and a rank that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import launch

PROGRAM = str(Path(__file__).parent / "programs" / "train_cached.py")
REFUSED = [
    "sync must find the DDP or FSDP2 modules whose gradients are reduced, got none in encode",
    "sync must find the DDP or FSDP2 modules whose gradients are reduced, got none in the modules that it names",
    "encode must call the DDP module itself",
    "scale must be a tensor, got a DTensor",
    "DDP must have static_graph=False",
    "must find a gradient of every parameter, got none of extra; use them",
    "FSDP2 must reduce in the backward pass of the last chunk",
    "must have all its parameters in DDP, got 2 outside, such as one of shape",
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_those_of_the_global_loss_and_reduced_once(ranks: int) -> None:
    ended = launch("torch", PROGRAM, ranks=ranks, seconds=1200)
    assert ended.code == 0, ended.output
    for rank in range(ranks):
        found = dict(line.split(": ", 1) for line in ended.said(rank))
        # of DDP, and two for each module that FSDP2 shards
        assert found.pop("restored") == "7 flags"
        for i, message in enumerate(REFUSED):
            assert message in found.pop(f"refused {i}")
        assert len(found) == 12 + 4
        for trial, ratio in found.items():
            # two DDP modules reduce once each, FSDP2 once for each of the three modules that it shards
            name, last = trial.rsplit(" ", 1)
            if not name.startswith("frozen"):
                assert last == {"one each": "2", "fsdp": "3"}.get(name, "1"), trial
            assert float(ratio) < 1, (trial, ratio)
    assert ended.orphans == 0
