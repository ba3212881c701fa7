"""Over n ranks the gradient of `scale` is n times too large (`cal_ring_loss`; `cal_inf_loss` wraps it the same way).

package: inf-cl
case: gradients under DDP
ranks: 2 3
"""

import torch
import torch.distributed as dist
from inf_cl import cal_ring_loss

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
data, scale = torch.randn(2, 12, 16, generator=torch.manual_seed(0)), torch.ones((), requires_grad=True)
truth = torch.nn.functional.cross_entropy(scale * data[0] @ data[1].T, torch.arange(12))
(right,) = torch.autograd.grad(truth, scale)
query, key = data.chunk(n, dim=1)[rank]
(found,) = torch.autograd.grad(cal_ring_loss(query, key, scale=scale, head_dim=16), scale)
dist.all_reduce(found)
print(f"scale gradient / truth = {found / n / right:.4g}, right 1")
