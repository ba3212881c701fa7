"""Training at a batch that does not fit: gradient caching (GradCache) and micro-batch streaming (MBS), for torch.

``cached_step``, ``Cached`` and ``embed`` are one computation behind three calls: encode the batch chunk by chunk
without a graph, take the gradient of the loss by the embeddings, encode each chunk again and send its part of that
gradient into the encoder. ``stream`` cuts a batch that stays on the host into chunks on the device.
"""

from contrastile.backends.registry import require

try:
    import torch  # noqa: F401
except ModuleNotFoundError:
    require("contrastile.training", "torch")
    raise

from contrastile.training.cache import Cached, cached_step, embed, rank_at_1
from contrastile.training.chunks import Budget
from contrastile.training.distance import deep_distance
from contrastile.training.replay import Replay
from contrastile.training.stream import Stream, stream

__all__ = ["Budget", "Cached", "Replay", "Stream", "cached_step", "deep_distance", "embed", "rank_at_1", "stream"]
