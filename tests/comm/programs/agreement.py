"""What ranks raise whose group cannot be connected, and then every primitive: ranks take longer to start than either.

Started by test_engines; what they raise is printed for the test to compare over the ranks.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import numpy as np
import primitives
from engines import PATIENCE, say, started

import contrastile
from contrastile.comm.communicator import MismatchError


def main(ranks: Any) -> None:
    """A deadline that is none on the last rank alone."""
    image, text = np.random.default_rng(ranks.rank).standard_normal((2, 5, 6))
    for deadline in ("soon", "-3"):
        os.environ["CONTRASTILE_DEADLINE"] = deadline if ranks.rank == 3 else str(PATIENCE)
        try:
            value = contrastile.clip_loss(image, text, 3.0, group=ranks.world)
        except MismatchError as error:
            say(ranks.rank, json.dumps([deadline, str(error)]))
        else:
            raise AssertionError(f"{deadline}: got {value}")
    del os.environ["CONTRASTILE_DEADLINE"]


if __name__ == "__main__":
    warnings.simplefilter("error")
    world = started()
    main(world)
    # what it has left does not disturb these, which close the world
    primitives.main(world)
