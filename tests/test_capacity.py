"""``contrastile plan``: the memory that it predicts for a step is the memory that a step takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contrastile
from contrastile import capacity, cli, training
from contrastile.backends import registry
from contrastile.backends.contract import Backend, Options
from contrastile.backends.cupy import configs
from contrastile.backends.registry import load
from contrastile.bench.sweep import peak_extra
from contrastile.capacity import Setup, loss_items, offloaded_items, total
from contrastile.comm.inprocess import InProcess, InProcessGroup

RESULTS = Path(__file__).parent.parent / "docs" / "results"
RECORDS = ("gpu_nvidia_h100_80gb_hbm3.json", "gpu_nvidia_h200_x4.json")
TOLERANCE = 0.1
"""The relative error that the command promises."""


def features(b: int, d: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(b, d, device=device).to(dtype).requires_grad_() for _ in range(2)]


def step(pair: list[Tensor], **options: Any) -> Any:
    leaves = [*pair, torch.tensor(0.1, requires_grad=True)]
    value = contrastile.clip_loss(*leaves, **options)
    return value, torch.autograd.grad(value, leaves)


def is_close(predicted: float, measured: float) -> bool:
    return abs(predicted / measured - 1) <= TOLERANCE


@pytest.mark.parametrize(
    ("b", "d", "dtype"),
    [(1024, 512, "float32"), (1100, 256, "bfloat16"), (1500, 100, "float64")],
)
def test_the_loss_on_a_cpu(b: int, d: int, dtype: str) -> None:
    pair = features(b, d, getattr(torch, dtype))
    step(pair)
    setup = Setup(batch=b, dim=d, dtype=dtype, device="cpu")
    assert is_close(total(loss_items(setup, load("torch"), "local")), peak_extra(lambda: step(pair), "torch", "cpu"))


def test_the_whole_loss_on_every_rank() -> None:
    counts, d = (1000, 500), 256
    # a message between ranks of one process is a copy, which exists until the other rank takes it
    copies = 2 * counts[0] * d * 4

    def program(comm: InProcess) -> tuple[int, int]:
        pair = features(counts[comm.rank], d, torch.float32)
        options: dict[str, Any] = {"group": comm, "exchange": "replicate", "backend": "torch"}
        _, (gradient, *_) = step(pair, **options)
        measured = comm.rank == 0
        peak = peak_extra(lambda: step(pair, **options), "torch", "cpu") if measured else len(step(pair, **options))
        return peak, gradient.untyped_storage().nbytes()

    ((peak, kept_bytes), _) = InProcessGroup[tuple[int, int]](len(counts)).run(program)
    setup = Setup(batch=sum(counts), dim=d, gpus=len(counts), dtype="float32", device="cpu")
    assert is_close(total(loss_items(setup, load("torch"), "replicate")) + copies, peak)
    # a cached step keeps the gradients of all ranks for its second pass
    assert kept_bytes == sum(counts) * d * 4


def test_features_on_the_host() -> None:
    b, d, block, dtype = 600, 256, 256, torch.bfloat16
    pair = features(b, d, dtype)
    step(pair, block=block)
    # on a CPU the arrays on the host count too: both gradients, and the sums of the columns
    host_bytes = 2 * b * d * 2 + b * d * 4
    setup = Setup(batch=b, dim=d, dtype="bfloat16", device="cpu")
    predicted = total(offloaded_items(setup, load("torch"), block))
    assert is_close(predicted + host_bytes, peak_extra(lambda: step(pair, block=block), "torch", "cpu"))


def test_a_cached_step() -> None:
    b, d, chunk = 1024, 128, 128
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 1024), nn.Tanh(), nn.Linear(1024, d))
    inputs = [torch.randn(b, 16) for _ in range(2)]
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def peak_bytes(rows: int) -> int:
        return peak_extra(lambda: net(inputs[0][:rows]).sum().backward(), "torch", "cpu")

    sample_bytes = (peak_bytes(2 * chunk) - peak_bytes(chunk)) / chunk
    # embeddings and gradients, and the activations of 1.5 chunks
    memory = (4 * b * d * 4 + 1.5 * chunk * sample_bytes) / capacity.PLANNED
    setup = Setup(b, d, 1, "float32", sample_bytes / 2**20, memory_gib=memory / 2**30, device="cpu")
    cached = capacity.capacity(setup).ways[1]
    assert cached.chunk == chunk

    def run_cached_step() -> Any:
        return training.cached_step((net, net), tuple(inputs), contrastile.clip_loss, scale=1.0, chunk=chunk)

    run_cached_step()
    assert is_close(cached.bytes, peak_extra(run_cached_step, "torch", "cpu"))


def backend_of(name: str) -> Backend:
    """A backend; cupy needs a GPU to be loaded, so torch with cupy's footprint takes its place."""
    if name != "cupy":
        return load(name)

    def footprint(m: int, n: int, width: int, dtype: str, device: str, options: Options) -> Any:
        return configs.footprint(m, n, width, dtype, 90, options)

    return replace(load("torch"), name="cupy", finished=lambda *_: None, footprint=footprint)  # type: ignore[arg-type,return-value]


