"""The cupy backend on a GPU, where ``contrastile verify --backend cupy --device cuda`` has no check."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from capturing import bits, capture, falls_to, unit_features, value_and_gradients

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
    """Torch matrices of unit features on the GPU."""
    return tuple(unit_features(2, b, d, dtype, seed))


def as_cupy(x: Any) -> Any:
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    array = cupy.from_dlpack(bits)
    return array.view("bfloat16") if x.dtype == torch.bfloat16 else array


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
    loss: Callable[..., Any], image: Any, text: Any, numbers: tuple[float, ...], backend: str, **options: Any
) -> list[Any]:
    """The loss and its gradients, with torch's autograd."""
    return value_and_gradients(loss, leaves_of(image, text, numbers), backend=backend, **options)


def tensors_of_every_layout() -> list[Any]:
    x = torch.arange(7 * 5, dtype=torch.float32, device="cuda").reshape(7, 5)
    ids = torch.arange(11, device="cuda")
    return [x, x.T, x[1::2, ::3], x[3:], x[2], x[:1].expand(4, 5), x.half()[1:], x.double().T, ids, ids[5]]


@pytest.mark.parametrize("index", range(10))
def test_conversions_share_memory_in_both_directions(index: int) -> None:
    x = tensors_of_every_layout()[index]
    converted = crossing.to_cupy(x, torch, cupy)
    assert np.array_equal(cupy.asnumpy(converted), x.cpu().numpy())
    assert converted.data.ptr == x.data_ptr()
    restored = crossing.to_torch(converted, torch, cupy)
    assert torch.equal(restored, x)
    assert (restored.data_ptr(), restored.dtype, restored.stride()) == (x.data_ptr(), x.dtype, x.stride())
    # autograd tracks views, so a result must not be one
    assert restored._base is None


def test_a_converted_array_keeps_its_memory_alive() -> None:
    x = torch.ones(64, device="cuda")
    reference = weakref.ref(x)
    converted = crossing.to_cupy(x, torch, cupy)
    del x
    gc.collect()
    assert reference() is not None
    restored = crossing.to_torch(converted, torch, cupy)
    del converted
    gc.collect()
    assert torch.equal(restored, torch.ones(64, device="cuda"))


def test_a_lazy_negative_is_converted_to_its_values() -> None:
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
    torch_results = step(loss, image, text, numbers, "cupy")
    value, gradients = contrastile.value_and_grad(loss, backend="cupy")(as_cupy(image), as_cupy(text), *numbers)
    assert all(isinstance(x, cupy.ndarray) for x in (value, *gradients))
    assert str(gradients[0].dtype) == dtype
    assert bits(torch_results) == bits([value, *gradients])
    assert bits([loss(as_cupy(image), as_cupy(text), *numbers, backend="cupy")]) == bits([value])


def test_triton_splits_float32_into_parts() -> None:
    image, text = towers("float32")
    loss = contrastile.clip_loss(image, text, 14.0)
    assert bits([loss]) == bits([contrastile.clip_loss(image, text, 14.0, backend="triton", precision="split")])
    assert bits([loss]) != bits([contrastile.clip_loss(image, text, 14.0, backend="triton", precision="tf32")])
    with pytest.raises(UnsupportedProblemError, match="precision must be split or tf32 here, got ieee"):
        contrastile.clip_loss(image, text, 14.0, backend="triton", precision="ieee")


def test_a_torch_backend_takes_cupy_arrays() -> None:
    image, text = towers("bfloat16")
    results = contrastile.value_and_grad(contrastile.clip_loss, backend="triton")(as_cupy(image), as_cupy(text), 14.0)
    expected = step(contrastile.clip_loss, image, text, (14.0,), "triton")
    assert bits([results[0], *results[1]]) == bits(expected)


