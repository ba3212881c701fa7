"""The cupy backend on a GPU: what ``contrastile verify --backend cupy --device cuda`` cannot ask of it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from capturing import bits, captured, comes_down_to, unit_features

import contrastile
from contrastile.backends import choice
from contrastile.backends.contract import Accuracy, Block, Options, Pairs, SideWeights, UnsupportedProblemError, Weights
from contrastile.backends.registry import load

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DTYPES = ("bfloat16", "float16", "float32")
B, D = 773, 88


@pytest.fixture(params=["the GPU's own", "sm80"])
def record(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend's name, with either kernels."""
    if request.param == "sm80":
        monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", "sm80")
    return "cupy"


def towers(dtype: str, b: int = B, d: int = D, seed: int = 0) -> tuple[Any, Any]:
    """Unit features on the GPU, of torch."""
    one, two = unit_features(2, b, d, dtype, seed)
    return one, two


def as_cupy(x: Any) -> Any:
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    found = cupy.from_dlpack(bits)
    return found.view("bfloat16") if x.dtype == torch.bfloat16 else found


def losses() -> dict[str, tuple[Callable[..., Any], tuple[float, ...]]]:
    return {
        "clip": (contrastile.clip_loss, (14.0,)),
        "info_nce": (contrastile.info_nce, (14.0,)),
        "nt_xent": (contrastile.nt_xent, (5.0,)),
        "sigmoid": (contrastile.sigmoid_loss, (10.0, -10.0)),
    }


