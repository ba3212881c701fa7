"""`NTXentLoss` forms positive pairs by negative pairs: memory grows with the cube of the batch, not its square.

package: pytorch-metric-learning
case: memory growth
"""

import torch
from pytorch_metric_learning.losses import NTXentLoss
from torch.autograd.graph import saved_tensors_hooks

saved = []
for b in (32, 64):
    x, kept = torch.randn(b, 8, requires_grad=True), {}
    with saved_tensors_hooks(lambda t, kept=kept: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        NTXentLoss()(x, torch.arange(b), ref_emb=x.detach(), ref_labels=torch.arange(b))
    saved.append(sum(kept.values()))
print(f"bytes saved for backward, 64 pairs / 32 pairs = {saved[1] / saved[0]:.4g}, right 4")
