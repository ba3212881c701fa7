"""`--accum-freq k` multiplies the gradient of the scale by k (here `train_one_epoch` itself, 8 pairs, k = 1 and k = 4).

package: open_clip_torch
case: scale gradient
"""

from argparse import Namespace

import torch
from open_clip import ClipLoss
from open_clip_train.train import train_one_epoch
from torch.utils.data import DataLoader, TensorDataset

options = dict.fromkeys(("distill", "horovod", "wandb", "grad_clip_norm")) | {"skip_scheduler": True, "rank": 1}
pairs, model, gradients = TensorDataset(*torch.randn(2, 8, 4, generator=torch.manual_seed(0))), torch.nn.Identity(), []
model.logit_scale = torch.nn.Parameter(torch.zeros(()))
model.forward = lambda i, t: {"image_features": i, "text_features": t, "logit_scale": model.logit_scale.exp()}
for k in (1, 4):
    args, loader = Namespace(device="cpu", precision="fp32", accum_freq=k, **options), DataLoader(pairs, 8 // k)
    loader.num_batches, loader.num_samples = k, 8
    data = {"train": Namespace(dataloader=loader, set_epoch=id)}
    train_one_epoch(model, data, ClipLoss(), 0, torch.optim.SGD(model.parameters(), 0.0), None, None, None, args)
    gradients.append(model.logit_scale.grad.item())
print(f"scale gradient with k = 4 / with k = 1 = {gradients[1] / gradients[0]:.4g}, right 1")