@pytest.mark.parametrize(
    ("name", "dtype", "keep"),
    [
        *((name, dtype, 0) for name in ("clip", "sigmoid") for dtype in DTYPES),
        # the backend keeps the exponentials of some rows, or of all rows
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
    graph, outputs = capture(lambda: value_and_gradients(loss, leaves, backend="cupy"))
    new_image, new_text = towers(dtype, d=200, seed=1)
    with torch.no_grad():
        leaves[0].copy_(new_image)
        leaves[1].copy_(new_text)
    graph.replay()
    assert bits(outputs) == bits(step(loss, new_image, new_text, numbers, "cupy"))


@pytest.mark.parametrize("loss", [contrastile.clip_loss, contrastile.info_nce])
def test_a_large_step_keeps_by_itself_and_is_replayed_with_the_bits_of_a_launched_one(
    loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, text = towers("bfloat16", b=8192, d=512)

    def run_four_times(**options: Any) -> list[list[bytes]]:
        return [bits(step(loss, image, text, (100.0,), "cupy", **options)) for _ in range(4)]

    replayed, recomputed = run_four_times(), run_four_times(keep=0)
    monkeypatch.setenv("CONTRASTILE_GRAPHS", "0")
    assert replayed == run_four_times() == run_four_times(keep=512)
    # with kept exponentials G is rounded twice
    assert recomputed == run_four_times(keep=0) != replayed


def test_exponentials_kept_in_the_workspace_make_way_for_other_rows() -> None:
    leaves = leaves_of(*towers("bfloat16", b=16384, d=512), (100.0,))

    def differentiate_twice(**options: Any) -> tuple[list[Any], int]:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = contrastile.clip_loss(*leaves, backend="cupy", workspace=128, **options)
        gradients = [torch.autograd.grad(value, leaves, retain_graph=True) for _ in range(2)]
        return gradients, torch.cuda.max_memory_allocated() - before

    (first, second), peak = differentiate_twice()
    (recomputed, recomputed_again), usual_peak = differentiate_twice(keep=0)
    assert bits(recomputed) == bits(recomputed_again)
    assert bits(first) != bits(second)
    assert peak <= usual_peak * 1.01
    for gradients in (first, second):
        assert all((x - y).norm() <= 2.0**-7 * y.norm() for x, y in zip(gradients, recomputed, strict=True))


def test_a_step_can_be_captured_by_cupy_and_replayed() -> None:
    image, text = (as_cupy(x).copy() for x in towers("bfloat16"))
    scale = cupy.asarray(14.0, dtype="float32")
    value_and_grad = contrastile.value_and_grad(contrastile.clip_loss, backend="cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        value_and_grad(image, text, scale)
        value_and_grad(image, text, scale)
        stream.begin_capture()
        value, gradients = value_and_grad(image, text, scale)
        graph = stream.end_capture()
        new_image, new_text = (as_cupy(x) for x in towers("bfloat16", seed=1))
        stream.synchronize()
        image[...], text[...] = new_image, new_text
        graph.launch(stream)
        stream.synchronize()
        expected = value_and_grad(image, text, scale)
        stream.synchronize()
    assert bits([value, *gradients]) == bits([expected[0], *expected[1]])


def test_the_host_does_not_wait_for_the_device() -> None:
    image, text = towers("bfloat16", 4096, 512)
    leaves = leaves_of(image, text, (14.0,))
    value_and_gradients(contrastile.clip_loss, leaves, backend="cupy")
    busy = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(40):
            busy @ busy
        value_and_gradients(contrastile.clip_loss, leaves, backend="cupy")
        event = torch.cuda.Event()
        event.record()
        # the products that were queued before still run
        assert not event.query()
    torch.cuda.synchronize()


def test_work_is_queued_on_the_stream_of_the_caller() -> None:
    image, text = towers("bfloat16", 2048, 512)
    expected = bits(step(contrastile.clip_loss, image, text, (14.0,), "cupy"))
    busy = torch.ones(4096, 4096, device="cuda")
    late_image = torch.zeros_like(image)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            busy @ busy
        late_image.copy_(image)
        results = step(contrastile.clip_loss, late_image, text, (14.0,), "cupy")
    side.synchronize()
    assert bits(results) == expected


@pytest.mark.parametrize("keep", [0, 16])
def test_torch_tensors_take_no_memory_from_the_pool_of_cupy(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", str(keep))
    # graphs would hold memory of their own
    monkeypatch.setenv("CONTRASTILE_GRAPHS", "0")
    pool = cupy.get_default_memory_pool()
    image, text = towers("bfloat16", 2048, 512)
    step(contrastile.clip_loss, image, text, (14.0,), "cupy")
    gc.collect()  # a traceback of an earlier test may free its tensors at any time
    before, live = pool.total_bytes(), torch.cuda.memory_allocated()
    results = step(contrastile.clip_loss, image, text, (14.0,), "cupy")
    assert pool.total_bytes() == before
    assert torch.cuda.memory_allocated() > live
    del results
    assert falls_to(live)


def test_features_may_be_on_any_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    image, text = towers("bfloat16")
    expected = bits(step(contrastile.clip_loss, image, text, (14.0,), "cupy"))
    with cupy.cuda.Device(1):
        features = [as_cupy(x.to("cuda:1")) for x in (image, text)]
    value, gradients = contrastile.value_and_grad(contrastile.clip_loss, backend="cupy")(*features, 14.0)
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
# the backward pass gets memory from torch's pool: cupy's backend is the first to need a context in that thread
del memory
contrastile.clip_loss(image, text, 100.0, backend="cupy").backward()
print("fine")
"""


@pytest.mark.parametrize("program", [ALONE, FIRST], ids=["without torch", "backward first"])
def test_any_call_may_be_the_first_of_a_process(program: str) -> None:
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert completed.stdout == "fine\n", completed.stderr


def test_features_that_cupy_cannot_take_are_refused_with_the_reason() -> None:
    image = cupy.ones((4, 3), dtype="float64")
    with pytest.raises(ValueError, match="got float64; convert them"):
        contrastile.clip_loss(image, image, 1.0)


@pytest.mark.parametrize(("backend", "keep"), [("triton", None), ("cupy", 0), ("cupy", 256)])
def test_the_gradient_of_the_scale_is_as_exact_as_plain(backend: str, keep: int | None) -> None:
    """The roundings of G at the positives have one sign here: without them back, the error is 13 to 46 x plain's."""
    normalize, cross_entropy = torch.nn.functional.normalize, torch.nn.functional.cross_entropy

    def plain(image: Any, text: Any, scale: Any) -> Any:
        products, index = image @ text.T, torch.arange(len(image), device="cuda")
        logits = scale * products.to(torch.promote_types(products.dtype, torch.float32))
        return (cross_entropy(logits, index) + cross_entropy(logits.T, index)) / 2

    for b, d in ((4096, 512), (8192, 128)):
        draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        image = normalize(2 * draw(1, d) + draw(b, d), dim=1)
        text = normalize(image + draw(b, d) / d**0.5, dim=1).bfloat16()
        image = image.bfloat16()
        exact = value_and_gradients(plain, leaves_of(image.double(), text.double(), (14.0,)))[3]
        rounded = value_and_gradients(plain, leaves_of(image, text, (14.0,)))[3]
        ours = step(contrastile.clip_loss, image, text, (14.0,), backend, keep=keep)[3]
        assert abs(ours - exact) <= 3 * abs(rounded - exact)
