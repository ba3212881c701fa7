"""With its defaults, `ClipLoss` over n ranks gives the encoders 1 / n of the gradient, and the scale all of it.

package: open_clip_torch
case: gradients under DDP
ranks: 2 3
"""

import torch
import torch.distributed as dist
from open_clip import ClipLoss

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
data, weight = torch.randn(12, 4, generator=torch.manual_seed(0)), torch.eye(4, requires_grad=True)
(truth,) = torch.autograd.grad(ClipLoss()(data @ weight, data, 1.0), weight)
mine = data.chunk(n)[rank]
(found,) = torch.autograd.grad(ClipLoss(rank=rank, world_size=n)(mine @ weight, mine, 1.0), weight)
dist.all_reduce(found)
print(f"encoder gradient / truth = {found.norm() / n / truth.norm():.4g}, right 1")
