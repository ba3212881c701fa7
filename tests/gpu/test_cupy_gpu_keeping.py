"""Kept exponentials on a GPU of compute capability 9.0: how much is kept, where, and for how long.

``make verify-gpu`` holds the gradients to the oracle, with all rows kept and with some.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from capturing import bits, captured, comes_down_to, unit_features

import contrastile

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

M, D = 773, 200
WHOLLY, PARTLY, NOTHING = 16, 1, 0
"""MiB that may be kept."""


def towers(seed: int = 0) -> list[Any]:
    found = [x.requires_grad_() for x in unit_features(2, M, D, seed=seed)]
    return [*found, torch.tensor(14.3, device="cuda", requires_grad=True)]


@pytest.mark.parametrize("keep", [WHOLLY, PARTLY])
def test_twice_through_one_graph_and_without_autograd_it_is_the_same(keep: int) -> None:
    leaves = towers()
    value = contrastile.clip_loss(*leaves, backend="cupy", keep=keep)
    first = bits(torch.autograd.grad(value, leaves, retain_graph=True))
    assert bits(torch.autograd.grad(value, leaves)) == first
    by_hand = contrastile.value_and_grad(contrastile.clip_loss, backend="cupy", keep=keep)(
        *(x.detach() for x in leaves)
    )
    assert bits(by_hand[1]) == first
    assert bits([by_hand[0]]) == bits([value])
    without = contrastile.clip_loss(*leaves, backend="cupy", keep=NOTHING)
    # what is kept changes no value
    assert bits([without]) == bits([value])


def test_what_was_kept_is_torch_s_memory_and_goes_with_the_graph() -> None:
    leaves = towers()

    def call(keep: int) -> Any:
        return contrastile.clip_loss(*leaves, backend="cupy", keep=keep)

    for keep in (WHOLLY, NOTHING):
        torch.autograd.grad(call(keep), leaves)
    gc.collect()  # what other tests left must not be freed while this one counts
    pool = cupy.get_default_memory_pool().total_bytes()
    taken = {}
    for keep in (WHOLLY, NOTHING):
        before = torch.cuda.memory_allocated()
        value = call(keep)
        taken[keep] = torch.cuda.memory_allocated() - before
        torch.autograd.grad(value, leaves)
        del value
        assert comes_down_to(before)
    assert taken[WHOLLY] - taken[NOTHING] >= 2 * 776 * M
    assert cupy.get_default_memory_pool().total_bytes() == pool
    with torch.no_grad():
        before = torch.cuda.memory_allocated()
        value = call(WHOLLY)
        assert torch.cuda.memory_allocated() - before < 2 * 776 * M
        del value


@pytest.mark.parametrize("keep", [WHOLLY, PARTLY])
def test_a_step_that_keeps_can_be_captured_and_replayed(keep: int) -> None:
    leaves = towers()

    def call() -> list[Any]:
        value = contrastile.clip_loss(*leaves, backend="cupy", keep=keep)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    graph, found = captured(call)
    with torch.no_grad():
        for leaf, other in zip(leaves, towers(seed=1), strict=True):
            leaf.copy_(other)
    graph.replay()
    assert bits(found) == bits(call())
