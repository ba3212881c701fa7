"""Losses as their papers' authors would write them in torch, one for each objective."""

import torch
from torch.nn import functional


def clip(image, text, scale, ids=None):
    x = scale * image @ text.T
    own = torch.arange(len(image), device=image.device)
    if ids is not None:
        x = x.masked_fill((ids[:, None] == ids) & (own[:, None] != own), -torch.inf)
    return (functional.cross_entropy(x, own) + functional.cross_entropy(x.T, own)) / 2


def clip_by_hand(image, text, scale):
    x = scale * (image @ text.T)
    return ((x.logsumexp(1) + x.logsumexp(0)) / 2 - x.diagonal()).mean()


def info_nce(query, key, scale):
    x = scale * (query @ key.T)
    return (x.logsumexp(1) - x.diagonal()).mean()


def sigmoid(image, text, scale, bias):
    x = scale * (image @ text.T) + bias
    sign = 2 * torch.eye(len(x), dtype=x.dtype) - 1
    return -functional.logsigmoid(sign * x).sum(1).mean()


def nt_xent(view_a, view_b, scale):
    views = torch.cat([view_a, view_b])
    x = scale * views @ views.T
    x = x.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
    return functional.cross_entropy(x, torch.arange(len(x)).roll(len(view_a)))


def sup_con(features, labels, scale):
    itself = torch.eye(len(features), dtype=torch.bool)
    x = (scale * features @ features.T).masked_fill(itself, -torch.inf)
    positive = (labels[:, None] == labels) & ~itself
    terms = (x - x.logsumexp(1, keepdim=True)).masked_fill(~positive, 0).sum(1) / positive.sum(1).clamp(1)
    return -terms.sum() / positive.any(1).sum().clamp(1)


OBJECTIVES = {
    "clip_loss": (clip, clip_by_hand),
    "info_nce": (info_nce,),
    "sigmoid_loss": (sigmoid,),
    "nt_xent": (nt_xent,),
    "sup_con": (sup_con,),
}
