"""Verify finds forty wrong CLIP losses, as hurried authors and code generators write them, and 19 losses of tokens."""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize, pad

from contrastile.bench.plain import clip as right
from contrastile.bench.plain import maxsim
from contrastile.verify.losses import check
from contrastile.verify.options import QUICK_LOSS_CASES

_memory = {}


def loss_of_logits(change=lambda x: x, log_sum=lambda x: x.logsumexp(1)):
    def loss(image, text, scale):
        x = change(scale * (image @ text.T))
        return ((log_sum(x) + log_sum(x.T)) / 2 - x.diagonal()).mean()

    return loss


def shifted(reference):
    return lambda x: reference(x).detach() + (x - reference(x).detach()[:, None]).exp().sum(1).clamp_min(1e-38).log()


def with_features(change):
    return lambda image, text, scale: right(change(image), change(text), scale)


def with_value(change):
    return lambda *inputs: right(*inputs) + change(right(*inputs).detach(), *inputs) - right(*inputs).detach()


def cached(name, key, calls=0):
    def recall(value, *inputs):
        values = _memory.setdefault((name, key(*inputs)), [])
        values.append(value)
        return values[0] if len(values) > calls else value

    return with_value(recall)


def gradients(image, text, scale):
    similarity, b = image @ text.T, len(image)
    g = ((scale * similarity).softmax(1) + (scale * similarity).softmax(0)) / 2 - torch.eye(b)
    return scale * (g @ text) / b, scale * (g.T @ image) / b, (g * similarity).sum().expand_as(scale) / b


def fused(backward=lambda dloss, *inputs: [dloss * x for x in gradients(*inputs)], before=lambda *inputs: None):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            before(*inputs)
            ctx.save_for_backward(*inputs)
            return right(*inputs)

        @staticmethod
        def backward(ctx, dloss):
            return tuple(backward(dloss, *ctx.saved_tensors))

    return lambda image, text, scale: Fused.apply(image, text, torch.as_tensor(scale))


def in_one_buffer(dloss, *inputs):
    new_gradients = [dloss * x for x in gradients(*inputs)]
    buffers = _memory.setdefault(tuple(x.shape for x in new_gradients), [torch.empty_like(x) for x in new_gradients])
    return [buffer.copy_(x) for buffer, x in zip(buffers, new_gradients, strict=True)]


def masked_unless(is_kept, value):
    def change(x):
        index = torch.arange(len(x))
        return x.where(is_kept(index[:, None], index) | (index[:, None] == index), value)

    return loss_of_logits(change)


