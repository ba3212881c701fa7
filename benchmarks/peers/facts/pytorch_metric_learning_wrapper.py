"""`DistributedLossWrapper` returns n times the loss; the gradient is right after DDP's mean.

package: pytorch-metric-learning
case: gradients under DDP
ranks: 2 3
"""

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import NTXentLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
data, label = torch.randn(12, 4, generator=torch.manual_seed(0)), torch.arange(12) // 2
truth, found = (
    NTXentLoss()(data, label),
    DistributedLossWrapper(NTXentLoss())(data.chunk(n)[rank], label.chunk(n)[rank]),
)
print(f"loss / truth = {found / truth:.4g}, right 1")
