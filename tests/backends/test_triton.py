"""The triton backend under Triton's interpreter: the same kernels on the CPU, with tiles small enough to be many."""

from __future__ import annotations

import weakref
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

CASES = ("ragged", "hot", "labels", "blocks", "sigmoid-ids", "large-logits", "certain-labels", "nan")


def test_a_few_cases_hold_under_the_interpreter() -> None:
    """``contrastile verify --backend triton`` holds all of them."""
    run = Run(
        Selection({"triton": backend}, CASES, ["value", "gradients"], ["float16", "float32"], precisions=["ieee"])
    )
    assert {row["status"] for row in run.rows()} == {"pass"}
    assert not run.failures


def block(m: int = 37, n: int = 45, d: int = 24, scale: float = 5.0, dtype: Any = torch.float32) -> Block:
    random = np.random.default_rng(m * n + d)
    rows, columns = (torch.tensor(random.standard_normal((size, d))).to(dtype) for size in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(positives=torch.arange(m)))


def status(given: Block) -> int:
    """The path the device chose: 0 fast, 1 safe."""
    run = Forward(given, True, Options())
    run.run()
    return int(run.status[0])


def test_the_fast_path_is_taken_where_the_norms_prove_it_safe_and_only_there() -> None:
    given = block()
    unit = [torch.nn.functional.normalize(x) for x in (given.rows, given.columns)]
    half = replace(given, rows=unit[0].half(), columns=unit[1].half())
    assert status(half) == status(replace(half, scale=torch.tensor(100.0))) == 0
    # tiles of float32 features have references of their own
    assert status(replace(given, rows=unit[0], columns=unit[1])) == 1
    assert status(replace(half, scale=torch.tensor(1e6))) == 1
    half.rows[3, 2] = float("nan")
    assert status(half) == 1


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


def weights_of(given: Block) -> Weights:
    """Halved means, from the block's own log-sum-exps."""
    found = backend.lse(given, True, Options())
    sides = zip((found.rows, found.columns), map(len, (given.rows, given.columns)), strict=True)
    return Weights(*(SideWeights(*side[:2], torch.full((k,), 0.5 / k), torch.ones(k)) for side, k in sides))


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
