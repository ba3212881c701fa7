"""Launching of the ranks' tests is used here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "comm"))
