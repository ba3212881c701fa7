"""Losses in plain PyTorch, one for each objective, and one by hand."""

import torch
from torch.nn.functional import cross_entropy

from contrastile.bench.plain import clip, info_nce, nt_xent, sigmoid, sup_con


def clip_by_hand(image, text, scale):
    x = scale * (image @ text.T)
    return ((x.logsumexp(1) + x.logsumexp(0)) / 2 - x.diagonal()).mean()


def maxsim(query, document, scale, query_mask=None, document_mask=None, symmetric=False):
    x = torch.einsum("iad,jbd->ijab", query, document)
    if document_mask is not None:
        x = x.masked_fill(document_mask[None, :, None] == 0, -torch.inf)
    x = x.amax(3)
    x = scale * (x if query_mask is None else x.masked_fill(query_mask[:, None] == 0, 0)).sum(2)
    here = torch.arange(len(x))
    return (cross_entropy(x, here) + cross_entropy(x.T, here)) / 2 if symmetric else cross_entropy(x, here)


OBJECTIVES = {
    "clip_loss": (clip, clip_by_hand),
    "info_nce": (info_nce,),
    "sigmoid_loss": (sigmoid,),
    "nt_xent": (nt_xent,),
    "sup_con": (sup_con,),
    "maxsim": (maxsim,),
}
