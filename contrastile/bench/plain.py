"""Each loss as its paper's authors would write it in PyTorch: by the whole matrix of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def clip(image: Any, text: Any, scale: Any, ids: Any = None) -> Any:
    """``(CE(s I T^t) + CE(s T I^t)) / 2``, open_clip's formula; logits of equal ids are set to -inf."""
    target = torch.arange(len(image), device=image.device)
    logits = [scale * image @ text.T, scale * text @ image.T]
    if ids is not None:
        false_negative = (ids[:, None] == ids).fill_diagonal_(False)
        logits = [x.masked_fill(false_negative, -torch.inf) for x in logits]
    return (functional.cross_entropy(logits[0], target) + functional.cross_entropy(logits[1], target)) / 2


def info_nce(query: Any, key: Any, scale: Any) -> Any:
    return functional.cross_entropy(scale * query @ key.T, torch.arange(len(query), device=query.device))


def sigmoid(image: Any, text: Any, scale: Any, bias: Any) -> Any:
    logits = scale * image @ text.T + bias
    signs = 2 * torch.eye(len(image), device=image.device, dtype=image.dtype) - 1
    return -functional.logsigmoid(signs * logits).sum() / len(image)


def nt_xent(view_a: Any, view_b: Any, scale: Any) -> Any:
    views = torch.cat((view_a, view_b))
    logits = (scale * views @ views.T).fill_diagonal_(-torch.inf)
    return functional.cross_entropy(logits, torch.arange(len(views), device=views.device).roll(len(view_a)))


def sup_con(features: Any, labels: Any, scale: Any) -> Any:
    log_p = functional.log_softmax((scale * features @ features.T).fill_diagonal_(-torch.inf), dim=1)
    is_positive = (labels[:, None] == labels).fill_diagonal_(False)
    count = is_positive.sum(1)
    return -(log_p.masked_fill(~is_positive, 0).sum(1) / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)


def maxsim(
    query: Any, document: Any, scale: Any, query_mask: Any = None, document_mask: Any = None, symmetric: bool = False
) -> Any:
    """ColBERT's scores of (b, tokens, d), in ColBERTv2's cross entropy with in-batch negatives."""
    products = torch.einsum("iad,jbd->ijab", query, document)
    if document_mask is not None:
        products = products.masked_fill(document_mask[None, :, None] == 0, -torch.inf)
    nearest = products.amax(3)
    if query_mask is not None:
        nearest = nearest.masked_fill(query_mask[:, None] == 0, 0)
    logits, target = scale * nearest.sum(2), torch.arange(len(query), device=query.device)
    forward = functional.cross_entropy(logits, target)
    return (forward + functional.cross_entropy(logits.T, target)) / 2 if symmetric else forward
