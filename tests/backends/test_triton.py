"""The triton backend under Triton's interpreter: the same kernels on the CPU, with tiles small enough to be many."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from contrastile.backends.contract import (  # noqa: E402
    Block,
    Options,
    Pairs,
    SideWeights,
    Statistics,
    UnsupportedProblemError,
    Weights,
)
from contrastile.backends.triton import backend, backward_pass, configs  # noqa: E402
from contrastile.backends.triton import tiles as words  # noqa: E402
from contrastile.backends.triton.forward_pass import _ForwardPass as Forward  # noqa: E402
from contrastile.backends.triton.launch import aligned  # noqa: E402
from contrastile.verify.runner import Run  # noqa: E402
from contrastile.verify.selection import Selection  # noqa: E402

# the interpreter's NumPy warns where a kernel means its infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CERTAIN = (
    "certain", "certain@300", "certain-labels", "certain-labels@alike", "certain@wrong", "copies", "certain-views",
    "certain-shared", "norm-30", "norm-3000",
)  # fmt: skip
CASES = (
    "ragged", "hot", "all-negative", "staircase@up", "exact", "one-row", "one-column", "zero-rows", "ids-drop",
    "labels", "self-excluded", "blocks", "signed-zero-weights", "wide-scale", "sigmoid", "sigmoid-ids", "large-logits",
    "nan", "inf",
)  # fmt: skip
PROPERTIES = ("tiles", "upstream", "frozen", "accumulation", "determinism", "strided", "poisoned-memory")
TENSOR_CORES = (
    "ragged", "hot", "staircase", "exact", "labels", "self-excluded", "blocks", "sigmoid-ids", "large-logits",
    "certain", "certain-labels", "norm-3000", "nan", "inf",
)  # fmt: skip


def failing(case: str, properties: Sequence[str], dtype: str, precision: str = "ieee") -> list[str]:
    """What ``contrastile verify`` finds wrong; it must have held something."""
    run = Run(Selection({"triton": backend}, [case], properties, [dtype], precisions=[precision]))
    assert "pass" in {row["status"] for row in run.rows()} or run.failures
    return [f"{each.row['property']} {each.label}: {each.worst}" for each in run.failures]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", [*CASES, *CERTAIN])
def test_every_case_is_within_its_bound_and_near_a_plain_computation(name: str, dtype: str) -> None:
    assert failing(name, ["value", "gradients", *(["plain"] if name in CERTAIN else [])], dtype) == []


@pytest.mark.parametrize("prop", PROPERTIES)
def test_every_property_of_one_small_case_holds(prop: str) -> None:
    assert failing("ragged", [prop], "float16") == []


@pytest.mark.parametrize("name", ["self-excluded", "labels", "certain-views", "certain-labels"])
def test_rows_against_themselves_are_within_the_bound(name: str) -> None:
    assert failing(name, ["symmetric"], "float32") == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["tf32", "split"])
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_float32_on_tensor_cores_is_within_the_bound_of_its_precision(name: str, precision: str) -> None:
    assert failing(name, ["value", "gradients"], "float32", precision) == []


@pytest.mark.slow
def test_any_tile_is_within_the_bound_of_split() -> None:
    assert failing("signed-zero-weights", ["tiles"], "float32", "split") == []


def block(m: int = 37, n: int = 45, d: int = 24, scale: float = 5.0, dtype: Any = torch.float32) -> Block:
    random = np.random.default_rng(m * n + d)
    rows, columns = (torch.tensor(random.standard_normal((size, d))).to(dtype) for size in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(positives=torch.arange(m)))


def status(given: Block) -> int:
    """The path the device chose: 0 fast, 1 safe."""
    run = Forward(given, True, Options())
    run.run()
    return int(run.status[0])


def test_the_fast_path_is_taken_where_the_norms_prove_it_safe() -> None:
    given = block()
    unit = [torch.nn.functional.normalize(x) for x in (given.rows, given.columns)]
    half = replace(given, rows=unit[0].half(), columns=unit[1].half())
    assert status(half) == 0
    assert status(replace(half, scale=torch.tensor(100.0))) == 0
    # tiles of float32 features have references of their own
    assert status(replace(given, rows=unit[0], columns=unit[1])) == 1


def test_the_safe_path_is_taken_where_nothing_proves_the_fast_one() -> None:
    given = block(scale=1.0, dtype=torch.float16)
    assert status(given) == 0
    assert status(replace(given, scale=torch.tensor(1e6))) == 1
    broken = given.rows.clone()
    broken[3, 2] = float("nan")
    assert status(replace(given, rows=broken)) == 1


def test_sums_that_underflow_set_the_status_word_after_the_fact() -> None:
    """The bound allows the fast path, but one row's logits all lie where terms are flushed."""
    d = 16
    rows, columns = torch.zeros(20, d).half(), torch.zeros(33, d).half()
    rows[:, 0], columns[:, 0] = 1.0, 1.0
    rows[4, 0] = -1.0
    given = Block(rows, columns, torch.tensor(100.0))
    assert status(given) == 1
    found = backend.lse(given, True, Options())
    # every dot product is exact here: x = 100 or -100, and L = x + log n
    error = abs(float(found.rows.negative_lse[4]) - (-100 + np.log(33)))
    assert error <= 100 * 2.0**-20


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.37, 33.3, -57.1, 99.9, 1e7])
@pytest.mark.parametrize("bias", [None, -7.7])
@pytest.mark.parametrize("two_sided", [True, False])
def test_a_logit_is_the_same_number_in_the_forward_and_in_the_backward(
    scale: float, bias: float | None, two_sided: bool
) -> None:
    """With no probability left to the others, G at a row's only positive is q - 1, and q is 1 to the last bit."""
    given, one, none = block(d=40, scale=scale), torch.ones(1), torch.full((1,), -float("inf"), dtype=torch.float64)
    for i in range(0, 37, 3):
        pairs = Pairs(row_ids=torch.tensor([7]), column_ids=torch.tensor([7]), match="target")
        pair = replace(given, rows=given.rows[i : i + 1], columns=given.columns[i : i + 1], pairs=pairs)
        pair = replace(pair, bias=None if bias is None else torch.tensor(bias))
        found = backend.lse(pair, True, Options())
        assert found.columns is not None
        assert float(found.rows.negative_lse) == float(found.columns.negative_lse) == -float("inf")
        sides = [SideWeights(none, x.positive_lse, one, one) for x in (found.rows, found.columns)[: 1 + two_sided]]
        sums = torch.zeros(1, 40), torch.zeros(1, 40)
        backend.gradients(pair, Weights(*sides), *sums, Options())
        assert not sums[0].any()
        assert not sums[1].any()


