"""Runs a module or a script with CuPy's memory pool left out: ``python -m gpu_run.profile_unpooled WHAT ...``.

Each array is then an allocation of its own, and a sanitizer sees each step beyond one.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec


def main() -> None:
    """Run it as Python would."""
    if find_spec("cupy"):
        import cupy

        cupy.cuda.set_allocator(None)
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
