"""Train a tiny CLIP on pictures with captions, and find captions that it has never seen.

``python clip.py`` takes some seconds on a CPU. docs/tutorials/tiny-clip.md explains it.
"""

import torch
from pictures import KINDS, WORDS, bags, caption, draw, tower
from torch.nn.functional import normalize

import contrastile


class TinyClip(torch.nn.Module):
    """A tower for pictures, one for captions, and a scale that learns."""

    def __init__(self, width=64):
        super().__init__()
        self.image, self.text = tower(width), torch.nn.Linear(len(WORDS), width)
        self.log_scale = torch.nn.Parameter(torch.tensor(10.0).log())

    def encode_image(self, pictures):
        """Features of unit length, (n, width)."""
        return normalize(self.image(pictures), dim=1)

    def encode_text(self, captions):
        """Features of unit length, (n, width)."""
        return normalize(self.text(bags(captions)), dim=1)


torch.manual_seed(0)
model = TinyClip()
kinds = torch.randperm(len(KINDS))
new, seen = kinds[:50], kinds[50:]


@torch.no_grad()
def recall():
    """How often a picture of a new kind is nearest to its own caption."""
    image = model.encode_image(draw(new))
    text = model.encode_text([caption(kind) for kind in new.tolist()])
    return (image @ text.T).argmax(1).eq(torch.arange(len(new))).float().mean().item()


print(f"before: recall@1 {recall():.2f}")
optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(101):
    batch = seen[torch.randint(len(seen), (256,))]
    image = model.encode_image(draw(batch))
    text = model.encode_text([caption(kind) for kind in batch.tolist()])
    # a batch repeats kinds: pictures of one kind are no negatives of each other
    loss = contrastile.clip_loss(image, text, model.log_scale.exp(), ids=batch)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 25 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}")
print(f"after:  recall@1 {recall():.2f}")
