"""``python -m contrastile`` is the command ``contrastile``."""

import sys

from contrastile.cli import main

if __name__ == "__main__":
    sys.exit(main())
