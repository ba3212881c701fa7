"""The experiment past the limit compiles for Hopper, fits a block, and its host mirrors its arguments."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import streamed_backward

BLOCK = 232_448


@pytest.mark.parametrize("options", [(), ("-DCONTRASTILE_WATCHDOG=1000",)], ids=["timed", "watchdog"])
def test_it_compiles_without_a_warning_and_fits_a_block(options: tuple[str, ...]) -> None:
    made = streamed_backward.compiled(*options)
    assert "warning" not in made.log.lower(), made.log
    assert streamed_backward.cubins.integer(made.cubin, streamed_backward.SHARED) <= BLOCK


def test_arguments_are_those_of_the_kernel() -> None:
    source = (streamed_backward.HERE / "streamed_form.cuh").read_text(encoding="utf-8")
    body = re.search(r"struct StreamedArguments \{([^}]*)\}", source)
    size = re.search(r"sizeof\(StreamedArguments\) == (\d+)", source)
    assert body is not None
    assert size is not None
    declared = re.findall(r"(\w+)(?=[,;])", re.sub(r"//[^\n]*", "", body[1]))
    assert [name for name, _ in streamed_backward.Arguments._fields_] == declared
    assert ctypes.sizeof(streamed_backward.Arguments) == int(size[1])
