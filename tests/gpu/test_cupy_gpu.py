"""The cupy backend on a GPU: what ``contrastile verify --backend cupy --device cuda`` cannot ask of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from capturing import bits, captured, comes_down_to, stepped, unit_features

import contrastile
from contrastile.backends import crossing
from contrastile.backends.contract import UnsupportedProblemError

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DTYPES = ("bfloat16", "float16", "float32")
B, D = 773, 88


def towers(dtype: str, b: int = B, d: int = D, seed: int = 0) -> tuple[Any, Any]:
    """Unit features on the GPU, of torch."""
    return tuple(unit_features(2, b, d, dtype, seed))


def as_cupy(x: Any) -> Any:
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    found = cupy.from_dlpack(bits)
    return found.view("bfloat16") if x.dtype == torch.bfloat16 else found


LOSSES: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "clip": (contrastile.clip_loss, (14.0,)),
    "info_nce": (contrastile.info_nce, (14.0,)),
    "nt_xent": (contrastile.nt_xent, (5.0,)),
    "sigmoid": (contrastile.sigmoid_loss, (10.0, -10.0)),
}


def leaves_of(image: Any, text: Any, numbers: tuple[float, ...]) -> list[Any]:
    leaves = [x.detach().clone().requires_grad_() for x in (image, text)]
    return leaves + [torch.tensor(x, device="cuda", requires_grad=True) for x in numbers]


def step(
    loss: Callable[..., Any], image: Any, text: Any, numbers: tuple[float, ...], backend: str, **how: Any
) -> list[Any]:
    """The loss and its gradients by torch's autograd."""
    return stepped(loss, leaves_of(image, text, numbers), backend=backend, **how)


def of_every_layout() -> list[Any]:
    x = torch.arange(7 * 5, dtype=torch.float32, device="cuda").reshape(7, 5)
    ids = torch.arange(11, device="cuda")
    return [x, x.T, x[1::2, ::3], x[3:], x[2], x[:1].expand(4, 5), x.half()[1:], x.double().T, ids, ids[5]]


@pytest.mark.parametrize("which", range(10))
def test_what_crosses_is_the_same_memory_both_ways(which: int) -> None:
    x = of_every_layout()[which]
    there = crossing.to_cupy(x, torch, cupy)
    assert np.array_equal(cupy.asnumpy(there), x.cpu().numpy())
    assert there.data.ptr == x.data_ptr()
    back = crossing.to_torch(there, torch, cupy)
    assert torch.equal(back, x)
    assert (back.data_ptr(), back.dtype, back.stride()) == (x.data_ptr(), x.dtype, x.stride())
    # autograd keeps account of views: a result is to be none
    assert back._base is None


def test_what_has_crossed_keeps_its_memory_alive() -> None:
    x = torch.ones(64, device="cuda")
    seen = weakref.ref(x)
    there = crossing.to_cupy(x, torch, cupy)
    del x
    gc.collect()
    assert seen() is not None
    back = crossing.to_torch(there, torch, cupy)
    del there
    gc.collect()
    assert torch.equal(back, torch.ones(64, device="cuda"))


def test_a_lazy_negative_crosses_as_its_values() -> None:
    negative = torch.tensor([1 + 2j, 3 - 4j], device="cuda").conj().imag
    assert negative.is_neg()
    assert cupy.asnumpy(crossing.to_cupy(negative, torch, cupy)).tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", ["the GPU's own", "sm80"])
