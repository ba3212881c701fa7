"""MaxSim losses: wrong ones are found by ``--quick``, and a right one is within its bounds on drawn texts with ties."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_losses import maxsim as right
from torch.nn.functional import cross_entropy, normalize

from contrastile.verify.losses import Claims, Loss, check
from contrastile.verify.losses.arguments import Arguments, rounded
from contrastile.verify.losses.cases import BATCHES, LossCase
from contrastile.verify.losses.maxsim import MASKS
from contrastile.verify.losses.properties import LossTrial
from contrastile.verify.options import QUICK_LOSS_CASES

CLAIMS = {"objective": "maxsim", "masks": True}


def of_tokens(largest=lambda x: x.amax(3), without=torch.Tensor.masked_fill, fill=-torch.inf, kept=True):
    """A loss by its maximum over products, what it does where a document's token does not count, and a query's."""

    def loss(query, document, scale, query_mask=None, document_mask=None):
        x = torch.einsum("iad,jbd->ijab", query, document)
        x = x if document_mask is None else without(x, (document_mask == 0)[None, :, None], fill)
        x = largest(x)
        x = x.masked_fill((query_mask == 0)[:, None], 0) if kept and query_mask is not None else x
        return cross_entropy(scale * x.sum(2), torch.arange(len(x)))

    return loss


class EveryTie(torch.autograd.Function):
    """The maximum, with the whole gradient at each token that has it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x == x.amax(3, keepdim=True))
        return x.amax(3)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[..., None] * ctx.saved_tensors[0]


def per_token(query, document, scale, query_mask=None, document_mask=None):
    counts = torch.full((len(query), 1, 1), query.shape[1]) if query_mask is None else query_mask.sum(1)[:, None, None]
    return right(query / counts, document, scale, query_mask, document_mask)


WRONG = {
    "a mean": of_tokens(lambda x: x.amax(3) / x.shape[2]),
    "a mean of the tokens that count": per_token,
    "a mean over documents' tokens": of_tokens(lambda x: x.mean(3)),
    "the maximum over the query's": of_tokens(lambda x: x.amax(2)),
    "the maximum of both": of_tokens(lambda x: x.amax((2, 3))[..., None]),
    "a smooth maximum": of_tokens(lambda x: 0.01 * (100 * x).logsumexp(3)),
    "a maximum of 0": of_tokens(lambda x: x.amax(3).clamp_min(0)),
    "a detached maximum": of_tokens(lambda x: x.amax(3).detach() + 0 * x.sum(3)),
    "every tie": of_tokens(EveryTie.apply),
    "documents' masks ignored": of_tokens(without=lambda x, *_: x),
    "queries' masks ignored": of_tokens(kept=False),
    "padding that counts as 0": of_tokens(fill=0.0),
    "counts, not masks": of_tokens(without=lambda x, out, fill: x.masked_fill(out.sort(dim=-1).values, fill)),
    "32 tokens": of_tokens(lambda x: x[..., :32].amax(3)),
    "16 tokens of a query": of_tokens(lambda x: x[:, :, :16].amax(3)),
    "float16 products": of_tokens(lambda x: x.half().float().amax(3)),
    "no tokens, and a score of 0": of_tokens(lambda x: x.amax(3).nan_to_num(torch.nan, neginf=0)),
    "documents without a gradient": lambda query, document, *rest, **masks: right(
        query, document.detach() + 0 * document, *rest, **masks
    ),
    "normalised": lambda query, document, *rest, **masks: right(
        normalize(query, dim=2), normalize(document, dim=2), *rest, **masks
    ),
}


def fails(loss):
    return {row["property"] for row in check(loss, CLAIMS, cases=QUICK_LOSS_CASES) if row["status"] == "fail"}


def test_quick_finds_wrong_losses_of_tokens():
    assert not fails(right)
    assert not fails(of_tokens())
    missed = {name for name, loss in WRONG.items() if not fails(loss)}
    assert not missed
    # what one property alone is for
    assert fails(WRONG["every tie"]) == {"ties"}
    assert fails(WRONG["no tokens, and a score of 0"]) == {"refusals"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@given(seed=st.integers(0, 2**32 - 1), sizes=st.tuples(*[st.integers(1, 5)] * 4), coarse=st.booleans())
def test_a_right_loss_is_within_its_bounds_on_drawn_texts(dtype, seed, sizes, coarse):
    draw = np.random.default_rng(seed)
    b, q, t, d = sizes
    features = draw.standard_normal((b, q, d)), draw.standard_normal((b, t, d))
    if coarse:
        # many products of small integers are equal
        features = tuple(np.round(x) for x in features)
    masks = [np.maximum(draw.integers(0, 2, x.shape[:2]), np.arange(x.shape[1]) == 0) for x in features]
    arguments = Arguments(features, draw.uniform(-30, 30), keywords=dict(zip(MASKS, masks, strict=True)))
    claims = Claims(**CLAIMS, dtypes=dtype)
    case = LossCase(replace(BATCHES["masked"], name="drawn"), dtype, rounded(arguments, dtype), claims)
    trial = LossTrial(Loss.of(right, claims), case)
    assert trial.compare(trial.result, trial.fields).ratio < 1
