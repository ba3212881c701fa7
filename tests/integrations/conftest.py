"""Launching of the ranks' tests and bounds of the gradient cache's are used here too."""

import sys
from pathlib import Path

for room in ("comm", "training"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / room))
