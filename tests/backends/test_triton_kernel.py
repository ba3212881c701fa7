"""Launches that reuse a compiled kernel, over a stand-in for Triton: calls that differ for Triton share no kernel."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.backends.compiling import side_by_side
from contrastile.backends.triton import kernel

PARAMETERS = [("x", False), ("out", False), ("m", True), ("stride", False), ("depth", False), ("BLOCK", False)]


STREAM = 77


class Compiled:
    """The compiled kernel that a launch returns; its launcher takes every parameter in the function's order."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.function, self.packed_metadata = log, object(), object()

    def run(self, x: int, y: int, z: int, *args: Any) -> None:
        stream, *launch_arguments = args[:6]
        assert stream == STREAM
        assert launch_arguments == [self.function, self.packed_metadata, None, None, None]
        self.log.append((self, (x, y, z), args[6:]))


class Function:
    """A function of ``triton.jit``; each launch through Triton compiles it."""

    def __init__(self) -> None:
        self.params = [SimpleNamespace(name=name, do_not_specialize=flag, default=None) for name, flag in PARAMETERS]
        self.pre_run_hooks: list[Any] = []
        self.compiled: list[Compiled] = []
        self.options: list[dict[str, Any]] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **named: Any) -> Compiled:
            self.options.append({name: x for name, x in named.items() if name not in dict(PARAMETERS)})
            self.compiled.append(Compiled(self.launched))
            return self.compiled[-1]

        return run


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernel.triton, "__version__", "3.7.1")
    return Function()


BUFFER = torch.zeros(64)
X, OUT = BUFFER[:8], torch.zeros(8)
ARGUMENTS = (X, OUT, 5, 32)
NAMED = {"depth": 8, "BLOCK": 16, "num_warps": 4}


def launch(function: Function, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    wrapped = kernel.Kernel(function)
    for args, named in calls:
        wrapped[(3,)](*args, **named)
    return len(function.compiled)


def test_a_launch_like_an_earlier_one_goes_straight_to_its_compiled_kernel(function: Function) -> None:
    other = torch.zeros(64)[16:24], OUT, 5, 32
    assert launch(function, (ARGUMENTS, NAMED), (other, NAMED)) == 1
    ((compiled, grid, args),) = function.launched
    assert compiled is function.compiled[0]
    assert grid == (3, 1, 1)
    # the named arguments follow the positional ones in the function's order, without options
    assert args[0] is other[0]
    assert args[1:] == (OUT, 5, 32, 8, 16)


def descriptor(dtype: torch.dtype, *block: int) -> Any:
    return TensorDescriptor(torch.zeros(32, 32, dtype=dtype), [32, 32], [32, 1], list(block))


CHANGES: list[dict[Any, Any]] = [
    {0: BUFFER[1:9]},
    {0: X.half()},
    {0: None},
    *({0: descriptor(*x)} for x in ((torch.float32, 8, 16), (torch.float32, 16, 8), (torch.float16, 8, 16))),
    {2: 2**31},
    # Triton makes 1 a constant of the kernel
    *({3: value} for value in (33, 1, 2**40, 2.0, True)),
    *({name: value} for name, value in (("depth", 16), ("BLOCK", 32), ("num_warps", 8), ("num_stages", 2))),
]


def test_calls_that_triton_tells_apart_have_their_own_kernels(function: Function) -> None:
    calls = [(ARGUMENTS, NAMED)]
    for change in CHANGES:
        named = NAMED | {name: x for name, x in change.items() if isinstance(name, str)}
        calls.append((tuple(change.get(i, x) for i, x in enumerate(ARGUMENTS)), named))
    assert launch(function, *calls, *calls) == len(calls)
    assert [x[0] for x in function.launched] == function.compiled


@pytest.mark.parametrize(("position", "value"), [(2, 16), (2, 1), (2, 2**31 - 1), (2, -(2**31)), (3, 48)])
def test_calls_that_triton_does_not_tell_apart_share_a_kernel(function: Function, position: int, value: int) -> None:
    changed = (*ARGUMENTS[:position], value, *ARGUMENTS[position + 1 :])
    assert launch(function, (ARGUMENTS, NAMED), (changed, NAMED)) == 1
    assert function.launched[0][2][position] == value


def test_each_device_has_its_own_kernels(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = kernel.Kernel(function)
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda x, device=device: device)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {device: STREAM}.__getitem__)
        wrapped[(3,)](*ARGUMENTS, **NAMED)
    assert len(function.compiled) == 2
    assert [x[0] for x in function.launched] == function.compiled[:1]


HOOKS = ((None, True), (SimpleNamespace(calls=[]), True), (SimpleNamespace(calls=[print]), False), (print, False))
VERSIONS = ("3.6.0", True), ("3.7.1", True), ("3.5.1", False), ("3.9.0", False), ("4.0.0", False)


@pytest.mark.parametrize(
    ("owner", "name", "value", "reuses"),
    [
        *((kernel.knobs.runtime, f"launch_{when}_hook", *hook) for when in ("enter", "exit") for hook in HOOKS),
        *((kernel.triton, "__version__", *version) for version in VERSIONS),
    ],
)
def test_with_launch_hooks_or_untested_versions_triton_itself_launches_every_kernel(
    function: Function, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, reuses: bool
) -> None:
    monkeypatch.setattr(owner, name, value)
    assert launch(function, (ARGUMENTS, NAMED), (ARGUMENTS, NAMED)) == 2 - reuses
    assert len(function.launched) == reuses


def test_multiplications_and_additions_are_fused_in_every_version(function: Function) -> None:
    launch(function, (ARGUMENTS, NAMED))
    assert function.options == [{"num_warps": 4, "enable_fp_fusion": True}]


def test_a_call_compiles_a_missing_kernel_before_it_launches_later_ones(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped, counts, unaligned = kernel.Kernel(function), list[int](), (BUFFER[1:9], *ARGUMENTS[1:])
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(function, "warmup", lambda *_, **named: counts.append(len(function.compiled)), raising=False)

    @side_by_side
    def call() -> None:
        for args in (unaligned, ARGUMENTS):
            wrapped[(3,)](*args, **NAMED)

    wrapped[(3,)](*ARGUMENTS, **NAMED)
    call()
    # the launch compiles the missing kernel once more
    assert (counts, len(function.compiled), len(function.launched)) == ([0, 1, 1], 2, 1)
