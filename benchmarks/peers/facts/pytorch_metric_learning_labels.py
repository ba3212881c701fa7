"""With one tensor as `labels` and `ref_labels` the pairs (i, i) count as a sample with itself, and the loss is 0.

package: pytorch-metric-learning
case: value
"""

import torch
from pytorch_metric_learning.losses import NTXentLoss

image, text = torch.randn(2, 8, 4, generator=torch.manual_seed(0))
labels = torch.arange(8)
loss = NTXentLoss()(image, labels, ref_emb=text, ref_labels=labels)
expected = NTXentLoss()(image, labels, ref_emb=text, ref_labels=labels.clone())
print(f"loss = {loss:.4g}, right {expected:.4g}")
