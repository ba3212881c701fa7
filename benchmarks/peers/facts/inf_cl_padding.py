"""The kernel takes the row maximum over zero padding: with 65 pairs and every logit at -200 the loss is infinite.

package: inf-cl
case: extreme logits
interpreter: yes
"""

import torch
from inf_cl import cal_flash_loss

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
image = torch.ones(65, 16) / 4
loss = cal_flash_loss(image, -image, scale=200.0, head_dim=16).mean()
print(f"loss of 65 equal pairs = {loss:.4g}, right {torch.log(torch.tensor(65.0)):.4g}")
