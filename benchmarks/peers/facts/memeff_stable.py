"""With its defaults the gradient is `sqrt(batch * temperature)` times the loss's own, as its docstring says.

package: memeff
case: gradients
interpreter: yes
"""

import torch
from memeff import MemoryEfficientCLIPLoss

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
image = torch.eye(64, requires_grad=True)
text = torch.eye(64).roll(1, 0)
(truth,) = torch.autograd.grad(MemoryEfficientCLIPLoss(temperature=1.0, stable=False)(image, text), image)
(found,) = torch.autograd.grad(MemoryEfficientCLIPLoss(temperature=1.0)(image, text), image)
print(f"gradient of 64 pairs / truth = {found.norm() / truth.norm():.4g}, right 1")
