"""`ClipLoss(local_loss=True)` without `gather_with_grad` gives a gradient that points elsewhere than the loss's own.

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
mine, loss = data.chunk(n)[rank], ClipLoss(local_loss=True, rank=rank, world_size=n)
(found,) = torch.autograd.grad(loss(mine @ weight, mine, 1.0), weight)
dist.all_reduce(found)
print(f"cosine of encoder gradient and truth = {(found * truth).sum() / found.norm() / truth.norm():.4g}, right 1")
