"""Losses of several ranks, right and wrong, with the signature of open_clip's loss."""

import os
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.distributed.nn

from contrastile.bench.plain import clip


class Loss(torch.nn.Module):
    """The loss of all features, with gradients of the rank's own features alone: open_clip's default."""

    claims = MappingProxyType({"ranks": (2, 3), "equal_shards": True})

    def __init__(self, rank=0, world_size=1):
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def forward(self, image_features, text_features, logit_scale):
        features = image_features, text_features
        if self.world_size > 1:
            features = map(self.gather, features)
        return clip(*features, logit_scale)

    def gather(self, x):
        shards = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(shards, x.detach().contiguous())
        shards[self.rank] = x
        return torch.cat(shards)


class WithGradients(Loss):
    """open_clip's loss with ``gather_with_grad``."""

    def gather(self, x):
        return torch.cat(torch.distributed.nn.all_gather(x.contiguous()))


class OffByAThousandth(WithGradients):
    """A loss that is .1 % too large."""

    def forward(self, *args):
        return 1.001 * super().forward(*args)


class RoundedAtTheEnd(WithGradients):
    """A loss in float32 that returns the features' dtype."""

    def forward(self, image_features, text_features, logit_scale):
        value = super().forward(image_features.float(), text_features.float(), logit_scale)
        return value.to(image_features.dtype)


class RaisingOnLastRank(WithGradients):
    """A loss that is right on two ranks, and of which the last of three ranks raises."""

    def forward(self, *args):
        if (self.rank, self.world_size) == (2, 3):
            raise ArithmeticError("out of order")
        return super().forward(*args)


class ExitingOnOneRank(Loss):
    """A loss of which rank 1 exits without a message."""

    claims = MappingProxyType({"ranks": 2})

    def forward(self, *args):
        if self.rank == 1:
            os._exit(7)
        return super().forward(*args)
