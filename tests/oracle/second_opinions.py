"""The same losses written again, with nothing in common with the oracle but the definition: loops and autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from oracle_problems import Problem

    from contrastile.oracle.pairs import Pairs


def pair_kind(pairs: Pairs, i: int, j: int) -> tuple[bool, bool]:
    """(positive, admitted) for one pair, by the words of the definition."""
    same_id = pairs.row_ids is not None and pairs.row_ids[i] == pairs.column_ids[j]
    if pairs.excluded is not None and pairs.excluded[i] == j:
        return False, False
    if pairs.match == "target":
        return bool(same_id), True
    if pairs.positives is not None and pairs.positives[i] == j:
        return True, True
    return False, not same_id


def pair_kinds(pairs: Pairs, m: int, n: int) -> np.ndarray:
    """Of all pairs, (m, n, 2)."""
    found = [[pair_kind(pairs, i, j) for j in range(n)] for i in range(m)]
    return np.array(found, dtype=np.bool_).reshape(m, n, 2)


def by_autograd(p: Problem, b: float | None = None) -> list[np.ndarray]:
    """The general loss, or the sigmoid loss where b is given: (loss, d_rows, d_columns, d_scale, d_bias)."""
    leaves = [torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in (p.q, p.k, p.scale, p.bias)]
    q, k, scale, bias = leaves
    x = scale.reshape(-1, 1) * (q @ k.T) + bias
    kinds = torch.from_numpy(pair_kinds(p.pairs, *x.shape))
    value = 0.0 * x.sum()
    if b is None:
        lines = [*zip(p.u, x, kinds, strict=True), *zip(p.v, x.T, kinds.transpose(0, 1), strict=True)]
        for w, logits, kind in lines:
            if w != 0:
                targets = logits[kind[:, 0]]
                target = targets.mean() if len(targets) else 0.0
                value = value + w * (logits[kind[:, 1]].logsumexp(0) - target)
    else:
        z = torch.where(kinds[..., 0], 1.0, -1.0)
        value = value - torch.nn.functional.logsigmoid(z * x)[kinds[..., 1]].sum() / b
    return [value.detach().numpy(), *(g.numpy() for g in torch.autograd.grad(value, leaves))]
