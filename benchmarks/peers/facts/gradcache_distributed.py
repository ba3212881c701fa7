"""`DistributedContrastiveLoss` over n ranks gives 1 / n of the gradient.

package: GradCache
case: gradients under DDP
ranks: 2 3
"""

import torch
import torch.distributed as dist
from gradcache.loss import DistributedContrastiveLoss, SimpleContrastiveLoss

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
data, weight = torch.randn(12, 4, generator=torch.manual_seed(0)), torch.eye(4, requires_grad=True)
(truth,) = torch.autograd.grad(SimpleContrastiveLoss()(data @ weight, data), weight)
mine = data.chunk(n)[rank]
(found,) = torch.autograd.grad(DistributedContrastiveLoss()(mine @ weight, mine), weight)
dist.all_reduce(found)
print(f"encoder gradient / truth = {found.norm() / n / truth.norm():.4g}, right 1")
