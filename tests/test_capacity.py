"""``contrastile plan``: what it says a step takes is what a step takes."""

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
WITHIN = 0.1
"""What the command promises."""


def features(b: int, d: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(b, d, device=device).to(dtype).requires_grad_() for _ in range(2)]


def step(pair: list[Tensor], **how: Any) -> Any:
    leaves = [*pair, torch.tensor(0.1, requires_grad=True)]
    value = contrastile.clip_loss(*leaves, **how)
    return value, torch.autograd.grad(value, leaves)


def close(said: float, measured: float) -> bool:
    return abs(said / measured - 1) <= WITHIN


@pytest.mark.parametrize(
    ("b", "d", "dtype"),
    [(1024, 512, "float32"), (1100, 256, "bfloat16"), (1500, 100, "float64")],
)
def test_the_loss_on_a_cpu(b: int, d: int, dtype: str) -> None:
    pair = features(b, d, getattr(torch, dtype))
    step(pair)
    setup = Setup(batch=b, dim=d, dtype=dtype, device="cpu")
    assert close(total(loss_items(setup, load("torch"), "local")), peak_extra(lambda: step(pair), "torch", "cpu"))


def test_the_whole_loss_on_every_rank() -> None:
    counts, d = (1000, 500), 256
    # a message of this process is a copy, which lies until the other rank takes it
    copies = 2 * counts[0] * d * 4

    def program(comm: InProcess) -> tuple[int, int]:
        pair = features(counts[comm.rank], d, torch.float32)
        how: dict[str, Any] = {"group": comm, "exchange": "replicate", "backend": "torch"}
        _, (gradient, *_) = step(pair, **how)
        peak = peak_extra(lambda: step(pair, **how), "torch", "cpu") if comm.rank == 0 else len(step(pair, **how))
        return peak, gradient.untyped_storage().nbytes()

    ((peak, held), _) = InProcessGroup[tuple[int, int]](len(counts)).run(program)
    setup = Setup(batch=sum(counts), dim=d, gpus=len(counts), dtype="float32", device="cpu")
    assert close(total(loss_items(setup, load("torch"), "replicate")) + copies, peak)
    # what a cached step keeps of them for the second pass
    assert held == sum(counts) * d * 4


def test_features_on_the_host() -> None:
    b, d, block, dtype = 600, 256, 256, torch.bfloat16
    pair = features(b, d, dtype)
    step(pair, block=block)
    # on a CPU what is kept at home counts too: both gradients, and the columns' sums
    home = 2 * b * d * 2 + b * d * 4
    setup = Setup(batch=b, dim=d, dtype="bfloat16", device="cpu")
    said = total(offloaded_items(setup, load("torch"), block))
    assert close(said + home, peak_extra(lambda: step(pair, block=block), "torch", "cpu"))


def test_a_cached_step() -> None:
    b, d, chunk = 1024, 128, 128
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 1024), nn.Tanh(), nn.Linear(1024, d))
    inputs = [torch.randn(b, 16) for _ in range(2)]
    for p in net.parameters():
        p.grad = torch.zeros_like(p)

    def alone(rows: int) -> int:
        return peak_extra(lambda: net(inputs[0][:rows]).sum().backward(), "torch", "cpu")

    sample = (alone(2 * chunk) - alone(chunk)) / chunk
    # embeddings and gradients, and the activations of somewhat more than a chunk
    memory = (4 * b * d * 4 + 1.5 * chunk * sample) / capacity.PLANNED
    setup = Setup(b, d, 1, "float32", sample / 2**20, memory_gib=memory / 2**30, device="cpu")
    cached = capacity.capacity(setup).ways[1]
    assert cached.chunk == chunk

    def measured() -> Any:
        return training.cached_step((net, net), tuple(inputs), contrastile.clip_loss, scale=1.0, chunk=chunk)

    measured()
    assert close(cached.bytes, peak_extra(measured, "torch", "cpu"))


def backend_of(name: str) -> Backend:
    """A backend's record; of cupy, which needs a GPU to be loaded, what is asked of it here."""
    if name != "cupy":
        return load(name)

    def footprint(m: int, n: int, width: int, dtype: str, device: str, options: Options) -> Any:
        return configs.footprint(m, n, width, dtype, 90, options)

    return replace(load("torch"), name="cupy", finished=lambda *_: None, footprint=footprint)  # type: ignore[arg-type,return-value]


def recorded() -> list[tuple[str, int, str, int, int, int]]:
    """Peaks on GPUs: backend, ranks, exchange, batch, width, bytes. Those of small problems, in graphs, are others."""
    found = {}
    for name in RECORDS:
        for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))["times"]:
            backend = row["name"].removeprefix("contrastile ")
            large = row.get("peak_bytes") and row["what"] == "both" and row["b"] // row["n"] >= 16384
            # the records of a gather are of an older schedule
            if large and backend in ("torch", "triton", "cupy") and row["exchange"] in ("local", "ring"):
                found[backend, row["n"], row["exchange"], row["b"], row["d"]] = row["peak_bytes"]
    return [(*key, peak) for key, peak in found.items()]


@pytest.mark.parametrize(("name", "n", "exchange", "b", "d", "peak"), recorded())
def test_the_loss_on_recorded_gpus(name: str, n: int, exchange: str, b: int, d: int, peak: int) -> None:
    setup = Setup(batch=b, dim=d, gpus=n, dtype="bfloat16")
    assert close(total(loss_items(setup, backend_of(name), exchange)), peak)


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
        assert close(total(loss_items(setup, load(name), "local")), measured), (b, d, dtype)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["plan", "--backend", "torch", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_what_is_written_adds_up_and_what_is_said_is_no_wider_than_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Which way is taken, and in which words: contrastile/verify/calls.txt."""
    given = ("--batch", "65536", "--dim", "512", "--encoder-mib-per-sample", "10", "--json", str(tmp_path / "x"))
    code, said = asked(capsys, *given, "--memory-gib", "80", "--gpus", "64", "--per-host", "8", "--host-ms", "0")
    assert (code, "600 TFLOP/s" in said, max(map(len, said.splitlines())) <= 80) == (0, True, True)
    found = json.loads((tmp_path / "x").read_text(encoding="utf-8"))
    assert all(way["bytes"] == sum(x["bytes"] for x in way["items"]) for way in found["ways"])


def test_the_memory_is_that_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = asked(capsys, "--batch", "9", "--dim", "5", "--device", "cpu")
    assert code == 0
    if not torch.cuda.is_available():
        code, text = asked(capsys, "--batch", "9", "--dim", "5")
        assert (code, "give --memory-gib" in text) == (2, True)