def recorded_peaks() -> list[tuple[str, int, str, int, int, int]]:
    """Recorded peaks of large problems: backend, ranks, exchange, batch, width, bytes. Small problems run in graphs."""
    peaks = {}
    for name in RECORDS:
        for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))["times"]:
            backend = row["name"].removeprefix("contrastile ")
            is_large = row.get("peak_bytes") and row["what"] == "both" and row["b"] // row["n"] >= 16384
            # an older schedule made the records of gather
            if is_large and backend in ("torch", "triton", "cupy") and row["exchange"] in ("local", "ring"):
                peaks[backend, row["n"], row["exchange"], row["b"], row["d"]] = row["peak_bytes"]
    return [(*key, peak) for key, peak in peaks.items()]


@pytest.mark.parametrize(("name", "n", "exchange", "b", "d", "peak"), recorded_peaks())
def test_the_loss_on_recorded_gpus(name: str, n: int, exchange: str, b: int, d: int, peak: int) -> None:
    setup = Setup(batch=b, dim=d, gpus=n, dtype="bfloat16")
    assert is_close(total(loss_items(setup, backend_of(name), exchange)), peak)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["torch", "triton", "cupy"])
def test_the_loss_on_a_gpu(name: str) -> None:
    if registry.available()[name] is not None:
        pytest.skip(f"{name} is not here")
    for b, d, dtype in ((32768, 512, "bfloat16"), (40000, 384, "float32"), (65536, 256, "float16")):
        pair = features(b, d, getattr(torch, dtype), "cuda")
        step(pair, backend=name)
        setup = Setup(batch=b, dim=d, dtype=dtype)
        measured = peak_extra(lambda pair=pair: step(pair, backend=name), "torch", "cuda")  # type: ignore[misc]
        assert is_close(total(loss_items(setup, load(name), "local")), measured), (b, d, dtype)


def run_plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["plan", "--backend", "torch", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_items_of_each_way_add_up_and_the_output_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """contrastile/verify/calls.txt tests which way is chosen and how the output words it."""
    words = ("--batch", "65536", "--dim", "512", "--encoder-mib-per-sample", "10", "--json", str(tmp_path / "x"))
    code, output = run_plan(capsys, *words, "--memory-gib", "80", "--gpus", "64", "--per-host", "8", "--host-ms", "0")
    assert (code, "600 TFLOP/s" in output, max(map(len, output.splitlines())) <= 80) == (0, True, True)
    document = json.loads((tmp_path / "x").read_text(encoding="utf-8"))
    assert all(way["bytes"] == sum(item["bytes"] for item in way["items"]) for way in document["ways"])


def test_the_default_memory_is_that_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run_plan(capsys, "--batch", "9", "--dim", "5", "--device", "cpu")
    assert code == 0
    if not torch.cuda.is_available():
        code, output = run_plan(capsys, "--batch", "9", "--dim", "5")
        assert (code, "give --memory-gib" in output) == (2, True)
