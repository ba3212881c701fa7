# pyright: reportAttributeAccessIssue=false
"""NVRTC: one instance of a kernel template, from the sources in ``cuda/`` to a cubin for one architecture.

CuPy's own way compiles for sm_90 where ``wgmma`` and ``setmaxnreg`` need sm_90a, so NVRTC is called directly; the
cubin is then loaded as a ``cupy.RawModule``. Compiling needs neither CuPy nor a GPU.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from contrastile.backends.cupy import cache as disk

SOURCES = Path(__file__).parent / "cuda"
OPTIONS = ("-std=c++17", "--ptxas-options=-v")
"""``-v`` makes the log say what a kernel takes: registers, spills, shared memory."""


class Instance(NamedTuple):
    """One kernel to compile: a tuple, because each launch looks its kernel up, and a tuple is hashed quickly.

    Attributes:
        file: its source in ``cuda/``.
        kernel: the template's instance in namespace ``contrastile``: "measure<contrastile::bfloat16>".
    """

    file: str
    kernel: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """An instance that NVRTC has compiled.

    Attributes:
        cubin: machine code.
        kernel: the kernel's name in the cubin.
        log: the messages of the compilers.
    """

    cubin: bytes
    kernel: str
    log: str


def architecture_name(capability: int) -> str:
    """NVRTC's name of a compute capability times 10; Hopper's own instructions need the "a"."""
    return f"sm_{capability}a" if capability == 90 else f"sm_{capability}"


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the installed NVRTC."""
    from cuda.bindings import nvrtc

    major, minor = _check(nvrtc.nvrtcVersion())
    return int(major), int(minor)


def compile_instance(instance: Instance, architecture: str) -> Compiled:
    """Compile an instance for an architecture ("sm_90a").

    Raises:
        RuntimeError: it does not compile; the message holds the compiler's log.
    """
    from cuda.bindings import nvrtc

    source = (SOURCES / instance.file).read_bytes()
    expression = f"contrastile::{instance.kernel}".encode()
    # NVRTC's own cache would give the cubin without the log
    fresh = ("--no-cache",) if nvrtc_version() >= (13, 0) else ()
    options = [x.encode() for x in (*OPTIONS, *fresh, f"-arch={architecture}", f"-I{SOURCES}")]
    program = _check(nvrtc.nvrtcCreateProgram(source, instance.file.encode(), 0, None, None))
    try:
        _check(nvrtc.nvrtcAddNameExpression(program, expression))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _read_buffer(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0 \n").decode()
        if int(status):
            raise RuntimeError(f"NVRTC cannot compile {instance.kernel} of {instance.file} for {architecture}:\n{log}")
        cubin = _read_buffer(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Compiled(cubin, _check(nvrtc.nvrtcGetLoweredName(program, expression)).decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read_buffer(program: Any, get_size: Any, get_content: Any) -> bytes:
    buffer = b" " * int(_check(get_size(program)))
    _check(get_content(program, buffer))
    return buffer


def _check(result: tuple[Any, ...]) -> Any:
    """The results of a function of cuda-bindings, without its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def cubin(instance: Instance, architecture: str) -> tuple[Path, str]:
    """The path of the instance's cubin and its kernel's name, from the cache on disk or compiled into it."""
    key = _key(instance, architecture)
    stored = disk.load(key)
    if stored is None:
        compiled = compile_instance(instance, architecture)
        stored = keep(instance, architecture, compiled), compiled.kernel
    return stored


def keep(instance: Instance, architecture: str, compiled: Compiled) -> Path:
    """Store a compiled instance in the cache on disk, and return its path."""
    return disk.store(_key(instance, architecture), compiled.cubin, compiled.kernel)


def _key(instance: Instance, architecture: str) -> str:
    """A digest of all inputs of the cubin."""
    version = map(str, nvrtc_version())
    inputs = [_sources(instance.file), *OPTIONS, architecture, instance.file, instance.kernel, *version]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()


@cache
def _sources(file: str) -> str:
    """A digest of a source and of all files that it includes from ``cuda/``: other changes compile nothing anew."""
    digest, visited, pending = hashlib.sha256(), {file}, [file]
    while pending:
        name = pending.pop()
        text = (SOURCES / name).read_bytes()
        digest.update(name.encode() + b"\0" + text + b"\0")
        included = [x.decode() for x in re.findall(rb'^\s*#\s*include\s+"(.+)"', text, re.MULTILINE)]
        pending += [x for x in dict.fromkeys(included) if x not in visited]
        visited.update(included)
    return digest.hexdigest()
