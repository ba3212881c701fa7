"""Anybody's loss through the cases: right ones pass in every dtype, and each planted defect fails its property."""

import functools

import pytest
import torch
from test_wrong_losses import of_logits
from torch.nn import functional

import contrastile
from contrastile.bench import plain
from contrastile.bench.plain import clip
from contrastile.verify.losses import Claims, Loss, check
from contrastile.verify.losses.allowed import rounded_once
from contrastile.verify.losses.cases import build
from contrastile.verify.losses.properties import ONE_CALL

OBJECTIVES = {
    "clip_loss": clip,
    "clip_loss by hand": of_logits(),
    **{name: getattr(plain, name) for name in ("info_nce", "nt_xent", "sup_con", "maxsim")},
    "sigmoid_loss": plain.sigmoid,
}
FEW = ("ragged", "certain", "opposite", "scale-0", "nan")
both = contrastile.value_and_grad(contrastile.clip_loss)


def statuses(rows):
    """The cases and properties of each status."""
    found = {}
    for row in rows:
        found.setdefault(row["status"], set()).add((row["case"], row["property"]))
    assert found
    return found


def failed(loss, claims=None, **chosen):
    """The properties that fail."""
    return {row["property"] for row in check(loss, claims, **chosen) if row["status"] == "fail"}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_plain_losses_are_within_the_bounds_of_a_plain_computation(objective, dtype):
    loss, objective = OBJECTIVES[objective], objective.split()[0]
    rows = list(check(loss, {"objective": objective, "dtypes": dtype}, cases=FEW))
    counted = [row for row in rows if row["dtype"] == dtype and row["status"] != "unclaimed"]
    skipped = {"plain"} if dtype == "float64" or objective == "maxsim" else set()
    assert {row["status"] for row in counted if row["property"] not in skipped} == {"pass"}, counted
    assert {row["property"] for row in counted} == set(ONE_CALL) - {"linear-memory", "sizes"}


def test_a_tuple_holds_gradients_whether_that_is_said_or_not():
    def undeclared(image, text, scale):
        value, gradients = both(image, text, scale)
        return value, *gradients

    found = statuses(check(undeclared, cases=["hot"]))
    assert "fail" not in found
    assert ("hot", "gradients") in found["pass"]
    assert found["skip"] >= {("hot", "upstream")}

    def twofold(image, text, scale):
        value, image_gradient, *others = undeclared(image, text, scale)
        return value, 2 * image_gradient, *others

    assert failed(twofold, cases=["hot"]) == {"gradients"}


def masked(image, text, scale, ids):
    """False negatives count with a finite logit."""
    x = (scale * image @ text.T).masked_fill((ids[:, None] == ids).fill_diagonal_(False), -1e4)
    here = torch.arange(len(x))
    return (functional.cross_entropy(x, here) + functional.cross_entropy(x.T, here)) / 2


def wrong_at(where):
    return lambda image, *rest: clip(image, *rest) * (1.01 if where(image) else 1.0)


def doubled_gradient(*args):
    value = clip(*args)
    return 2 * value - value.detach()


WRONG = [
    ("ids@cold value", masked, {"ids": True}),
    ("smoke determinism", lambda *given: clip(*given) * (1 + torch.rand(()) / 2**9), {}),
    ("memory linear-memory", clip, {"linear_memory": True}),
    ("sizes sizes", wrong_at(lambda x: len(x) % 128 == 1), {"largest_batch": 200}),
    ("sizes sizes", wrong_at(lambda x: x.shape[1] == 768), {"largest_batch": 200}),
    # the bounds of a 16-bit state have room for it, and a multiple of the plain computation's error has none
    ("smoke plain", doubled_gradient, {"dtypes": "bfloat16"}),
]
"""The check that fails, by what it fails, and the claims: beside those of test_wrong_losses.py and the mutants."""


