"""MaxSim losses: texts as tokens, and the problem and truth that the oracle states of them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from contrastile.oracle.arrays import FloatArray, float64
from contrastile.oracle.late import maxsim, scores
from contrastile.schedules.problem import Problem
from contrastile.verify.draws import Draw
from contrastile.verify.late import Late
from contrastile.verify.losses.arguments import Arguments, stated
from contrastile.verify.truth import Truth, truth

MASKS = "query_mask", "document_mask"
TOKENS = 2, 3
"""Of a query and of a document, where a case does not say."""


def tokens(x: FloatArray, count: int) -> FloatArray:
    """(b, count, d): vectors (b, d), turned by one place and a little shorter with each token.

    So a pair's tokens are near in their order, and signs and sizes of products are those of the vectors.
    """
    return np.stack([np.roll(x, a, axis=1) * (16 / (16 + a)) for a in range(count)], axis=1)


def of_pairs(given: Arguments, counts: tuple[int, int] = TOKENS) -> Arguments:
    """Pairs of vectors, or of texts by their first tokens, as texts whose scores are as large as the products were."""
    one, other = (x if x.ndim == 2 else x[:, 0] for x in given.features)
    before = given.features[0].shape[1] if given.features[0].ndim == 3 else 1
    features = tokens(one, counts[0]), tokens(other, counts[1])
    return replace(given, features=features, scale=given.scale * before / counts[0])


def masked(draw: Draw, given: Arguments, norm: float = 1.0) -> Arguments:
    """One to four tokens of a query count, and one to five of a document; in place of the others are nearer ones.

    With ``norm`` tokens are so many times as long, and the logits the same.
    """
    given = of_pairs(given, (4, 5))
    masks = [(draw.random(x.shape[:2]) < 0.6).astype(np.int64) for x in given.features]
    for mask in masks:
        mask[np.arange(len(mask)), draw.integers(0, mask.shape[1], len(mask))] = 1
    nearer = [1.5 * np.roll(x, 1, axis=0)[:, :1] for x in given.features[::-1]]
    pieces = zip(masks, given.features, nearer, strict=True)
    features = tuple(norm * np.where(mask[:, :, None] == 1, x, other) for mask, x, other in pieces)
    scale = given.scale / norm**2
    return replace(given, features=features, scale=scale, keywords=dict(zip(MASKS, masks, strict=True)))


def problem_and_truth(given: Arguments) -> tuple[Problem, Truth]:
    """InfoNCE of the scores, or of both directions, stated of the tokens: see ``Truth.late``."""
    return _found(pickle.dumps(given))


@lru_cache(maxsize=2)
def _found(content: bytes) -> tuple[Problem, Truth]:
    given: Arguments = pickle.loads(content)
    (query, document), masks = given.features, given.keywords
    with np.errstate(all="ignore"):
        S, products, nearest = scores(query, document, *map(masks.get, MASKS))
        objective = "clip_loss" if given.options.get("symmetric") else "info_nce"
        problem = stated(objective, Arguments((S, np.eye(len(document))), given.scale))
        inner = truth(problem)
        late = Late(products, nearest, inner.G)
        asked: dict[str, Any] = {**given.keywords, **given.options}
        found = maxsim(query, document, given.scale, **asked)
        q, k, rows, columns = (x.reshape(-1, x.shape[-1]) for x in (query, document, found.d_rows, found.d_columns))
        G = late.of_tokens(inner.G)
        outcome = replace(inner.outcome, rows=rows, columns=(columns,), loss=float64(found.loss), scale=found.d_scale)
        whole = replace(inner, outcome=outcome, q=q, k=k, products=q @ k.T, G=G, late=late, bounds={})
        whole = replace(whole, row_sum=G @ k, column_sum=G.T @ q)
    return replace(problem, rows=q, columns=(k,)), whole
