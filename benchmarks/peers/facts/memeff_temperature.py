"""One fixed maximum, 1 / temperature, serves all logits: where they are all 200 lower the loss is not finite.

package: memeff
case: extreme logits
interpreter: yes
"""

import torch
from memeff import MemoryEfficientCLIPLoss

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
image = torch.eye(32)[:16]
text = torch.eye(32)[16:]
found = MemoryEfficientCLIPLoss(temperature=1 / 200, stable=False)(image, text)
print(f"loss of 16 orthogonal pairs at scale 200 = {found:.4g}, right {torch.log(torch.tensor(16.0)):.4g}")
