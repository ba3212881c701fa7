"""In one process without a process group `scale=` has no backward: it all-reduces its gradient.

package: inf-cl
case: scale gradient
"""

import torch
from inf_cl.ring import GradientGather

try:
    # the line of cal_inf_loss and cal_ring_loss that every scale passes through
    raised = GradientGather.apply(torch.ones((), requires_grad=True)).backward() or "nothing"
except Exception as error:
    raised = type(error).__name__
print(f"backward raises = {raised}, right nothing")
