"""Losses of several ranks, right and wrong, called as open_clip's."""

import os
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.distributed.nn

from contrastile.bench.plain import clip


class Loss(torch.nn.Module):
    """Every rank has the loss of all features, and gradients reach its own alone: open_clip's default."""

    claims = MappingProxyType({"ranks": (2, 3), "equal_shards": True})

    def __init__(self, rank=0, world_size=1):
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def forward(self, image_features, text_features, logit_scale):
        features = image_features, text_features
        if self.world_size > 1:
            features = map(self.gathered, features)
        return clip(*features, logit_scale)

    def gathered(self, x):
        found = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(found, x.detach().contiguous())
        found[self.rank] = x
        return torch.cat(found)


class WithGradients(Loss):
    """As with ``gather_with_grad``."""

    def gathered(self, x):
        return torch.cat(torch.distributed.nn.all_gather(x.contiguous()))


class Ending(WithGradients):
    """Right on two ranks; the last of three raises."""

    def forward(self, *args):
        if (self.rank, self.world_size) == (2, 3):
            raise ArithmeticError("out of order")
        return super().forward(*args)


class Dying(Loss):
    """One rank is gone without a word."""

    claims = MappingProxyType({"ranks": 2})

    def forward(self, *args):
        if self.rank == 1:
            os._exit(7)
        return super().forward(*args)
