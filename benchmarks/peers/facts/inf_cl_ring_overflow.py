"""`cal_ring_loss` sums exponentials without subtracting their maximum: float32 overflows from a logit of 89 on.

package: inf-cl
case: extreme logits
ranks: 2
"""

import torch
import torch.distributed as dist
from inf_cl import cal_ring_loss

dist.init_process_group("gloo")
image = torch.eye(32).chunk(2)[dist.get_rank()]
loss = cal_ring_loss(image, image, scale=torch.tensor(100.0), head_dim=32)
print(f"loss of 32 orthogonal pairs at scale 100 = {loss:.4g}, right 0")
