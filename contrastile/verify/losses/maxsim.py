"""MaxSim losses: texts as vectors of tokens, and the problem and truth that the oracle states for them."""

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
"""The default number of tokens of a query and of a document."""


def tokens(x: FloatArray, count: int) -> FloatArray:
    """Tokens (b, count, d) from vectors (b, d): each token is rotated by one more place, and a little shorter.

    The tokens of a pair are thus nearest in order, and their products have the signs and sizes of the vectors'.
    """
    return np.stack([np.roll(x, a, axis=1) * (16 / (16 + a)) for a in range(count)], axis=1)


def of_pairs(arguments: Arguments, counts: tuple[int, int] = TOKENS) -> Arguments:
    """Turn pairs of vectors, or the first tokens of texts, into texts whose scores are as large as the products."""
    first, second = (x if x.ndim == 2 else x[:, 0] for x in arguments.features)
    count = arguments.features[0].shape[1] if arguments.features[0].ndim == 3 else 1
    features = tokens(first, counts[0]), tokens(second, counts[1])
    return replace(arguments, features=features, scale=arguments.scale * count / counts[0])


def masked(draw: Draw, arguments: Arguments, norm: float = 1.0) -> Arguments:
    """Texts with masks. One to four tokens of a query count, and one to five of a document; the others are nearer.

    ``norm`` multiplies the length of the tokens; the logits stay the same.
    """
    arguments = of_pairs(arguments, (4, 5))
    masks = [(draw.random(x.shape[:2]) < 0.6).astype(np.int64) for x in arguments.features]
    for mask in masks:
        mask[np.arange(len(mask)), draw.integers(0, mask.shape[1], len(mask))] = 1
    distractors = [1.5 * np.roll(x, 1, axis=0)[:, :1] for x in arguments.features[::-1]]
    texts = zip(masks, arguments.features, distractors, strict=True)
    features = tuple(norm * np.where(mask[:, :, None] == 1, x, distractor) for mask, x, distractor in texts)
    scale = arguments.scale / norm**2
    return replace(arguments, features=features, scale=scale, keywords=dict(zip(MASKS, masks, strict=True)))


def problem_and_truth(arguments: Arguments) -> tuple[Problem, Truth]:
    """InfoNCE of the scores, in one or both directions, in terms of the tokens: see ``Truth.late``."""
    return _problem_and_truth(pickle.dumps(arguments))


@lru_cache(maxsize=2)
def _problem_and_truth(content: bytes) -> tuple[Problem, Truth]:
    arguments: Arguments = pickle.loads(content)
    (query, document), masks = arguments.features, arguments.keywords
    with np.errstate(all="ignore"):
        S, products, nearest = scores(query, document, *map(masks.get, MASKS))
        objective = "clip_loss" if arguments.options.get("symmetric") else "info_nce"
        problem = stated(objective, Arguments((S, np.eye(len(document))), arguments.scale))
        inner = truth(problem)
        late = Late(products, nearest, inner.G)
        keywords: dict[str, Any] = {**arguments.keywords, **arguments.options}
        exact = maxsim(query, document, arguments.scale, **keywords)
        q, k, rows, columns = (x.reshape(-1, x.shape[-1]) for x in (query, document, exact.d_rows, exact.d_columns))
        G = late.of_tokens(inner.G)
        outcome = replace(inner.outcome, rows=rows, columns=(columns,), loss=float64(exact.loss), scale=exact.d_scale)
        whole = replace(inner, outcome=outcome, q=q, k=k, products=q @ k.T, G=G, late=late, bounds={})
        whole = replace(whole, row_sum=G @ k, column_sum=G.T @ q)
    return replace(problem, rows=q, columns=(k,)), whole