def step(loss: Callable[..., Any], image: Any, text: Any, numbers: tuple[float, ...], backend: str) -> list[Any]:
    """The loss and its gradients by torch's autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in (image, text)]
    leaves += [torch.tensor(x, device="cuda", requires_grad=True) for x in numbers]
    value = loss(*leaves, backend=backend)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("name", losses())
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_and_cupy_arrays_give_the_same_bits(record: str, dtype: str, name: str) -> None:
    loss, numbers = losses()[name]
    image, text = towers(dtype)
    by_torch = step(loss, image, text, numbers, record)
    value, gradients = contrastile.value_and_grad(loss, backend=record)(as_cupy(image), as_cupy(text), *numbers)
    assert all(isinstance(x, cupy.ndarray) for x in (value, *gradients))
    assert str(gradients[0].dtype) == dtype
    assert bits(by_torch) == bits([value, *gradients])
    assert bits([loss(as_cupy(image), as_cupy(text), *numbers, backend=record)]) == bits([value])


def test_auto_is_cupy_for_cupy_and_what_the_table_says_for_torch() -> None:
    image, text = towers("bfloat16")
    assert choice.choose("cupy", "cuda", "bfloat16") == "cupy"
    hopper = torch.cuda.get_device_capability() == (9, 0)
    by_table = choice.choose("torch", "cuda", "bfloat16")
    assert by_table == ("cupy" if hopper else "triton")
    for put, name in ((as_cupy, "cupy"), (lambda x: x, by_table)):
        auto, named = (contrastile.clip_loss(put(image), put(text), 14.0, backend=x) for x in ("auto", name))
        assert bits([auto]) == bits([named])


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


def test_sup_con_and_ids_work_on_cupy_arrays() -> None:
    image, text = towers("float32")
    labels = torch.arange(B, device="cuda") % 19
    both = contrastile.value_and_grad(contrastile.sup_con, backend="cupy")
    by_torch, by_cupy = both(image, labels, 5.0), both(as_cupy(image), as_cupy(labels), 5.0)
    assert bits([by_torch[0], *by_torch[1]]) == bits([by_cupy[0], *by_cupy[1]])
    dropped = contrastile.clip_loss(as_cupy(image), as_cupy(text), 5.0, ids=as_cupy(labels))
    assert float(dropped) < float(contrastile.clip_loss(as_cupy(image), as_cupy(text), 5.0))


def logit_error(facts: Accuracy, x: Any, y: Any, scale: float) -> float:
    """The largest error of a logit; the scale in powers of two is rounded too."""
    relative = facts.depth(x.shape[1]) * facts.accumulate_unit + 2 * facts.input_rounding + 2 * facts.unit
    return scale * relative * float((x.double().abs() @ y.double().abs().T).max())


@pytest.mark.parametrize("size", [(700, 512), (61, 83)])
@pytest.mark.parametrize(("dtype", "precision"), [*((x, "ieee") for x in DTYPES), ("float32", "tf32")])
def test_a_certain_positive_has_its_excess_to_all_digits(
    record: str, dtype: str, precision: str, size: tuple[int, int]
) -> None:
    """The loss of certain pairs is log1p(exp(N - P)), far below the last digit of either."""
    x, _ = towers(dtype, *size)
    y = x.flip(0).contiguous()
    at = torch.arange(len(x), device="cuda").flip(0)
    scale = torch.tensor(150.0, device="cuda")
    block = Block(as_cupy(x), as_cupy(y), as_cupy(scale), None, Pairs(positives=as_cupy(at)))
    backend = load(record)
    found = backend.lse(block, True, Options(precision=precision))
    logits = 150.0 * (x.double() @ y.double().T)
    error = logit_error(backend.accuracy(dtype, "cuda", Options(precision=precision)), x, y, 150.0)
    assert found.columns is not None
    for table, (n, p, s) in ((logits, found.rows), (logits.T, found.columns)):
        assert (p == s).all(), "of one positive the log-sum-exp is its logit, to the last bit"
        # row i's positive is column at[i], and column at[i]'s row i: at is its own inverse
        own = table.gather(1, at[:, None])[:, 0]
        negative = table.scatter(1, at[:, None], -torch.inf).logsumexp(1)
        assert float(abs(torch.from_dlpack(p) - own).max()) <= error
        ratio = torch.special.log1p(torch.exp(torch.from_dlpack(n - p))) / torch.log1p(torch.exp(negative - own))
        assert float(abs(torch.log(ratio)).max()) <= 2 * error


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "ieee"), ("float32", "ieee")])
@pytest.mark.parametrize("by", ["index", "ids"])
def test_gradients_of_certain_pairs_are_those_of_float64(record: str, by: str, dtype: str, precision: str) -> None:
    """Separated pairs at scale 100: nothing of p - 1 is left to cancel."""
    x, other = towers(dtype, 513, 64)
    y = torch.nn.functional.normalize(x.float() + 0.1 * other.float(), dim=1).to(x.dtype)
    index = as_cupy(torch.arange(513, device="cuda"))
    by_ids = {"row_ids": index, "column_ids": index, "match": "target"}
    pairs = Pairs(positives=index) if by == "index" else Pairs(**by_ids)  # type: ignore[arg-type]
    block = Block(as_cupy(x), as_cupy(y), as_cupy(torch.tensor(100.0, device="cuda")), None, pairs)
    backend, one, options = load(record), cupy.ones(513, "float32"), Options(precision=precision)
    s = backend.lse(block, True, options)
    sides = [SideWeights(*side[:2], one, one) for side in (s.rows, s.columns)]
    sums = [cupy.zeros((513, 64), "float32") for _ in range(2)]
    backend.gradients(block, Weights(*sides), *sums, options)
    leaves = [z.double().requires_grad_() for z in (x, y)]
    logits = 100.0 * (leaves[0] @ leaves[1].T)
    # float64 itself would cancel in L - x
    rest = logits.masked_fill(torch.eye(513, dtype=torch.bool, device="cuda"), -torch.inf)
    own = logits.diagonal()
    loss = torch.nn.functional.softplus(torch.cat([rest.logsumexp(axis) - own for axis in (0, 1)])).sum()
    facts = backend.accuracy(dtype, "cuda", Options(precision=precision))
    # of N - P twice, and of the weights of the other pairs as much; G is rounded
    bound = 4 * logit_error(facts, x, y, 100.0) + 2 * facts.gradient_rounding
    for name, found, want in zip(("rows", "columns"), sums, torch.autograd.grad(loss, leaves), strict=True):
        off = float((100.0 * torch.from_dlpack(found).double() - want).norm() / want.norm())
        assert off <= bound, f"{record} {dtype} {precision} by {by}: {name} are off by {off:.1e} of float64's"


def test_twenty_repeats_have_the_same_bits(record: str) -> None:
    image, text = towers("bfloat16", 4099, 512)
    first = bits(step(contrastile.clip_loss, image, text, (100.0,), record))
    for _ in range(19):
        assert bits(step(contrastile.clip_loss, image, text, (100.0,), record)) == first


@pytest.mark.parametrize("name", ["clip", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_can_be_captured_by_torch_and_replayed(dtype: str, name: str) -> None:
    loss, numbers = losses()[name]
    image, text = towers(dtype)
    leaves = [x.detach().clone().requires_grad_() for x in (image, text)]
    leaves += [torch.tensor(x, device="cuda", requires_grad=True) for x in numbers]

    def call() -> list[Any]:
        value = loss(*leaves, backend="cupy")
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    graph, found = captured(call)
    other, another = towers(dtype, seed=1)
    with torch.no_grad():
        leaves[0].copy_(other)
        leaves[1].copy_(another)
    graph.replay()
    assert bits(found) == bits(step(loss, other, another, numbers, "cupy"))


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
    leaves = [image.requires_grad_(), text.requires_grad_(), torch.tensor(14.0, device="cuda", requires_grad=True)]

    def call() -> None:
        torch.autograd.grad(contrastile.clip_loss(*leaves, backend="cupy"), leaves)

    call()
    busy = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(40):
            busy @ busy
        call()
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


def test_torch_tensors_take_no_memory_from_cupy_s_pool(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_fixed_workspace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_WORKSPACE_MIB", "8")
    image, text = towers("bfloat16", 8192, 64)
    step(contrastile.clip_loss, image, text, (14.0,), "cupy")
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    kept = step(contrastile.clip_loss, image, text, (14.0,), "cupy")
    peak = torch.cuda.max_memory_allocated() - base
    # copies of the inputs, sums and gradients; 8 MiB of G, 32 of cuBLAS, partials and vectors
    assert peak < 8192 * 64 * 2 * 2 * 5 + (8 + 32 + 24) * 2**20
    del kept


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


def test_no_torch_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=600)
    assert done.stdout == "fine\n", done.stderr


def test_features_that_cupy_cannot_take_are_refused_with_the_reason() -> None:
    image = cupy.ones((4, 3), dtype="float64")
    with pytest.raises(ValueError, match="got float64; convert them"):
        contrastile.clip_loss(image, image, 1.0)