@pytest.mark.parametrize(("scale", "fast"), [(20.0, 1), (100.0, 1), (300.0, 1), (1000.0, 0)])
def test_the_fast_backward_is_taken_where_all_rows_are_certain(scale: float, fast: int) -> None:
    image = torch.eye(40, 48).half()
    given = Block(image, image, torch.tensor(scale), None, Pairs(positives=torch.arange(40)))
    found = backward_pass._BackwardPass(given, weights_of(given), Options())
    assert float(found.plan[words.FAST.value]) == fast


def test_refusals_give_their_reason() -> None:
    assert "bfloat16" not in backend.dtypes
    with pytest.raises(UnsupportedProblemError, match="float64"):
        backend.check(block(dtype=torch.float64))
    with pytest.raises(UnsupportedProblemError, match="at least one column"):
        backend.check(replace(block(), rows=torch.ones(3, 0), columns=torch.ones(4, 0)))


def test_alignment_copies_only_what_needs_it() -> None:
    good = torch.ones(5, 8)
    assert aligned(good) is good
    for bad in (torch.ones(5, 7), torch.ones(8, 5).T, torch.ones(6, 8)[1:, 1:], torch.ones(1, 8).expand(5, 8)):
        copy = aligned(bad)
        assert copy is not bad
        assert torch.equal(copy, bad)
        assert copy.stride(0) % 4 == 0


