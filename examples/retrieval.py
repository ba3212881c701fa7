"""Retrieval: find pictures by words. Hard negatives differ in one word; ids say which are none.

``python retrieval.py`` takes some seconds on a CPU.
"""

import torch
from pictures import KINDS, WORDS, bags, caption, draw, tower
from torch.nn.functional import normalize

import contrastile

KIND = {kind: number for number, kind in enumerate(KINDS)}
SCALE = 15.0


def confused(kinds):
    """Kinds that differ in one word, such as a large red circle for a small one: (n,) -> (n,)."""
    confused_kinds = []
    for kind in kinds.tolist():
        words, place = list(KINDS[kind]), int(torch.randint(4, ()))
        others = sorted({other[place] for other in KINDS} - {words[place]})
        words[place] = others[int(torch.randint(len(others), ()))]
        confused_kinds.append(KIND[tuple(words)])
    return torch.tensor(confused_kinds)


def recall(query, document):
    """The share of captions whose nearest picture, among all 250 kinds, is of the caption's kind."""
    kinds = torch.arange(len(KINDS))
    with torch.no_grad():
        words = normalize(query(bags([caption(kind) for kind in kinds.tolist()])), dim=1)
        return (words @ normalize(document(draw(kinds)), dim=1).T).argmax(1).eq(kinds).float().mean().item()


def train(hard):
    """Towers of queries and documents, with hard negatives or without."""
    torch.manual_seed(0)
    query, document = torch.nn.Linear(len(WORDS), 64), tower(64)
    print(f"before: recall@1 {recall(query, document):.2f}")
    optimizer = torch.optim.Adam([*query.parameters(), *document.parameters()], lr=5e-3)
    for _ in range(60):
        kinds = torch.randint(len(KINDS), (128,))
        columns = torch.cat([kinds, confused(kinds)]) if hard else kinds
        words = normalize(query(bags([caption(kind) for kind in kinds.tolist()])), dim=1)
        pictures = normalize(document(draw(columns)), dim=1)
        key, negatives = pictures[:128], pictures[128:] if hard else ()
        # equal ids: no picture of the query's kind is a negative, not even one of another pair
        loss = contrastile.info_nce(words, key, SCALE, negatives=negatives, row_ids=kinds, column_ids=columns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"after:  recall@1 {recall(query, document):.2f}, {'with' if hard else 'without'} hard negatives")


train(hard=False)
train(hard=True)
