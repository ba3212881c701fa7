"""The losses as people call them, in float64, against the oracle's named losses, within the derived bounds.

The truth is ``contrastile.oracle.named``, which knows nothing of problems, tiles or backends. The bounds are those of
``contrastile.verify``, pulled back to the arguments as the gradients themselves are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import contrastile
from contrastile import problems, validation
from contrastile.backends import load
from contrastile.oracle import named
from contrastile.schedules.local import Gradients
from contrastile.verify.bounds import bounds
from contrastile.verify.rearrange import apart, folded
from contrastile.verify.truth import truth

B, D, S, BETA = 13, 5, 9.0, -3.0
rng = np.random.default_rng(23)
I, T, KEYS, HARD, QUEUE = (rng.standard_normal((rows, D)) for rows in (B, B, 19, 7, 3))
IDS = np.array([3, 1, 3, 2, 2, 9, 3, 4, 5, 4, 6, 7, 8])
POSITIVES = np.array([0, 18, 18, 3, 20, 28, 1, 5, 26, 9, 2, 2, 11])
MORE_IDS = rng.integers(0, 10, size=len(KEYS) + len(HARD) + len(QUEUE))
UNIT = 2.0**-53


@dataclass(frozen=True)
class Case:
    """A public loss, its problem's builder, its arguments, and the oracle's loss and gradients in their order."""

    loss: Callable[..., Any]
    build: Callable[..., problems.LossProblem]
    args: tuple[Any, ...]
    expected: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)


def two_sided(found: named.LossAndGradients, rows: int | None = None) -> tuple[Any, ...]:
    return found.loss, found.d_rows, found.d_columns[:rows], found.d_scale


def joined(**kwargs: Any) -> tuple[Any, ...]:
    """One direction against keys, hard negatives and a queue under one log-sum-exp."""
    found = named.info_nce(I, np.concatenate([KEYS, HARD, QUEUE]), S, **kwargs)
    return two_sided(found, len(KEYS))


def sup_con(labels: np.ndarray) -> tuple[Any, ...]:
    found = named.sup_con(I, labels, S)
    return found.loss, found.d_rows, found.d_scale


def siglip(bias: float, **kwargs: Any) -> tuple[Any, ...]:
    found = named.siglip(I, T, S, bias, **kwargs)
    return *two_sided(found), found.d_bias


both_ids = {"row_ids": IDS, "column_ids": IDS}
CASES = {
    "clip": Case(contrastile.clip_loss, problems.clip, (I, T, S), lambda: two_sided(named.clip(I, T, S))),
    "clip, false negatives": Case(
        contrastile.clip_loss,
        problems.clip,
        (I, T, S),
        lambda: two_sided(named.clip(I, T, S, **both_ids)),
        {"ids": IDS},
    ),
    "clip, one pair": Case(
        contrastile.clip_loss, problems.clip, (I[:1], T[:1], S), lambda: two_sided(named.clip(I[:1], T[:1], S))
    ),
    "info_nce": Case(contrastile.info_nce, problems.info_nce, (I, T, S), lambda: two_sided(named.info_nce(I, T, S))),
    "info_nce, positives": Case(
        contrastile.info_nce,
        problems.info_nce,
        (I, KEYS, S),
        lambda: two_sided(named.info_nce(I, KEYS, S, positives=POSITIVES % 19)),
        {"positives": POSITIVES % 19},
    ),
    "info_nce, one block of negatives": Case(
        contrastile.info_nce,
        problems.info_nce,
        (I, T, S),
        lambda: two_sided(named.info_nce(I, np.concatenate([T, HARD]), S), B),
        {"negatives": HARD},
    ),
    "info_nce, positives among the negatives": Case(
        contrastile.info_nce,
        problems.info_nce,
        (I, KEYS, S),
        lambda: joined(positives=POSITIVES),
        {"negatives": [HARD, QUEUE], "positives": POSITIVES},
    ),
    "info_nce, ids": Case(
        contrastile.info_nce,
        problems.info_nce,
        (I, KEYS, S),
        lambda: joined(positives=POSITIVES, row_ids=IDS, column_ids=MORE_IDS),
        {"negatives": [HARD, QUEUE], "positives": POSITIVES, "row_ids": IDS, "column_ids": MORE_IDS},
    ),
    "nt_xent": Case(contrastile.nt_xent, problems.nt_xent, (I, T, S), lambda: two_sided(named.nt_xent(I, T, S))),
    "sup_con, lone labels": Case(contrastile.sup_con, problems.sup_con, (I, IDS, S), lambda: sup_con(IDS)),
    "sup_con, one label": Case(contrastile.sup_con, problems.sup_con, (I, 0 * IDS, S), lambda: sup_con(0 * IDS)),
    "sigmoid": Case(contrastile.sigmoid_loss, problems.sigmoid, (I, T, S, BETA), lambda: siglip(BETA)),
    "sigmoid, false negatives": Case(
        contrastile.sigmoid_loss,
        problems.sigmoid,
        (I, T, S, BETA),
        lambda: siglip(BETA, **both_ids),
        {"ids": IDS},
    ),
}
TILES = [None, 4, (5, 3)]


def put(x: Any, library: str) -> Any:
    """Arrays, also inside lists, in the library; numbers as they are."""
    if isinstance(x, list):
        return [put(each, library) for each in x]
    return torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) and library == "torch" else x


def limits(case: Case, backend: str, tile: Any) -> list[Any]:
    """How far the loss and each gradient may be from the oracle."""
    built = case.build(*case.args, **case.kwargs)
    problem = built.problem
    exact = truth(apart(problem))
    accuracy, options = load(backend).accuracy("float64", "cpu"), validation.options(tile)
    both = bounds(apart(problem), exact, accuracy, "float64", options=options), exact.outcome
    if not problem.columns:
        both = tuple(map(folded, both))
    # one more rounding where the gradients of rows and columns are added
    sums, values = (built.pull_back(Gradients(x.rows, x.columns, x.scale, x.bias)) for x in both)
    bound = both[0]
    return [bound.loss, *(b + UNIT * (np.abs(v) + b) for b, v in zip(sums, values, strict=True))]


def assert_within(found: tuple[Any, ...], expected: tuple[Any, ...], allowed: list[Any]) -> None:
    assert len(found) == len(expected) == len(allowed)
    for ours, theirs, bound in zip(found, expected, allowed, strict=True):
        ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else np.asarray(ours)
        assert ours.shape == np.shape(theirs)
        assert ours.dtype == np.float64
        error = np.abs(ours - theirs)
        assert np.all(error <= bound), f"error / bound {np.max(error / bound)}"


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_grad_give_the_oracle_s_numbers(name: str, library: str, backend: str, tile: Any) -> None:
    case = CASES[name]
    both = contrastile.value_and_grad(case.loss, backend=backend, tile=tile)
    args, kwargs = [put(x, library) for x in case.args], {k: put(x, library) for k, x in case.kwargs.items()}
    value, gradients = both(*args, **kwargs)
    assert_within((value, *gradients), case.expected(), limits(case, backend, tile))
    assert case.loss(*args, backend=backend, tile=tile, **kwargs) == value


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_autograd_gives_the_oracle_s_numbers(name: str, backend: str, tile: Any) -> None:
    case = CASES[name]
    # 0-d leaves for the numbers; labels are integers and have no gradient
    args = [torch.as_tensor(put(x, "torch")) for x in case.args]
    args = [x.double().requires_grad_() if x.is_floating_point() else x for x in args]
    kwargs = {k: put(x, "torch") for k, x in case.kwargs.items()}
    loss = case.loss(*args, backend=backend, tile=tile, **kwargs)
    gradients = torch.autograd.grad(loss, [x for x in args if x.requires_grad])
    assert_within((loss, *gradients), case.expected(), limits(case, backend, tile))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("sup_con")])
def test_samples_in_the_order_of_their_labels_give_them_too(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "FEW", B - 1)
    test_value_and_grad_give_the_oracle_s_numbers(name, library, library, None)
    test_autograd_gives_the_oracle_s_numbers(name, library, None)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_sup_con_without_any_positive_is_exactly_zero(library: str, backend: str) -> None:
    labels, features = put(np.arange(B), library), put(I, library)
    value, (d_features, d_scale) = contrastile.value_and_grad(contrastile.sup_con, backend=backend)(features, labels, S)
    assert float(value) == 0.0
    assert float(d_scale) == 0.0
    assert not np.asarray(d_features).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_arguments_dtypes_and_the_loss_the_state_s(name: str, dtype: str) -> None:
    case, narrow = CASES[name], getattr(torch, dtype)
    args = [torch.as_tensor(put(x, "torch")) for x in case.args]
    args = [x.to(narrow) if x.is_floating_point() and x.ndim else x for x in args]
    leaves = [x.requires_grad_() for x in args if x.is_floating_point()]
    kwargs = {
        k: [x.to(narrow) for x in put(v, "torch")] if isinstance(v, list) else put(v, "torch")
        for k, v in case.kwargs.items()
    }
    if name == "info_nce, one block of negatives":
        kwargs["negatives"] = kwargs["negatives"].to(narrow)
    loss = case.loss(*args, **kwargs)
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert loss.shape == ()
    for x in leaves:
        assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
        assert x.grad.isfinite().all()


def test_tensors_that_require_gradients_may_be_given_to_value_and_grad_by_name() -> None:
    image, text, scale = (torch.tensor(x, requires_grad=True) for x in (I, T, S))
    both = contrastile.value_and_grad(contrastile.clip_loss)
    by_name, by_place = both(image=image, text=text, scale=scale), both(image, text, scale)
    for found, expected in zip((by_name[0], *by_name[1]), (by_place[0], *by_place[1]), strict=True):
        assert torch.equal(found, expected)
        assert not found.requires_grad


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_sup_con_of_samples_that_are_alike_keeps_its_digits_where_logits_are_large(backend: str) -> None:
    """The mean of the positives' logits is near 10^6, and so is their log-sum-exp; the loss is what lies between."""
    rng = np.random.default_rng(5)
    labels = np.repeat(np.arange(5), [11, 7, 4, 12, 3])
    features = rng.standard_normal((5, 40))[labels]
    features = (100 * features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
    # each sample's positives share the whole probability
    counts = np.bincount(labels)[labels] - 1
    found = float(contrastile.sup_con(features, labels, 100.0, backend=backend))
    assert found == pytest.approx(np.log(counts).mean(), rel=2.0**-22)
