"""A transposed view gives another loss than its contiguous copy, and no error.

package: inf-cl
case: value
interpreter: yes
"""

import torch
from inf_cl import cal_flash_loss

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
image = torch.arange(256.0).reshape(16, 16).T / 256
found = cal_flash_loss(image, image, head_dim=16).mean()
copy = image.contiguous()
right = cal_flash_loss(copy, copy, head_dim=16).mean()
print(f"loss of a transposed view = {found:.4g}, right {right:.4g}")