def test_chunks_stay_within_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_WORKSPACE_MIB", "256")
    config = configs.tile_config("gradient", "bfloat16", 90, 512)
    for m, n in ((4_194_304, 4_194_304), (65536, 1000), (1000, 65536), (1, 10**7), (10**7, 1)):
        height, width = configs.backward_chunk(m, n, 2, config, Options())
        assert 1 <= height <= m
        assert 1 <= width <= n
        # a descriptor pads a row to 16 bytes
        assert 2 * height * (-(-width // 8) * 8) <= 256 * 2**20 or width < 8
        assert configs.backward_chunk(m, n, 2, config, Options(tile=(3, 5))) == (min(m, 3), min(n, 5))


def weighted(found: Statistics, *weights: Any) -> Weights:
    """These weights and targets with what ``lse`` has found."""
    columns = None if found.columns is None else SideWeights(*found.columns[:2], *weights[2:])
    return Weights(SideWeights(*found.rows[:2], *weights[:2]), columns)


def weights_of(given: Block, two_sided: bool = True) -> Weights:
    """Halved means, from the block's own log-sum-exps."""
    m, n = len(given.rows), len(given.columns)
    found = backend.lse(given, two_sided, Options())
    columns = (torch.full((n,), 0.5 / n), torch.ones(n)) if two_sided else ()
    return weighted(found, torch.full((m,), 0.5 / m), torch.ones(m), *columns)


@pytest.mark.parametrize("shape", [(0, 45), (50, 0), (0, 0)])
def test_a_block_without_pairs_is_finished_with_zeros(shape: tuple[int, int]) -> None:
    given = block(m=shape[0], n=shape[1], dtype=torch.float16)
    sides = [SideWeights(*[torch.ones(k, dtype=torch.float64)] * 2, *[torch.ones(k)] * 2) for k in shape]
    assert backend.finished is not None
    for form, dtype in (("sums", torch.float32), ("gradient", torch.float16)):
        found = backend.finished(given, Weights(*sides), None, form, Options())
        assert (found.rows.shape, found.rows.dtype) == (given.rows.shape, torch.float16)
        assert (found.columns.shape, found.columns.dtype) == (given.columns.shape, dtype)
        assert not any(x.any() for x in (found.rows, found.columns, found.inner))


@pytest.mark.slow
def test_finishing_holds_no_matrix_of_all_rows_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    given = block(m=200, n=45, dtype=torch.float16)
    weights = weights_of(given)
    asked: list[int] = []
    empty = torch.empty

    def counted(*shape: Any, **how: Any) -> Any:
        found = empty(*shape, **how)
        asked.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(torch, "empty", counted)
    assert backend.finished is not None
    backend.finished(given, weights, None, None, Options((16, 32)))
    # the rows' gradient itself is float16
    assert max(asked) < 4 * given.rows.numel()
    assert 2 * given.rows.numel() in asked


def test_the_columns_gradient_waits_for_the_workspace_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    given = block(dtype=torch.float16)
    weights, held = weights_of(given), list[Any]()
    space, multiplied = backward_pass.workspace, backward_pass.multiplied

    def workspace(*call: Any) -> Any:
        found = space(*call)
        held.append(weakref.ref(found))
        return found

    def last(*call: Any) -> None:
        assert held
        assert not any(x() is not None for x in held)
        held.clear()
        multiplied(*call)

    monkeypatch.setattr(backward_pass, "workspace", workspace)
    monkeypatch.setattr(backward_pass, "multiplied", last)
    assert backend.finished is not None
    backend.finished(given, weights, None, "gradient", Options((16, 32)))
    assert not held


def test_the_plan_has_a_slot_for_every_number() -> None:
    slots = [words.ALPHA, words.REFERENCE, words.THRESHOLD, words.FAST, words.GRADIENT_SCALE, words.BIAS, words.CERTAIN]
    assert sorted(int(x.value) for x in slots) == list(range(len(slots)))
    assert len(slots) <= words.PLAN_SIZE
