"""With `DistributedLossWrapper(efficient=True)` the gradient points elsewhere than the loss's own.

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
weight, loss = torch.eye(4, requires_grad=True), DistributedLossWrapper(NTXentLoss(), efficient=True)
(truth,) = torch.autograd.grad(NTXentLoss()(data @ weight, label), weight)
(found,) = torch.autograd.grad(loss(data.chunk(n)[rank] @ weight, label.chunk(n)[rank]), weight)
dist.all_reduce(found)
print(f"cosine of encoder gradient and truth = {(found * truth).sum() / found.norm() / truth.norm():.4g}, right 1")