def test_torch_tensors_and_cupy_arrays_give_the_same_bits(
    kernels: str, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "sm80":
        monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", kernels)
    loss, numbers = LOSSES[name]
    image, text = towers(dtype)
    by_torch = step(loss, image, text, numbers, "cupy")
    value, gradients = contrastile.value_and_grad(loss, backend="cupy")(as_cupy(image), as_cupy(text), *numbers)
    assert all(isinstance(x, cupy.ndarray) for x in (value, *gradients))
    assert str(gradients[0].dtype) == dtype
    assert bits(by_torch) == bits([value, *gradients])
    assert bits([loss(as_cupy(image), as_cupy(text), *numbers, backend="cupy")]) == bits([value])


def test_float32_goes_to_triton_in_parts() -> None:
    image, text = towers("float32")
    plain = contrastile.clip_loss(image, text, 14.0)
    assert bits([plain]) == bits([contrastile.clip_loss(image, text, 14.0, backend="triton", precision="split")])
    assert bits([plain]) != bits([contrastile.clip_loss(image, text, 14.0, backend="triton", precision="tf32")])
    with pytest.raises(UnsupportedProblemError, match="precision must be split or tf32 here, got ieee"):
        contrastile.clip_loss(image, text, 14.0, backend="triton", precision="ieee")


def test_cupy_arrays_go_through_a_torch_backend_too() -> None:
    image, text = towers("bfloat16")
    found = contrastile.value_and_grad(contrastile.clip_loss, backend="triton")(as_cupy(image), as_cupy(text), 14.0)
    exact = step(contrastile.clip_loss, image, text, (14.0,), "triton")
    assert bits([found[0], *found[1]]) == bits(exact)


@pytest.mark.parametrize(
    ("name", "dtype", "keep"),
    [
        *((name, dtype, 0) for name in ("clip", "sigmoid") for dtype in DTYPES),
        # exponentials of some rows are kept, or of all
        *(("clip", "bfloat16", mib) for mib in (1, 16)),
    ],
)
def test_a_step_can_be_captured_by_torch_and_replayed(
    name: str, dtype: str, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", str(keep))
    loss, numbers = LOSSES[name]
    image, text = towers(dtype, d=200)
    leaves = leaves_of(image, text, numbers)
    graph, found = captured(lambda: stepped(loss, leaves, backend="cupy"))
    other, another = towers(dtype, d=200, seed=1)
    with torch.no_grad():
        leaves[0].copy_(other)
        leaves[1].copy_(another)
    graph.replay()
    assert bits(found) == bits(step(loss, other, another, numbers, "cupy"))


@pytest.mark.parametrize("loss", [contrastile.clip_loss, contrastile.info_nce])
def test_a_large_step_keeps_by_itself_and_is_replayed_with_the_bits_of_a_launched_one(
    loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, text = towers("bfloat16", b=8192, d=512)

    def found(**how: Any) -> list[list[bytes]]:
        return [bits(step(loss, image, text, (100.0,), "cupy", **how)) for _ in range(4)]

    replayed, formed = found(), found(keep=0)
    monkeypatch.setenv("CONTRASTILE_GRAPHS", "0")
    assert replayed == found() == found(keep=512)
    # G is rounded twice
    assert formed == found(keep=0) != replayed


def test_what_is_kept_in_the_workspace_gives_way_to_the_other_rows() -> None:
    leaves = leaves_of(*towers("bfloat16", b=16384, d=512), (100.0,))

    def twice(**how: Any) -> tuple[list[Any], int]:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = contrastile.clip_loss(*leaves, backend="cupy", workspace=128, **how)
        found = [torch.autograd.grad(value, leaves, retain_graph=True) for _ in range(2)]
        return found, torch.cuda.max_memory_allocated() - before

    (first, second), most = twice()
    (formed, again), usual = twice(keep=0)
    assert bits(formed) == bits(again)
    assert bits(first) != bits(second)
    assert most <= usual * 1.01
    for found in (first, second):
        assert all((x - y).norm() <= 2.0**-7 * y.norm() for x, y in zip(found, formed, strict=True))


def test_a_step_can_be_captured_by_cupy_and_replayed() -> None:
    image, text = (as_cupy(x).copy() for x in towers("bfloat16"))
    scale = cupy.asarray(14.0, dtype="float32")
    both = contrastile.value_and_grad(contrastile.clip_loss, backend="cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        both(image, text, scale)
        both(image, text, scale)
        stream.begin_capture()
        value, gradients = both(image, text, scale)
        graph = stream.end_capture()
        other, another = (as_cupy(x) for x in towers("bfloat16", seed=1))
        stream.synchronize()
        image[...], text[...] = other, another
        graph.launch(stream)
        stream.synchronize()
        expected = both(image, text, scale)
        stream.synchronize()
    assert bits([value, *gradients]) == bits([expected[0], *expected[1]])


def test_nothing_waits_for_the_device() -> None:
    image, text = towers("bfloat16", 4096, 512)
    leaves = leaves_of(image, text, (14.0,))
    stepped(contrastile.clip_loss, leaves, backend="cupy")
    busy = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(40):
            busy @ busy
        stepped(contrastile.clip_loss, leaves, backend="cupy")
        event = torch.cuda.Event()
        event.record()
        # the products before it still run
        assert not event.query()
    torch.cuda.synchronize()


def test_the_caller_s_stream_is_the_one_that_is_used() -> None:
    image, text = towers("bfloat16", 2048, 512)
    expected = bits(step(contrastile.clip_loss, image, text, (14.0,), "cupy"))
    busy = torch.ones(4096, 4096, device="cuda")
    late = torch.zeros_like(image)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            busy @ busy
        late.copy_(image)
        found = step(contrastile.clip_loss, late, text, (14.0,), "cupy")
    side.synchronize()
    assert bits(found) == expected


@pytest.mark.parametrize("keep", [0, 16])
def test_torch_tensors_take_no_memory_from_cupy_s_pool(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", str(keep))
    # what graphs hold is not what is asked here
    monkeypatch.setenv("CONTRASTILE_GRAPHS", "0")
    pool = cupy.get_default_memory_pool()
    image, text = towers("bfloat16", 2048, 512)
    step(contrastile.clip_loss, image, text, (14.0,), "cupy")
    gc.collect()  # what an earlier test's traceback holds on to may go at any time
    before, live = pool.total_bytes(), torch.cuda.memory_allocated()
    found = step(contrastile.clip_loss, image, text, (14.0,), "cupy")
    assert pool.total_bytes() == before
    assert torch.cuda.memory_allocated() > live
    del found
    assert comes_down_to(live)


def test_any_device_may_hold_the_features() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    image, text = towers("bfloat16")
    expected = bits(step(contrastile.clip_loss, image, text, (14.0,), "cupy"))
    with cupy.cuda.Device(1):
        there = [as_cupy(x.to("cuda:1")) for x in (image, text)]
    value, gradients = contrastile.value_and_grad(contrastile.clip_loss, backend="cupy")(*there, 14.0)
    assert gradients[0].device.id == value.device.id == 1
    with cupy.cuda.Device(1):
        assert bits([value, *gradients]) == expected[:4]


ALONE = """
import sys
sys.modules["torch"] = None
import cupy, numpy as np
import contrastile
random = np.random.default_rng(0)
image, text = (cupy.asarray(random.standard_normal((67, 40)), dtype="bfloat16") for _ in range(2))
value, gradients = contrastile.value_and_grad(contrastile.clip_loss)(image, text, 0.5)
loss = contrastile.clip_loss(image, text, 0.5)
assert float(loss) == float(value), (loss, value)
assert [x.shape for x in gradients] == [(67, 40), (67, 40), ()]
assert not [name for name in sys.modules if name.startswith("torch.")]
print("fine")
"""


FIRST = """
import torch, contrastile
memory = torch.empty(2**32, dtype=torch.uint8, device="cuda")
image, text = (torch.eye(8192, 512, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
# the backward pass finds memory that torch has: it is the first to need a context in its thread
del memory
contrastile.clip_loss(image, text, 100.0, backend="cupy").backward()
print("fine")
"""


@pytest.mark.parametrize("program", [ALONE, FIRST], ids=["without torch", "backward first"])
def test_a_process_begins_with_any_call(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout == "fine\n", done.stderr


def test_features_that_cupy_cannot_take_are_refused_with_the_reason() -> None:
    image = cupy.ones((4, 3), dtype="float64")
    with pytest.raises(ValueError, match="got float64; convert them"):
        contrastile.clip_loss(image, image, 1.0)
