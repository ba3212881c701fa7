"""Micro-batch streaming is exact, where the paper's printed normalisation is not (MBS Eq. 14)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from chunked_graphs import gamma, taken
from torch import Tensor, nn

import contrastile
from contrastile import training
from contrastile.oracle.papers import mbs, mbs_as_printed
from contrastile.training import chunks
from contrastile.training.stream import Loaded

N, MU = 17, 16
DOUBLE = torch.float64


def setting() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False, dtype=DOUBLE), torch.randn(N, 3, dtype=DOUBLE), torch.randn(N, 1, dtype=DOUBLE)


def losses(net: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(x), y)


@pytest.mark.parametrize("size", [MU, 1, 5, 17, 40])
def test_weighted_chunks_have_the_batch_s_gradient_and_printed_ones_have_not(size: int) -> None:
    net, x, y = setting()
    value = losses(net, x, y)
    value.backward()
    (whole,) = taken([net.weight])
    total = torch.zeros((), dtype=DOUBLE)
    for (a, b), weight in training.stream((x, y), size, "cpu"):
        part = weight * losses(net, a, b)
        part.backward()
        total += part.detach()
    (found,) = taken([net.weight])
    # per sample: product, residual, square's derivative, mean, weight; then a sum over the samples in any order
    each = 2 * (net(x) - y).detach().abs() * x.abs() / N
    size_of_residual = (x.abs() @ net.weight.detach().abs().T + y.abs()) * x.abs() * 2 / N
    bound = gamma(N + 6, DOUBLE) * each.sum(dim=0) + gamma(6, DOUBLE) * size_of_residual.sum(dim=0)
    assert ((found - whole).abs() <= 2 * bound).all()
    squares = (net(x) - y).detach() ** 2
    # each residual is 4 roundings of its magnitudes, squared and summed
    slip = 2 * gamma(4, DOUBLE) * (x.abs() @ net.weight.detach().abs().T + y.abs()) * squares.sqrt()
    assert (total - value).abs() <= 2 * (gamma(N + 6, DOUBLE) * squares.sum() + slip.sum() * 2) / N
    for a, b in zip(x.split(size), y.split(size), strict=True):
        (losses(net, a, b) / len(x.split(size))).backward()
    (printed,) = taken([net.weight])
    if size < N and N % size:
        assert ((printed - whole).abs() > 1000 * bound).all()


def test_it_is_the_oracle_s_algorithm_1() -> None:
    net, x, y = setting()

    def loss_and_gradient(rows: Any) -> tuple[float, Any]:
        value = losses(net, x[rows], y[rows])
        (gradient,) = torch.autograd.grad(value, [net.weight])
        return value.item(), gradient.numpy().ravel()

    loss, gradient = mbs.algorithm_1(loss_and_gradient, N, MU)
    sums, total = torch.zeros(3, dtype=DOUBLE), 0.0
    for (a, b), weight in training.stream((x, y), MU, "cpu"):
        value = losses(net, a, b)
        (part,) = torch.autograd.grad(value, [net.weight])
        sums += weight * part.ravel()
        total += weight * value.item()
    assert total == loss
    assert (sums.numpy() == gradient).all()
    printed = mbs_as_printed.algorithm_1(loss_and_gradient, N, MU)[0]
    assert abs(printed - loss) > 1000 * gamma(4 * N, DOUBLE) * loss


def test_weights_are_the_shares_of_the_samples() -> None:
    stream = training.stream(torch.arange(N), MU, "cpu")
    assert len(stream) == 2
    for _ in range(2):  # it may be iterated again
        parts = list(stream)
        assert [weight for _, weight in parts] == [16 / 17, 1 / 17]
        assert torch.equal(torch.cat([x for x, _ in parts]), torch.arange(N))
    # of all ranks' samples, for DDP's mean
    assert [weight for _, weight in training.stream(torch.arange(N), MU, "cpu", total=8.5)] == [16 / 8.5, 1 / 8.5]
    assert [(x.shape, weight) for x, weight in training.stream(torch.ones(0, 3), MU, "cpu")] == [((0, 3), 0.0)]


def test_a_stream_feeds_both_passes_of_the_gradient_cache() -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(3, 5, dtype=DOUBLE) for _ in range(2)]
    inputs = [torch.randn(N, 3, dtype=DOUBLE), {"x": torch.randn(N, 3, dtype=DOUBLE)}]
    encoders = nets[0], (lambda batch: nets[1](batch["x"]))
    parameters = [p for net in nets for p in net.parameters()]
    value = training.cached_step(encoders, tuple(inputs), contrastile.clip_loss, scale=2.0, chunk=5)
    expected = taken(parameters)
    streams = tuple(training.stream(x, 5, "cpu") for x in inputs)
    for chunk in (None, 5):
        found = training.cached_step(encoders, streams, contrastile.clip_loss, scale=2.0, chunk=chunk)
        assert torch.equal(found, value)
        assert all(torch.equal(x, y) for x, y in zip(taken(parameters), expected, strict=True))
    mixed = streams[0], inputs[1]
    assert torch.equal(training.cached_step(encoders, mixed, contrastile.clip_loss, scale=2.0, chunk=5), value)


def test_a_budget_of_tokens() -> None:
    batch = {"ids": torch.zeros(10, 7, dtype=torch.int64), "length": torch.ones(10)}
    cut = [len(chunk["ids"]) for chunk, _ in training.stream(batch, training.Budget(30), "cpu")]
    assert cut == [4, 4, 2]
    # no budget is too small for one sample
    assert len(training.stream(batch, training.Budget(3), "cpu")) == 10
    assert chunks.Sliced(torch.ones(5), training.Budget(2)).count == 3


def test_chunks_are_views_and_keep_their_types() -> None:
    class Encoding(dict[str, Any]):
        pass

    x = torch.arange(6)
    batch = Encoding(a=x, b=(x, [x]), flag=True, name="n", none=None, number=torch.tensor(3.0))
    first, second = chunks.Sliced(batch, 4)
    assert type(first) is Encoding
    assert type(first["b"]) is tuple
    assert type(first["b"][1]) is list
    assert first["a"].data_ptr() == x.data_ptr()
    assert second["b"][1][0].tolist() == [4, 5]
    assert (second["flag"], second["name"], second["none"], second["number"]) == (True, "n", None, batch["number"])


class Timeline:
    """CUDA's streams and events as far as streaming uses them, in the order of their use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.events = 0
        empty = torch.empty

        def unpinned(*shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
            assert pin_memory
            self.log.append("pin")
            return empty(*shape, **settings)

        monkeypatch.setattr(torch, "empty", unpinned)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.log.append("hold"))

    def record_event(self) -> Any:
        number, self.events = self.events, self.events + 1
        self.log.append(f"send {number}")

        class Event:
            name = number

            def synchronize(event) -> None:  # noqa: N805
                self.log.append(f"sent {event.name}")

        return Event()

    def wait_event(self, event: Any) -> None:
        self.log.append(f"wait {event.name}")


def test_chunks_are_copied_one_ahead_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch)
    x = torch.arange(14)
    # the copy to "the device" copies, as one between devices does
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: x.clone())
    loaded = Loaded({"x": x}, 4, torch.device("cpu"))
    seen = []
    for chunk in loaded._ahead():
        seen.append(chunk["x"])
        timeline.log.append("work")
    assert [part.tolist() for part in seen] == [part.tolist() for part in x.split(4)]
    assert timeline.log == [
        *["pin", "send 0", "pin", "send 1", "wait 0", "hold", "work"],
        # a buffer is written again once its copy is done, and the work of a chunk waits for its own copy alone
        *["sent 0", "send 2", "wait 1", "hold", "work"],
        *["sent 1", "send 3", "wait 2", "hold", "work"],
        *["wait 3", "hold", "work"],
    ]