@pytest.mark.parametrize(("where", "loss", "claims"), WRONG)
def test_a_wrong_loss_fails_where_a_right_one_passes(where, loss, claims):
    case, name = where.split()
    dtype = claims.get("dtypes", "float32")
    chosen = {"cases": [case], "properties": [name], "dtypes": [dtype]}
    (row,) = [row for row in check(loss, claims, **chosen) if row["dtype"] == dtype]
    assert (row["status"], row["case"], row["property"]) == ("fail", case, name)
    assert row["ratio"] >= 1
    if loss is not clip:
        assert not failed(clip, claims, **chosen)


def test_a_loss_that_normalises_has_gradients_of_its_own():
    def normalising(image, text, scale):
        return clip(functional.normalize(image, dim=1), functional.normalize(text, dim=1), scale)

    claims = {"normalises": True, "dtypes": ("float32", "float64")}
    assert not failed(normalising, claims, cases=["ragged", "hot"])
    assert "gradients" in failed(normalising, cases=["ragged"])
    assert "gradients" in failed(clip, claims, cases=["ragged"])


def test_the_cases_fit_what_is_claimed():
    seen = set()

    def picky(image, text, scale):
        seen.add(tuple(image.shape))
        assert isinstance(scale, float)
        return clip(image, text, scale)

    claims = {"scale_gradient": False, "batch_multiple": 16, "smallest_batch": 64, "largest_batch": 256}
    few = ["one-pair", "ragged", "hot", "large-logits", "norm-30", "ids", "shards"]
    rows = list(check(picky, claims | {"width_multiple": 64, "largest_logit": 250.0}, cases=few))
    found = statuses(rows)
    assert "fail" not in found
    assert seen
    assert all(64 <= b <= 256 and b % 16 == 0 and d % 64 == 0 for b, d in seen)
    reasons = {row["reason"] for row in rows if row["status"] == "unclaimed"}
    rows = check(plain.info_nce, {"objective": "info_nce"}, cases=["negatives", "positives", "calls"])
    reasons |= {row["reason"] for row in rows if row["status"] == "unclaimed"}
    assert {"a batch of 1 rows", "the gradient of the scale", "equal ids", "several ranks"} <= reasons
    assert {"negatives", "positives", "integers", "float16 features", "float64 features"} <= reasons
    assert any(reason.startswith("logits of") for reason in reasons)


def test_claims_can_stand_on_the_loss_and_be_replaced():
    def loss(image, text, scale): ...

    assert Loss.of(loss).claims == Claims()
    loss.claims = {"objective": "info_nce", "dtypes": ["bfloat16"]}
    assert Loss.of(loss).claims == Claims(objective="info_nce", dtypes=("bfloat16",))
    assert Loss.of(loss, objective="clip_loss").claims.objective == "clip_loss"
    assert Loss.of(loss, Claims(ids=True)).claims == Claims(ids=True)


def test_a_class_that_takes_its_rank_is_made_and_claims_ranks():
    made = []

    class Module(torch.nn.Module):
        def __init__(self, smoothing=0.0, rank=0, world_size=1):
            super().__init__()
            made.append((smoothing, rank, world_size))

        def forward(self, image, text, scale):
            return {"contrastive_loss": clip(image, text, scale)}

    for target in (Module, functools.partial(Module, 0.5)):
        loss = Loss.of(target)
        assert loss.claims.ranks == (2, 3)
        assert not failed(Loss.of(loss, {}), cases=["smoke"])
    loss.on_rank(1, 3)
    assert made == [(0.0, 0, 1), (0.5, 0, 1), (0.5, 1, 3)]
    assert not failed(Module(), cases=["smoke"])
    # a loss that is told its rank at each call is no class
    assert not Loss.of(lambda image, text, scale, rank=0, world_size=1: None).claims.ranks


def test_cases_are_equal_where_the_same_is_right():
    first, same = (build("ragged", "float32", Claims(scale_gradient=learns)) for learns in (True, False))
    assert first is not same
    assert (first, hash(first)) == (same, hash(same))
    others = {"objective": "info_nce", "normalises": True, "state": "float64", "precision": "tf32"}
    for name, value in others.items():
        assert first != build("ragged", "float32", Claims(**{name: value}))
    assert first != build("ragged", "float64", Claims())
    assert first != build("hot", "float32", Claims())
    assert first != build("ragged", "float32", Claims(), rounded_once(first))
