"""Losses in plain PyTorch, one for each objective, and one by hand."""

from contrastile.bench.plain import clip, info_nce, maxsim, nt_xent, sigmoid, sup_con


def clip_by_hand(image, text, scale):
    x = scale * (image @ text.T)
    return ((x.logsumexp(1) + x.logsumexp(0)) / 2 - x.diagonal()).mean()


OBJECTIVES = {
    "clip_loss": (clip, clip_by_hand),
    "info_nce": (info_nce,),
    "sigmoid_loss": (sigmoid,),
    "nt_xent": (nt_xent,),
    "sup_con": (sup_con,),
    "maxsim": (maxsim,),
}
