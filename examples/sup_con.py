"""SupCon: sentence embeddings that tell a gloss's part of speech, tried on glosses that were held out.

``python sup_con.py`` takes some seconds on a CPU. The embeddings ship with the package.
"""

import torch
from torch.nn.functional import normalize, one_hot

import contrastile
from contrastile.data import load_wordnet_pairs

pairs = load_wordnet_pairs()
gloss_ids = torch.from_numpy(pairs.gloss_ids)
letters = [chr(letter) for letter in sorted({*pairs.parts_of_speech.tolist()})]
labels = torch.tensor([letters.index(chr(letter)) for letter in pairs.parts_of_speech.tolist()])
features = torch.from_numpy(pairs.glosses).float()

torch.manual_seed(0)
distinct = torch.randperm(len(gloss_ids.unique()))
held_out = torch.isin(gloss_ids, gloss_ids.unique()[distinct[:300]])
train, train_labels = features[~held_out], labels[~held_out]


@torch.no_grad()
def accuracy(encode):
    """The share of held-out glosses whose part of speech most of their five nearest glosses have."""
    unseen, known = normalize(encode(features[held_out]), dim=1), normalize(encode(train), dim=1)
    nearest = (unseen @ known.T).topk(5).indices
    votes = one_hot(train_labels[nearest], len(letters)).sum(1)
    return (votes.argmax(1) == labels[held_out]).float().mean().item()


encoder = torch.nn.Linear(384, 64, bias=False)
optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3, weight_decay=0.1)
print(f"before: {accuracy(lambda x: x):.2f} right, by the embeddings as they come")
for _ in range(40):
    noisy = train + 0.5 / 384**0.5 * torch.randn(train.shape)
    loss = contrastile.sup_con(normalize(encoder(noisy), dim=1), train_labels, 10.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"after:  {accuracy(encoder):.2f} right, by 64 trained features, loss {loss.item():.3f}")
