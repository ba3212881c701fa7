"""Every planted defect fails the property of its kind, in anybody's loss."""

import numpy as np
import plain_losses
import pytest
import torch
import wrong
from plain_losses import OBJECTIVES, clip

from contrastile.verify.losses import check
from contrastile.verify.losses.cases import BATCHES


def failed(loss, claims=None, **chosen):
    """The properties and cases that fail."""
    return {(row["property"], row["case"]) for row in check(loss, claims, **chosen) if row["status"] == "fail"}


@pytest.mark.parametrize("defect", wrong.OF_ANY)
def test_a_planted_defect_fails_the_property_of_its_kind(defect):
    name, plant = wrong.OF_ANY[defect]
    chosen = {"properties": [name], "dtypes": ["float32"]}
    if name == "upstream":
        chosen["cases"] = ["smoke"]
    assert name in {prop for prop, _ in failed(plant(clip), **chosen)}


def as_labels(change):
    def plant(loss):
        return lambda features, labels, scale: loss(features, change(labels), scale)

    return plant


def over_all_samples(loss):
    """The mean is over all samples."""

    def wrong_mean(features, labels, scale):
        partners = (labels[:, None] == labels).sum(1) > 1
        return loss(features, labels, scale) * partners.sum() / len(labels)

    return wrong_mean


def lone_left_out(loss):
    """Lone samples are no negatives."""

    def wrong_negatives(features, labels, scale):
        partners = (labels[:, None] == labels).sum(1) > 1
        return loss(features[partners], labels[partners], scale)

    return wrong_negatives


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


def info_nce(query, key, scale, *, negatives=None, positives=None, row_ids=None, column_ids=None):
    """A right one with all arguments."""
    more = [] if negatives is None else [negatives] if isinstance(negatives, torch.Tensor) else list(negatives)
    x = scale * query @ torch.cat([key, *more]).T
    own = torch.arange(len(query)) if positives is None else positives
    if (own < 0).any() or (own >= x.shape[1]).any():
        raise ValueError("positives")
    if row_ids is not None:
        other = torch.arange(x.shape[1]) != own[:, None]
        x = x.masked_fill((row_ids[:, None] == column_ids) & other, -torch.inf)
    return torch.nn.functional.cross_entropy(x, own)


def with_arguments(change):
    return lambda loss: lambda *args, **named: loss(*args, **change(named))


def last_row_lost(named):
    x = named.get("negatives")
    return named | ({"negatives": x[:-1]} if isinstance(x, torch.Tensor) else {})


def third_block_missed(named):
    if named.get("positives") is None or not isinstance(named.get("negatives"), list):
        return named
    return named | {"positives": named["positives"].clamp(max=len(named["positives"]) * 2 - 2)}


def without(name):
    return with_arguments(lambda named: {key: x for key, x in named.items() if key != name})


def last_taken(named):
    x = named.get("positives")
    return named if x is None else named | {"positives": x.abs() % len(x) if "negatives" not in named else x}


def attracted(loss):
    return lambda image, text, scale, bias=0.0: loss(image, text, scale, -abs(bias))


def other_default(image, text, scale, bias=-10.0):
    return OBJECTIVES["sigmoid_loss"][0](image, text, scale, bias)


INFO_NCE = {"ids": True, "negatives": True, "positives": True}
OF_OBJECTIVES = [
    ("sup_con", {}, as_labels(lambda x: x.clamp(min=0)), {("value", "labels@far")}),
    ("sup_con", {}, as_labels(lambda x: x.int()), {("value", "labels@far")}),
    ("sup_con", {}, as_labels(lambda x: x.float()), {("value", "labels@far")}),
    ("sup_con", {}, as_labels(lambda x: x.double()), {("value", "labels@far")}),
    ("sup_con", {}, as_labels(lambda x: x.clamp(max=5)), {("value", "labels")}),
    ("sup_con", {}, over_all_samples, {("value", "labels"), ("gradients", "labels")}),
    ("sup_con", {}, lone_left_out, {("value", "labels")}),
    ("info_nce", INFO_NCE, with_arguments(last_row_lost), {("value", "negatives")}),
    ("info_nce", INFO_NCE, with_arguments(third_block_missed), {("value", "positives")}),
    ("info_nce", INFO_NCE, without("negatives"), {("value", "negatives"), ("value", "queue")}),
    ("info_nce", INFO_NCE, without("positives"), {("value", "positives")}),
    ("info_nce", INFO_NCE, with_arguments(last_taken), {("refusals", "calls")}),
    ("sigmoid_loss", {}, attracted, {("value", "bias")}),
    ("sigmoid_loss", {}, lambda loss: other_default, {("numbers", "calls")}),
    ("clip_loss", {"ids": True}, lambda loss: finite_mask(-50.0), {("value", "ids@cold")}),
    ("clip_loss", {"ids": True}, lambda loss: finite_mask(-1e4), {("value", "ids@cold")}),
    ("clip_loss", {}, lambda loss: clamped_logits, {("value", "huge-logits")}),
]
"""Objective, claims, what plants the defect, and checks that fail by it."""


@pytest.mark.parametrize(("objective", "claims", "plant", "checks"), OF_OBJECTIVES)
def test_a_planted_defect_of_an_objective_fails(objective, claims, plant, checks):
    right = info_nce if objective == "info_nce" else OBJECTIVES[objective][0]
    chosen = {
        "properties": sorted({prop for prop, _ in checks}),
        "cases": sorted({case for _, case in checks}),
        "dtypes": ["float32"],
    }
    assert failed(plant(right), {"objective": objective, **claims}, **chosen) >= checks
    assert not failed(right, {"objective": objective, **claims}, **chosen)


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
