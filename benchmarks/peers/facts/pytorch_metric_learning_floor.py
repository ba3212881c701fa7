"""`NTXentLoss` takes the logarithm of `p + 1e-38`: no pair costs more than 87.3.

package: pytorch-metric-learning
case: extreme logits
"""

import torch
from pytorch_metric_learning.losses import NTXentLoss

image = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
text = -image.detach()
found = NTXentLoss(temperature=0.01)(image, torch.arange(2), ref_emb=text, ref_labels=torch.arange(2))
print(f"loss of two swapped pairs at scale 100 = {found:.4g}, right 200")
