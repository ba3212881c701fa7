"""The vectors of eager calls: made once for a stream of a GPU, and anew wherever that would not last."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from contrastile.backends import eager, vectors
from contrastile.backends.arrays import TorchArrays, library_of

ARRAYS = library_of(torch.zeros(0))


class OnGpu:
    """Torch as it is on a GPU, as far as it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing = 7, False
        monkeypatch.setattr(vectors, "_made", {})
        monkeypatch.setattr(eager, "_known", {})
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream, raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    return OnGpu(monkeypatch)


def made(weight: float = 0.25, start: int = 2, stop: int = 5, dtype: str = "float32") -> tuple[Any, Any, Any]:
    return vectors.pairs(ARRAYS, weight, start, stop, dtype, torch.zeros(3))


def test_they_are_weights_targets_and_positives() -> None:
    weight, target, positives = made()
    assert weight.tolist() == [0.25] * 3
    assert target.tolist() == [1.0] * 3
    assert positives.tolist() == [2, 3, 4]
    assert weight.dtype == target.dtype == torch.float32
    assert positives.dtype == torch.int64


def test_a_host_shares_short_ones_and_knows_their_values() -> None:
    first = made(1 / 3)
    assert all(a is b for a, b in zip(first, made(1 / 3), strict=True))
    # the weight as its dtype has it
    assert [eager.first(x) for x in first] == [first[0][0].item(), 1.0, 2.0]
    assert eager.first(torch.ones(3)) is None
    long = made(stop=3 + vectors.HOST_ROWS)
    assert not any(map(eager.constant, long))
    assert [eager.first(x) for x in made(stop=2)] == [None] * 3


def test_threads_that_ask_at_once_leave_no_vector_known_that_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_made", {})
    monkeypatch.setattr(eager, "_known", {})

    class Slow(TorchArrays):
        def full(self, *given: Any) -> Any:
            # the other thread goes on
            time.sleep(0.01)
            return super().full(*given)

    def ask() -> None:
        vectors.pairs(Slow(torch), 0.25, 2, 5, "float32", torch.zeros(3))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(eager._known) == {id(x) for each in vectors._made.values() for x in each}


@pytest.mark.usefixtures("gpu")
def test_the_same_call_has_the_same_vectors_and_others_have_others() -> None:
    first = made()
    assert all(a is b for a, b in zip(first, made(), strict=True))
    assert all(map(eager.constant, first))
    for other in (made(0.5), made(start=1, stop=4), made(stop=6), made(dtype="float64")):
        assert not any(a is b for a, b in zip(first, other, strict=True))


def test_another_stream_has_its_own(gpu: OnGpu) -> None:
    first = made()
    gpu.stream = 8
    assert made()[0] is not first[0]
    gpu.stream = 7
    assert made()[0] is first[0]


@pytest.mark.parametrize("why", ["captured", "inference", "subclass", "no number of a stream"])
def test_what_would_not_last_is_made_anew(why: str, gpu: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.capturing = why == "captured"
    if why == "no number of a stream":
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")

    class Other(torch.Tensor):
        pass

    like = torch.zeros(3).as_subclass(Other) if why == "subclass" else torch.zeros(3)
    with torch.inference_mode(why == "inference"):
        found = [vectors.pairs(ARRAYS, 0.25, 2, 5, "float32", like)[0] for _ in range(2)]
    assert found[0] is not found[1]
    assert not vectors._made


@pytest.mark.usefixtures("gpu")
def test_only_so_many_are_held() -> None:
    first = made()
    for stop in range(6, 6 + vectors.MOST):
        made(stop=stop)
    assert len(vectors._made) == vectors.MOST
    assert not any(map(eager.constant, first))
    assert len(eager._known) == 3 * vectors.MOST
