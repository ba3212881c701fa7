"""The losses by full matrices in float64 with torch's autograd, and bounds of what rounding may move each result by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
UNDERFLOW = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}


@dataclass
class Truth:
    """The loss and its gradients by full matrices in float64, and bounds of what rounding may move each by."""

    loss: float
    base: Tensor
    negatives: list[Tensor]
    numbers: list[float]
    loss_bound: float
    base_bound: Tensor
    negatives_bound: list[Tensor]
    numbers_bound: list[float]


def features(call: Any, views: Callable[..., Any], base: Tensor) -> tuple[Tensor, Tensor]:
    x, y = views(call.view, base, call.b)
    if call.dtype == "float64" or call.mode != "autocast":
        return x, y
    return x.to(torch.bfloat16), y.to(torch.bfloat16)


def truth(call: Any, views: Callable[..., Any]) -> Truth:
    """The truth of a drawn call; ``views`` makes its features of the base, which is the leaf."""
    base = call.base.clone().requires_grad_()
    x, y = (t.double() for t in features(call, views, base))
    more = [t.clone().requires_grad_() for t in call.negatives]
    wide = [
        t.to(torch.bfloat16).double() if call.mode == "autocast" and t.dtype != torch.float64 else t.double()
        for t in more
    ]
    s = torch.tensor(call.scale, dtype=torch.float64)
    if call.dtype != "float64":
        s = s.float().double()
    s.requires_grad_()
    bias = torch.tensor(call.bias or 0.0, dtype=torch.float64, requires_grad=True)
    b = call.b
    if call.loss in ("nt_xent", "sup_con"):
        q = torch.cat([x, y]) if call.loss == "nt_xent" else x
        k = q
    else:
        q, k = x, torch.cat([y, *wide])
    logits = s * (q @ k.T) + bias
    m, n = logits.shape
    positive, admitted = torch.zeros(m, n, dtype=torch.bool), torch.ones(m, n, dtype=torch.bool)
    rows = torch.arange(m)
    if call.loss == "sup_con":
        assert call.labels is not None
        positive = (call.labels[:, None] == call.labels[None]) & ~torch.eye(m, dtype=torch.bool)
        admitted = ~torch.eye(m, dtype=torch.bool)
    elif call.loss == "nt_xent":
        positive[rows, (rows + b) % m] = True
        admitted = ~torch.eye(m, dtype=torch.bool)
    else:
        positive[rows, call.named.get("positives", rows)] = True
        ids = call.named.get("ids")
        row_ids, column_ids = (
            (ids, ids) if ids is not None else (call.named.get("row_ids"), call.named.get("column_ids"))
        )
        if row_ids is not None:
            admitted = (row_ids[:, None] != column_ids[None]) | positive
    if call.loss == "sigmoid_loss":
        z = torch.where(positive, 1.0, -1.0).double()
        terms = torch.where(admitted, torch.nn.functional.softplus(-z * logits, threshold=700.0), 0.0)
        loss = terms.sum() / b
        slope = torch.where(admitted, 1.0, 0.0).double() / b
        spread = terms.detach().abs().sum() / b
    else:
        inside = logits.masked_fill(~admitted, -torch.inf)
        y_rows = positive.double() / positive.sum(1, keepdim=True).clamp(min=1)
        counted = positive.any(1) if call.loss == "sup_con" else torch.ones(m, dtype=torch.bool)
        u = counted.double() / max(1, int(counted.sum()))
        lse = inside[counted].logsumexp(1)
        loss = (u[counted] * (lse - (y_rows[counted] * logits[counted]).sum(1))).sum()
        slope = torch.zeros(m, n, dtype=torch.float64)
        slope[counted] = u[counted, None] * (inside[counted].detach().softmax(1) + y_rows[counted])
        if call.loss == "clip_loss":
            over = inside.logsumexp(0) - logits.diagonal()
            loss = (loss + over.mean()) / 2
            slope = (slope + (inside.detach().softmax(0) + positive.double()) / n) / 2
        spread = (slope * (logits.detach().abs() + 1)).sum()
    # float32's state; what the features' dtype adds is their rounding at the end
    state = UNIT["float64" if call.dtype == "float64" else "float32"]
    Q, K = q.detach().abs(), k.detach().abs()
    size = s.detach().abs() * (Q @ K.T) + abs(call.bias or 0.0)
    top = float(size.max()) if size.numel() else 0.0
    depth = q.shape[1] + 8
    error = 4 * state * (depth * top + top + np.log(m + n + 2) + 16)
    wrong = slope * (np.expm1(2 * error) + 4 * state * (m + n + 16)) + 2.0**-100
    ranks = max(1, len(call.sizes))
    up = call.upstream
    grads = torch.autograd.grad(up * loss, [base, s, bias, *more], allow_unused=True)
    exact = [
        torch.zeros_like(leaf).double() if g is None else g.double()
        for g, leaf in zip(grads, [base, s, bias, *more], strict=True)
    ]
    narrow = max(UNIT[call.dtype], UNIT["bfloat16"] if call.mode == "autocast" and call.dtype != "float64" else 0.0)
    factor = abs(up) * ranks

    def bounded(bound: Tensor, whole: Tensor) -> Tensor:
        return factor * (s.detach().abs() * (bound + 8 * narrow * whole) + 8 * UNDERFLOW[call.dtype])

    q_bound, k_bound = bounded(wrong @ K, slope @ K), bounded(wrong.T @ Q, slope.T @ Q)
    leaves = [t.clone().double().requires_grad_() for t in (call.base, *call.negatives)]
    vx, vy = views(call.view, leaves[0], b)
    if call.loss in ("nt_xent", "sup_con"):
        both = q_bound + k_bound
        into = (vx * both[:b]).sum() + ((vy * both[b:]).sum() if call.loss == "nt_xent" else 0.0)
    else:
        into = (vx * q_bound).sum() + (vy * k_bound[:b]).sum()
        start = b
        for leaf in leaves[1:]:
            into = into + (leaf * k_bound[start : start + len(leaf)]).sum()
            start += len(leaf)
    found = torch.autograd.grad(into, leaves, allow_unused=True)
    bounds = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
    # the leaf adds up what its views give, in its own dtype
    bounds = [
        x + 4 * UNIT[call.dtype] * (x + abs(up) * ranks * g.abs())
        for x, g in zip(bounds, [exact[0], *exact[3:]], strict=True)
    ]
    dots = Q @ K.T
    number = [
        abs(up) * float((wrong * t).sum() + 8 * state * (slope * t).sum()) + 1e-37
        for t in (dots, torch.ones_like(dots))
    ]
    numbers, numbers_bound = [float(exact[1])], number[:1]
    if call.bias is not None:
        numbers.append(float(exact[2]))
        numbers_bound.append(number[1])
    # the weights 1 / b and the number itself are rounded to the state
    numbers_bound = [x + 8 * state * abs(v) * ranks for x, v in zip(numbers_bound, numbers, strict=True)]
    loss_bound = float(spread) * 4 * state * (m + n + 16) + 2 * error + 1e-37
    return Truth(float(loss.detach()), exact[0], exact[3:], numbers, loss_bound, bounds[0], bounds[1:], numbers_bound)
