"""Bounds of the oracle's tests and launching of the ranks' tests are used here too."""

import sys
from pathlib import Path

for room in ("oracle", "comm"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / room))
