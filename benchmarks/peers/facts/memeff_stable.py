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
(expected,) = torch.autograd.grad(MemoryEfficientCLIPLoss(temperature=1.0, stable=False)(image, text), image)
(gradient,) = torch.autograd.grad(MemoryEfficientCLIPLoss(temperature=1.0)(image, text), image)
print(f"gradient of 64 pairs / truth = {gradient.norm() / expected.norm():.4g}, right 1")
