# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""What the kernels cost, without a GPU: every variant compiled for an architecture, its registers, spills and memory.

``python scripts/triton_resources.py FILE`` writes the table for sm_80, sm_90 and sm_100. The primitives
themselves are run, with launches replaced by compilation: what is compiled is what would be launched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import contrastile.backends.triton.search as search
from contrastile.backends.contract import Block, Options, Pairs, SideWeights, Weights
from contrastile.backends.triton import (
    backward,
    forward,
    forward_pass,
    guide,
    launch,
    parts,
    positives,
    precheck,
    products,
    sigmoid,
    sums,
)
from contrastile.backends.triton.arrays import TritonArrays
from contrastile.backends.triton.backward_pass import finished, gradients
from contrastile.backends.triton.forward_pass import lse
from contrastile.backends.triton.sigmoid_pass import sigmoid_loss

ARCHITECTURES = (80, 90, 100)
MODULES = (backward, forward, guide, parts, positives, precheck, products, search, sigmoid, sums)
VARIANTS = (("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "split"))
"""Dtypes of features, each with a precision that the backend has on a GPU."""


@contextmanager
def compiling(architecture: int) -> Iterator[list[tuple[str, dict[str, Any], Any]]]:
    """A context in which a launch compiles its kernel instead; yields (name, arguments, compiled kernel) of each."""
    kernels: list[tuple[str, dict[str, Any], Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        marks = dict(zip(self.arg_names, args, strict=False)).get("marks")
        kernels.append((self.__name__, kwargs if marks is None else kwargs | {"MARKS": True}, kernel))
        return kernel

    for kernel in (getattr(x, "function", x) for module in MODULES for x in vars(module).values()):
        if isinstance(kernel, JITFunction):
            # the caches are per device, and every architecture is device 0 here
            kernel.device_caches.clear()
    answers = {"device": 0, "stream": 0, "target": GPUTarget("cuda", architecture, 32)}
    gpu = {f"get_current_{name}": lambda *given, answer=answer: answer for name, answer in answers.items()}
    driver.set_active(SimpleNamespace(**gpu))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(launch, "_capability", return_value=architecture),
        mock.patch.object(launch, "_multiprocessors", return_value=1),
        mock.patch.object(forward_pass, "MANY", 0),
    ):
        yield kernels


def run_all(dtype: str, plain: bool = False, precision: str = "ieee") -> None:
    """Call the primitives so that every variant of every kernel is launched once, on small CPU tensors.

    With ``plain``, launch only the kernels that a symmetric loss of aligned shape needs.
    """
    options = Options(precision=precision)
    kind = getattr(torch, dtype)
    index = torch.arange(300)
    variants = [
        Pairs(positives=index),
        Pairs(positives=index, row_ids=index, column_ids=index),
        Pairs(excluded=index, row_ids=index, column_ids=index, match="target"),
        Pairs(positives=index, row_limits=torch.ones(300), column_limits=torch.ones(300)),
    ]
    guides = torch.ones(300, 384, dtype=kind)
    variants += [replace(variants[-1], row_guide=guides, column_guide=guides), replace(variants[2], rising=True)]
    vector, scalar = torch.ones(300), torch.tensor(1.0)
    arrays = TritonArrays()
    wide = vector.double()
    side = wide, wide, wide, vector, vector
    for length in (1, 9):
        # the shorter length takes one program, the longer several
        arrays.loss("float32", *[[x.repeat(length) for x in side]] * 2)
    problems = [(variants[0], 256, True)]
    if not plain:
        problems += [(pairs, 300, True) for pairs in variants] + [(variants[0], 256, False)]
    for pairs, size, two_sided in problems:
        features, out = torch.ones(size, 512, dtype=kind), torch.ones(size, 512)
        x = vector[:size]
        pair_fields = {field.name: getattr(pairs, field.name) for field in fields(pairs)}
        sliced = {name: y[:size] for name, y in pair_fields.items() if isinstance(y, torch.Tensor)}
        block = Block(features, features, scalar, scalar, replace(pairs, **sliced))
        lse(block, two_sided, options)
        side = SideWeights(wide[:size], wide[:size], x, x)
        weights = Weights(side, side if two_sided else None)
        if kind.itemsize == 2 and two_sided and not plain and block.pairs.match == "drop" and not block.pairs.limited:
            search.ranks(block)
            for searched in (replace(block, pairs=Pairs()), replace(block, pairs=replace(block.pairs, row_limits=x))):
                search.nearest(searched, 1, index[:size])
        with mock.patch.object(products, "_has_out_dtype", return_value=False):
            gradients(block, weights, out, out, options)
            finished(block, weights, None, "gradient", options)
            if two_sided and not plain:
                sigmoid_loss(block, x, out, out, options)


def resources(architecture: int, dtype: str, plain: bool = False, precision: str = "ieee") -> list[dict[str, Any]]:
    """Compile every kernel that features of this dtype need for the architecture; see ``run_all`` for the rest.

    A variant is the features' dtype and the compile-time flags. Registers and spilled bytes are of a thread, shared
    bytes of a program.
    """
    with compiling(architecture) as kernels:
        run_all(dtype, plain, precision)
    table = {}
    for name, arguments, kernel in kernels:
        flags = "".join(
            f" {key}={value}"
            for key, value in arguments.items()
            if (isinstance(value, bool) and key.isupper()) or key in ("WHAT", "IDS", "BM", "BN", "BK", "PARTS")
        )
        variant = (dtype if precision == "ieee" else f"{dtype}/{precision}") + flags
        warps = kernel.metadata.num_warps
        if (name, variant, warps) not in table:
            registers, local = _usage(kernel.asm["cubin"])
            row = {"kernel": name, "variant": variant, "architecture": architecture, "registers": registers}
            sizes = {"shared": kernel.metadata.shared, "warps": warps}
            table[name, variant, warps] = row | {"spilled": local} | sizes
    return [table[key] for key in sorted(table)]


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a cubin's one kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (re.search(rf"{key}:(\d+)", out) for key in ("REG", "STACK", "LOCAL"))
    if registers is None or stack is None or local is None:
        raise RuntimeError(f"cuobjdump -res-usage gave no figures: {out!r}")
    return int(registers[1]), int(stack[1]) + int(local[1])


def main() -> None:
    """Write the table as JSON to the file named on the command line; ``--plain`` for bfloat16 and run_all's plain."""
    plain = "--plain" in sys.argv
    variants = [("bfloat16", "ieee")] if plain else VARIANTS
    jobs = [(architecture, dtype, plain, precision) for architecture in ARCHITECTURES for dtype, precision in variants]
    table = [row for job in jobs for row in resources(*job)]
    Path(sys.argv[1]).write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
