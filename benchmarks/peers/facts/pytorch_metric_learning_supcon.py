"""`SupConLoss` averages over samples whose loss is not 0 (its default reducer): certain samples raise the loss.

package: pytorch-metric-learning
case: value
"""

import torch
from pytorch_metric_learning.losses import SupConLoss

features = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.2, 0.98]])
labels = torch.tensor([0, 0, 1, 1])
logits = 20 * torch.nn.functional.normalize(features).matmul(torch.nn.functional.normalize(features).T)
truth = torch.nn.functional.cross_entropy(logits.fill_diagonal_(-torch.inf), torch.tensor([1, 0, 3, 2]))
print(f"loss / mean over the samples = {SupConLoss(temperature=0.05)(features, labels) / truth:.4g}, right 1")
