"""`DistributedLossWrapper(efficient=True)` drops the pairs (i, i) of two towers: the loss of image-text pairs is 0.

package: pytorch-metric-learning
case: value
ranks: 2
"""

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import NTXentLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

dist.init_process_group("gloo")
rank, label = dist.get_rank(), torch.arange(8)
image, text = torch.randn(2, 8, 4, generator=torch.manual_seed(0))
expected = NTXentLoss()(image, label, ref_emb=text, ref_labels=label.clone())
(image, label), (text, ref_label) = (
    [x.chunk(2)[rank] for x in pair] for pair in ((image, label), (text, label.clone()))
)
loss = DistributedLossWrapper(NTXentLoss(), efficient=True)(image, label, ref_emb=text, ref_labels=ref_label)
print(f"loss / (2 x truth) = {loss / 2 / expected:.4g}, right 1")