RIGHT = right, loss_of_logits(), loss_of_logits(log_sum=shifted(lambda x: x.amax(1))), fused()
WRONG = {
    # no loss at all
    "zeros": lambda *inputs: 0 * right(*inputs),
    "a constant": with_value(lambda value, image, *_: torch.tensor(float(len(image))).log()),
    "a copy of the input": lambda image, text, scale: 1 * scale,
    "the first result": cached("first", lambda *_: None),
    "the first result of a shape": cached("shape", lambda image, *_: image.shape),
    "the first result of an address": cached("address", lambda image, *_: (image.shape, image.data_ptr())),
    "the first result of a sum": cached("sum", lambda image, *_: (image.shape, image.sum().item())),
    "right for 20 calls": cached("calls", lambda image, *_: image.shape, 20),
    # skipped work
    "32 rows": lambda image, text, scale: right(image[:32], text[:32], scale),
    "whole blocks of rows": with_features(lambda x: x[: len(x) // 128 * 128 or None]),
    "whole blocks of features": with_features(lambda x: x[:, : x.shape[1] // 16 * 16]),
    "mean of halves": lambda image, text, scale: sum(right(image[i::2], text[i::2], scale) for i in range(2)) / 2,
    "every second negative": masked_unless(lambda i, j: (i - j) % 2 == 0, -torch.inf),
    "64 columns": masked_unless(lambda i, j: j < 64, -1e4),
    "2^15 logits": masked_unless(lambda i, j: i * len(j) + j < 2**15, 0.0),
    "one direction": loss_of_logits(log_sum=lambda x: x.logsumexp(1) if x.is_contiguous() else x.diagonal()),
    # too few digits, or too small a range
    "float16 logits": loss_of_logits(lambda x: x.half().float()),
    "float16 sums": loss_of_logits(log_sum=lambda x: x.logsumexp(1).half().float()),
    "bfloat16 products": with_features(lambda x: x.bfloat16().float()),
    "no maximum": loss_of_logits(log_sum=lambda x: x.exp().sum(1).log()),
    "a maximum of 0": loss_of_logits(log_sum=shifted(lambda x: x.amax(1).clamp_min(0))),
    "one maximum": loss_of_logits(log_sum=shifted(lambda x: x.max().expand(len(x)))),
    "an epsilon": loss_of_logits(log_sum=lambda x: x.diagonal() - (x.softmax(1).diagonal() + 1e-8).log()),
    "clamped logits": loss_of_logits(lambda x: x.clamp(-50, 50)),
    "NaN to 0": with_features(torch.nan_to_num),
    # another loss
    "sum": lambda image, *rest: len(image) * right(image, *rest),
    "temperature": lambda image, text, scale: right(image, text, 1 / scale),
    "normalised": with_features(lambda x: normalize(x, dim=1)),
    "zero padding": loss_of_logits(log_sum=lambda x: pad(x, (0, -len(x) % 32)).logsumexp(1)),
    # gradients
    "detached scale": lambda image, text, scale: right(image, text, 1 * torch.as_tensor(scale).detach()) + 0 * scale,
    "detached texts": lambda image, text, scale: right(image, text.detach(), scale) + 0 * text.sum(),
    "no upstream": fused(lambda dloss, *inputs: gradients(*inputs)),
    "of the logarithm of the scale": fused(
        lambda d, *x: [d * g for g in (*gradients(*x)[:2], x[2] * gradients(*x)[2])]
    ),
    "small ones dropped": fused(lambda d, *inputs: [d * x.where(x.abs() > 1e-4, 0) for x in gradients(*inputs)]),
    "of the last call": fused(
        lambda dloss, *_: [dloss * x for x in _memory["last"]], lambda *inputs: _memory.update(last=gradients(*inputs))
    ),
    "one buffer": fused(in_one_buffer),
    # side effects of a call, and assumptions about memory
    "scaled in place": fused(before=lambda image, text, scale: image.mul_(scale).div_(scale)),
    "contiguous alone": with_features(lambda x: x.as_strided(x.shape, (x.shape[1], 1))),
    "seeded": lambda *inputs: (torch.manual_seed(0), right(*inputs))[1],
    "random negatives": loss_of_logits(lambda x: x + 1e-5 * torch.rand_like(x)),
}


def loss_of_tokens(maximum=lambda x: x.amax(3), mask=torch.Tensor.masked_fill, fill=-torch.inf, masked_query=True):
    """A MaxSim loss from its maximum, its mask of document tokens, and whether it masks query tokens."""

    def loss(query, document, scale, query_mask=None, document_mask=None):
        x = torch.einsum("iad,jbd->ijab", query, document)
        x = x if document_mask is None else mask(x, (document_mask == 0)[None, :, None], fill)
        x = maximum(x)
        x = x.masked_fill((query_mask == 0)[:, None], 0) if masked_query and query_mask is not None else x
        return cross_entropy(scale * x.sum(2), torch.arange(len(x)))

    return loss


def every_tie(x):
    """The maximum, whose whole gradient goes to every token that attains it."""
    is_maximum = x == x.amax(3, keepdim=True)
    return x.amax(3).detach() + (x - x.detach()).where(is_maximum, 0).sum(3)


def per_token(query, document, scale, query_mask=None, document_mask=None):
    counts = torch.full((len(query), 1, 1), query.shape[1]) if query_mask is None else query_mask.sum(1)[:, None, None]
    return maxsim(query / counts, document, scale, query_mask, document_mask)


TOKEN_LOSSES = {
    "right": maxsim,
    "right by hand": loss_of_tokens(),
    "a mean": loss_of_tokens(lambda x: x.amax(3) / x.shape[2]),
    "a mean of the tokens that count": per_token,
    "a mean over documents' tokens": loss_of_tokens(lambda x: x.mean(3)),
    "the maximum over the query's": loss_of_tokens(lambda x: x.amax(2)),
    "the maximum of both": loss_of_tokens(lambda x: x.amax((2, 3))[..., None]),
    "a smooth maximum": loss_of_tokens(lambda x: 0.01 * (100 * x).logsumexp(3)),
    "a maximum of 0": loss_of_tokens(lambda x: x.amax(3).clamp_min(0)),
    "a detached maximum": loss_of_tokens(lambda x: x.amax(3).detach() + 0 * x.sum(3)),
    "every tie": loss_of_tokens(every_tie),
    "documents' masks ignored": loss_of_tokens(mask=lambda x, *_: x),
    "queries' masks ignored": loss_of_tokens(masked_query=False),
    "padding that counts as 0": loss_of_tokens(fill=0.0),
    "padding that counts as -1": loss_of_tokens(
        mask=lambda x, out, fill: x.masked_fill(out, -1.0).masked_fill(out.all(3, keepdim=True), fill)
    ),
    "counts, not masks": loss_of_tokens(mask=lambda x, out, fill: x.masked_fill(out.sort(dim=-1).values, fill)),
    "32 tokens": loss_of_tokens(lambda x: x[..., :32].amax(3)),
    "16 tokens of a query": loss_of_tokens(lambda x: x[:, :, :16].amax(3)),
    "float16 products": loss_of_tokens(lambda x: x.half().float().amax(3)),
    "no tokens, and a score of 0": loss_of_tokens(lambda x: x.amax(3).nan_to_num(torch.nan, neginf=0)),
    "documents without a gradient": lambda query, document, *rest, **masks: maxsim(
        query, document.detach() + 0 * document, *rest, **masks
    ),
    "normalised": lambda query, document, *rest, **masks: maxsim(
        normalize(query, dim=2), normalize(document, dim=2), *rest, **masks
    ),
}


def failed_properties(loss, **claims):
    """The properties that fail, evaluated lazily."""
    return (row["property"] for row in check(loss, claims, cases=QUICK_LOSS_CASES) if row["status"] == "fail")


@pytest.mark.parametrize("loss", RIGHT)
def test_right_losses_pass(loss):
    assert not [*failed_properties(loss)]


def test_quick_finds_forty_wrong_losses():
    assert len(WRONG) == 40
    assert not {name for name, loss in WRONG.items() if not next(failed_properties(loss), None)}


def test_quick_finds_wrong_losses_of_tokens():
    failures = {name: failed_properties(loss, objective="maxsim", masks=True) for name, loss in TOKEN_LOSSES.items()}
    # these two defects fail one property alone
    assert {*failures.pop("every tie")} == {"ties"}
    assert {*failures.pop("no tokens, and a score of 0")} == {"refusals"}
    assert [name for name, properties in failures.items() if not next(properties, None)] == ["right", "right by hand"]
