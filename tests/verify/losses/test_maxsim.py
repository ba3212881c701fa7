"""Wrong MaxSim losses: ``--quick`` finds every one, and right ones pass."""

import torch
from plain_losses import maxsim as right
from torch.nn.functional import cross_entropy, normalize

from contrastile.verify.losses import check
from contrastile.verify.options import QUICK_LOSS_CASES


def of_tokens(largest=lambda x: x.amax(3), without=torch.Tensor.masked_fill, fill=-torch.inf, kept=True):
    """A loss by its maximum over products, what it does where a document's token does not count, and a query's."""

    def loss(query, document, scale, query_mask=None, document_mask=None):
        x = torch.einsum("iad,jbd->ijab", query, document)
        x = x if document_mask is None else without(x, (document_mask == 0)[None, :, None], fill)
        x = largest(x)
        x = x.masked_fill((query_mask == 0)[:, None], 0) if kept and query_mask is not None else x
        return cross_entropy(scale * x.sum(2), torch.arange(len(x)))

    return loss


def every_tie(x):
    """The maximum, with the whole gradient at each token that has it."""
    alike = x == x.amax(3, keepdim=True)
    return x.amax(3).detach() + (x - x.detach()).where(alike, 0).sum(3)


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
    "every tie": of_tokens(every_tie),
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


CLAIMS = {"objective": "maxsim", "masks": True}


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
