"""Losses of anybody's that are wrong fail; what this package has of it, ``contrastile mutate`` plants."""

import numpy as np
import plain_losses
import pytest
import torch
from plain_losses import clip

from contrastile.verify.losses import check
from contrastile.verify.losses.cases import BATCHES


def failed(loss, claims=None, **chosen):
    """The properties and cases that fail."""
    return {(row["property"], row["case"]) for row in check(loss, claims, **chosen) if row["status"] == "fail"}


def finite_mask(value):
    def wrong_mask(image, text, scale, ids=None):
        x = scale * image @ text.T
        if ids is not None:
            itself = torch.eye(len(x), dtype=torch.bool)
            x = x.masked_fill((ids[:, None] == ids) & ~itself, value)
        rows = torch.arange(len(x))
        return (torch.nn.functional.cross_entropy(x, rows) + torch.nn.functional.cross_entropy(x.T, rows)) / 2

    return wrong_mask


def clamped_logits(image, text, scale):
    x = (scale * image @ text.T).clamp(-310, 310)
    rows = torch.arange(len(x))
    return (torch.nn.functional.cross_entropy(x, rows) + torch.nn.functional.cross_entropy(x.T, rows)) / 2


OF_CLIP = [
    (finite_mask(-50.0), ("value", "ids@cold")),
    (finite_mask(-1e4), ("value", "ids@cold")),
    (clamped_logits, ("value", "huge-logits")),
    (lambda image, text, scale: clip(image, text, scale) * (1.01 if len(image) == 1000 else 1), ("sizes", "sizes")),
]
"""Losses that are wrong where none of this package is held, and the check that fails by it."""


@pytest.mark.parametrize(("loss", "check"), OF_CLIP)
def test_a_wrong_loss_fails(loss, check):
    claims = {"ids": check[1].startswith("ids")}
    chosen = {"properties": [check[0]], "cases": [check[1]], "dtypes": ["float32"]}
    assert failed(loss, claims, **chosen) == {check}
    assert not failed(clip, claims, **chosen)


def test_what_is_not_claimed_is_said():
    rows = list(
        check(plain_losses.info_nce, {"objective": "info_nce"}, cases=["negatives", "positives", "ids", "calls"])
    )
    unclaimed = {row["reason"] for row in rows if row["status"] == "unclaimed"}
    assert {"negatives", "positives", "equal ids", "integers", "float64 features"} <= unclaimed


def test_a_backend_s_weights_are_not_its_own_truth(monkeypatch):
    """A package that states its losses wrong disagrees with the oracle everywhere that it is compared with it."""
    from dataclasses import replace
    from functools import wraps

    import contrastile
    from contrastile import problems
    from contrastile.backends.registry import load
    from contrastile.bench import agreement, peers
    from contrastile.verify.runner import Run
    from contrastile.verify.selection import Selection

    right = problems.BUILDERS["clip_loss"]

    @wraps(right)
    def heavier(*args, **named):
        made = right(*args, **named)
        weight = 1.5 * made.problem.row_weight
        return replace(made, problem=replace(made.problem, row_weight=weight, column_weight=weight))

    monkeypatch.setitem(problems.BUILDERS, "clip_loss", heavier)
    found = failed(contrastile.clip_loss, dtypes=["float32"], properties=["value", "gradients", "scale-gradient"])
    cases = {case for case in BATCHES if ("value", case) in found}
    assert {"smoke", "ragged", "wide", "hot", "wordnet"} <= cases
    selection = Selection({"torch": load("torch")}, ["public-losses"], ["public-clip-loss"], ["float32"])
    assert [row["status"] for row in Run(selection).rows()] == ["fail"]
    assert not agreement.check(peers.named("torch"), "float32", "cpu", 10.0, rows=67).agrees
    assert np.isfinite(agreement.check(peers.plain(), "float32", "cpu", 10.0, rows=67).ratio)
    assert agreement.check(peers.plain(), "float32", "cpu", 10.0, rows=67).agrees
