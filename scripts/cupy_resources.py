"""What the kernels cost, without a GPU: every instance compiled for an architecture, its registers, spills and memory.

``python scripts/cupy_resources.py FILE`` writes the table for sm_80, sm_90a and sm_100. With ``--keep``
the cubins go to the cache on disk as well: a first call on such a GPU then compiles nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from contrastile.backends.cupy.build import (
    OPTIONS,
    SOURCES,
    Instance,
    architecture_name,
    compile_instance,
    keep,
    nvrtc_version,
)
from contrastile.backends.cupy.configs import HOPPER, kernel_family
from contrastile.backends.cupy.instances import CAPABILITIES, every


def resources(instance: Instance, capability: int, *, cached: bool = False) -> dict[str, Any]:
    """Compile one instance for GPUs of a compute capability (times 10); with ``cached``, keep it on disk too.

    ``registers``, ``spilled`` bytes and the local memory, ``stack``, are of a thread; ``shared`` has the bytes of a
    block, static and dynamic. For tile kernels ``threads`` is the size of a block and ``resident`` the blocks that a
    multiprocessor should hold; both are 0 for others.
    """
    compiled = compile_instance(instance, architecture_name(capability))
    if cached:
        keep(instance, architecture_name(capability), compiled)
    # the log has a part for every kernel of the file, also for those that are no templates
    parts = compiled.log.split("Compiling entry function ")
    kernel_log = next((part for part in parts if part.startswith(f"'{compiled.kernel}'")), "")
    stack, registers = re.search(r"(\d+) bytes stack frame", kernel_log), re.search(r"Used (\d+) registers", kernel_log)
    if stack is None or registers is None:
        raise RuntimeError(f"the compiler's log has no figures for {instance.kernel}: {compiled.log!r}")
    static = re.search(r"(\d+) bytes smem", kernel_log)
    name = instance.kernel.partition("<")[0]
    family = next((x for x in (HOPPER, kernel_family("float32", capability)) if name.endswith(x.name)), None)
    return {
        "kernel": instance.kernel,
        "architecture": architecture_name(capability),
        "registers": int(registers[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", kernel_log))),
        "stack": int(stack[1]),
        "shared": (0 if family is None else family.shared) + (0 if static is None else int(static[1])),
        "threads": 0 if family is None else family.threads,
        "resident": 0 if family is None else family.resident,
        "warnings": len(re.findall(r"\bwarning\b", compiled.log)),
    }


def table(
    instances: Sequence[Instance], capability: int, jobs: int, *, cached: bool = False
) -> Iterator[dict[str, Any]]:
    """``resources`` of several instances, compiled side by side."""
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(partial(resources, capability=capability, cached=cached), instances)


def sources() -> str:
    """A digest of what the compilers see: the options and all sources, without comments and empty lines."""
    digest = hashlib.sha256("\0".join(OPTIONS).encode())
    for path in sorted(SOURCES.glob("*.cu*")):
        lines = (line.partition("//")[0].rstrip() for line in path.read_text(encoding="utf-8").splitlines())
        digest.update("\n".join([f"\0{path.name}", *filter(None, lines)]).encode())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="where the table goes, as JSON")
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES, help="times 10 (%(default)s)")
    parser.add_argument("--match", default="", metavar="TEXT", help="only kernels with this in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="put the cubins into the cache on disk")
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for capability in args.capability:
        instances = [x for x in every(capability) if args.match in x.kernel]
        for row in table(instances, capability, args.jobs, cached=args.keep):
            print(row, flush=True)
            rows.append(row)
    if args.file is not None:
        versions = {"nvrtc": "{}.{}".format(*nvrtc_version()), "sources": sources()}
        report = {**versions, "kernels": sorted(rows, key=lambda row: (row["kernel"], row["architecture"]))}
        args.file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
