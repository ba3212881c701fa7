"""SigLIP on two processes: the loss is that of one process with the whole batch.

``torchrun --nproc-per-node 2 siglip.py`` takes some seconds on a CPU. Any number of
processes prints the same.
"""

import torch
import torch.distributed as dist
from pictures import KINDS, WORDS, bags, caption, draw, tower
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import contrastile


class Towers(torch.nn.Module):
    """A SigLIP: two towers, a scale and a bias that learn."""

    def __init__(self):
        super().__init__()
        self.image, self.text = tower(64), torch.nn.Linear(len(WORDS), 64)
        self.log_scale = torch.nn.Parameter(torch.tensor(10.0).log())
        self.bias = torch.nn.Parameter(torch.tensor(-10.0))

    def forward(self, pictures, words):
        """The normalised features, scale and bias."""
        image = normalize(self.image(pictures), dim=1)
        text = normalize(self.text(words), dim=1)
        return image, text, self.log_scale.exp(), self.bias


def inputs(kinds):
    """Pictures of these kinds, and the words of their captions."""
    return draw(kinds), bags([caption(kind) for kind in kinds.tolist()])


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # every rank has the same weights, and draws the same batch
towers = Towers()
model = DistributedDataParallel(towers)
kinds = torch.randperm(len(KINDS))
new, seen = kinds[:50], kinds[50:]
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(101):
    if step in (0, 100):
        with torch.no_grad():
            image, text, *_ = towers(*inputs(new))
        nearest = (image @ text.T).argmax(1)
        recall = nearest.eq(torch.arange(len(new))).float().mean().item()
    batch = seen[torch.randint(len(seen), (256,))]
    own = slice(rank, None, size)  # the pairs of this rank
    features = model(*(x[own] for x in inputs(batch)))  # and the scale and the bias
    loss = contrastile.sigmoid_loss(*features, ids=batch[own], group="world")
    if step in (0, 100) and rank == 0:
        print(f"step {step}: loss {loss:.3f}, recall@1 {recall:.2f}, world size {size}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
