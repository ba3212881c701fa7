"""The losses by name against their own definitions, written in torch with its cross entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from balls import Ball, agrees, general, sigmoid
from oracle_problems import Problem, on_grid
from torch.nn.functional import cross_entropy, logsigmoid

from contrastile.bench import plain
from contrastile.oracle.late import maxsim
from contrastile.oracle.named import Options, clip, distillation, info_nce, nt_xent, siglip, sup_con
from contrastile.oracle.pairs import Pairs

B, EXTRA, D, S = 7, 4, 5, 9.0
rng = np.random.default_rng(11)
I, T, MORE = (on_grid(rng.standard_normal((rows, D))) for rows in (B, B, EXTRA))
IDS, HERE = np.array([3, 1, 3, 2, 2, 9, 3]), torch.arange(B)


def leaves(*arrays: object) -> list[torch.Tensor]:
    return [torch.tensor(np.asarray(a, dtype=np.float64), requires_grad=True) for a in arrays]


def check(found: list, value: torch.Tensor, inputs: list[torch.Tensor], balls: list) -> None:
    """Loss, then gradients in the order of the inputs, both sides."""
    theirs = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, inputs))]
    for ours, other, ball in zip(found, theirs, balls, strict=True):
        assert agrees(ours, ball)
        assert agrees(other, ball)


def softmax(q: np.ndarray, k: np.ndarray, pairs: Pairs, u: float, v: float) -> list:
    return general(Problem(q, k, S, 0.0, pairs, np.full(len(q), u), np.full(len(k), v))).all


@pytest.mark.parametrize("positives", [None, np.array([0, 8, 8, 3, 10, 1, 6])])
def test_info_nce_takes_hard_negatives_and_a_scale_per_row(positives: np.ndarray | None) -> None:
    k, per_row = np.concatenate([T, MORE]), on_grid(rng.uniform(5, 9, size=B))
    a, t, s, beta = leaves(I, k, per_row, 0.25)
    at = np.arange(B) if positives is None else positives
    value = cross_entropy(s[:, None] * (a @ t.T) + beta, torch.tensor(at))
    found = info_nce(I, k, per_row, 0.25, positives=positives)
    p = Problem(I, k, per_row, 0.25, Pairs(at), np.full(B, 1 / B), np.zeros(B + EXTRA))
    check(list(found), value, [a, t, s, beta], general(p).all)


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_info_nce_takes_negatives_of_one_row_each(share: bool, in_batch: bool) -> None:
    own, counts = on_grid(rng.standard_normal((B, 2, D))), np.arange(B) % 3
    own[counts < 1, 0] = np.nan
    there = np.arange(2) < counts[:, None]
    k = np.concatenate([T, MORE, np.where(there[:, :, None], own, 0.0).reshape(-1, D)])
    a, t, s = leaves(I, k, S)
    seen = np.concatenate([np.eye(B, dtype=bool) | in_batch, np.ones((B, EXTRA), dtype=bool)], 1)
    of_own = there.ravel() & (share | np.repeat(np.eye(B, dtype=bool), 2, axis=1))
    value = cross_entropy((s * a @ t.T).masked_fill(torch.tensor(~np.concatenate([seen, of_own], 1)), -torch.inf), HERE)
    owners = np.concatenate([np.full(B, -1) if in_batch else np.arange(B), np.full(EXTRA, -1)])
    owners = np.concatenate([owners, np.where(there.ravel(), -1 if share else np.repeat(np.arange(B), 2), -2)])
    given = {"row_ids": np.arange(B), "column_ids": np.arange(B, 2 * B + EXTRA)}
    given |= {"own": own, "counts": counts, "share": share, "in_batch": in_batch}
    pairs = Pairs(np.arange(B), owners=owners)
    found = info_nce(I, np.concatenate([T, MORE]), S, **given)
    check(list(found)[:4], value, [a, t, s], softmax(I, k, pairs, 1 / B, 0.0)[:4])


def test_nt_xent_is_the_cross_entropy_of_two_views_without_the_diagonal() -> None:
    a, t, s = leaves(I, T, S)
    both = np.concatenate([I, T])
    pairs = Pairs(np.roll(np.arange(2 * B), -B), excluded=np.arange(2 * B))
    loss, d_rows, d_columns, d_scale, _ = softmax(both, both, pairs, 1 / (2 * B), 0.0)
    dz = d_rows + d_columns
    check(list(nt_xent(I, T, S))[:4], plain.nt_xent(a, t, s), [a, t, s], [loss, dz[:B], dz[B:], d_scale])


def test_sup_con_is_the_mean_over_anchors_of_the_mean_over_positives() -> None:
    z, s = leaves(I, S)
    # ids 1 and 9 stand alone: negatives for the others, anchors for none
    pairs = Pairs(row_ids=IDS, column_ids=IDS, match="target", excluded=np.arange(B))
    found = sup_con(I, IDS, S)
    p = Problem(I, I, S, 0.0, pairs, np.where(np.isin(IDS, (1, 9)), 0.0, 1 / 5), np.zeros(B))
    loss, d_rows, d_columns, d_scale, _ = general(p).all
    value = plain.sup_con(z, torch.tensor(IDS), s)
    check([found.loss, found.d_rows, found.d_scale], value, [z, s], [loss, d_rows + d_columns, d_scale])
    assert found.d_columns.shape == (0, D)


def test_sup_con_without_any_positive_is_zero() -> None:
    found = sup_con(I, np.arange(B), S)
    assert found.loss == 0.0
    np.testing.assert_array_equal(found.d_rows, np.zeros((B, D)))


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize(("match", "mean"), [("drop", False), ("target", False), ("target", True)])
def test_siglip_is_the_sum_over_pairs_over_the_batch(ids: np.ndarray | None, match: str, mean: bool) -> None:
    if ids is None and match == "target":
        ids = np.arange(B)
    a, t, s, beta = leaves(I, T, S, -3.0)
    same = np.zeros((B, B), dtype=bool) if ids is None else ids[:, None] == ids
    positive = torch.tensor(same if match == "target" else np.eye(B, dtype=bool))
    admitted = positive | torch.tensor((match == "target") | ~same)
    z = torch.where(positive, 1.0, -1.0).double()
    x = s * a @ t.T + beta
    value = -(logsigmoid(z * x) * admitted).sum() / B
    found = list(siglip(I, T, S, -3.0, row_ids=ids, column_ids=ids, match=match, mean=mean))
    balls = sigmoid(Problem(I, T, S, -3.0, Pairs(np.arange(B), ids, ids, match)), B).all
    if mean:
        of_rows = (logsigmoid(x) * positive).sum(1)
        value = value + (of_rows - of_rows / positive.sum(1)).sum() / B
        balls = [Ball(x, 3 * ball.rad) for x, ball in zip(found, balls, strict=True)]
    check(found, value, [a, t, s, beta], balls)


def test_an_empty_batch_is_a_loss_of_zero() -> None:
    none = np.zeros((0, D))
    for found in (
        clip(none, none, S),
        info_nce(none, T, S),
        nt_xent(none, none, S),
        sup_con(none, np.zeros(0, dtype=np.int64), S),
        siglip(none, none, S, 0.0),
    ):
        assert found.loss == 0.0
        assert found.d_rows.shape == (0, D)
        assert not found.d_columns.any()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_document_without_tokens_makes_maxsim_nan(symmetric: bool) -> None:
    counted = np.arange(3)[:, None] != np.ones((1, 2))
    texts = np.ones((3, 1, 2)), np.ones((3, 2, 2))
    assert np.isnan(maxsim(*texts, 2.0, document_mask=counted, symmetric=symmetric).loss)


def test_one_pair_is_certain() -> None:
    assert clip(I[:1], T[:1], S).loss == 0.0
    assert not clip(I[:1], T[:1], S).d_rows.any()


GUIDE = on_grid(rng.standard_normal((B, 3))), on_grid(rng.standard_normal((B, 3)))
W = on_grid(rng.uniform(0.1, 2.0, size=B))
OPTIONS = {
    "plain": (Pairs(np.arange(B)), Options(), None),
    "without false negatives": (Pairs(np.arange(B), IDS, IDS), Options(), None),
    "shared targets": (Pairs(row_ids=IDS, column_ids=IDS, match="target"), Options(), None),
    "weights": (Pairs(np.arange(B)), Options(), W),
    "shared targets, smoothed": (Pairs(row_ids=IDS, column_ids=IDS, match="target"), Options(smoothing=0.25), W),
    "inside": (Pairs(row_ids=IDS, column_ids=IDS, match="target"), Options(inside=True), None),
    "a margin": (Pairs(np.arange(B)), Options(margin=0.25), None),
    "a threshold": (Pairs(np.arange(B)), Options(threshold=0.1), W),
    "a relative threshold": (Pairs(np.arange(B)), Options(threshold=-0.3, relative=True), None),
    "a guide": (Pairs(np.arange(B)), Options(threshold=-0.1, guide=GUIDE), W),
    "a guide and a share": (Pairs(np.arange(B)), Options(threshold=0.3, relative=True, guide=GUIDE[::-1]), None),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_clip_is_the_mean_of_torch_s_cross_entropies_with_the_papers_options(name: str) -> None:
    """Label smoothing by torch itself, L_in by SupCon Eq. 3, the margin by CosFace Eq. 4, a threshold by a mask.

    With a guide the mask is of its similarities alone (GISTEmbed, Sec. 3).
    """
    pairs, options, weights = OPTIONS[name]
    a, t, s = leaves(I, T, S)
    positive, admitted = torch.tensor(pairs.positive(B, B)).double(), torch.tensor(pairs.admitted(B, B))
    w = torch.ones(B, dtype=torch.float64) if weights is None else torch.tensor(weights)

    def side(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        if options.inside:
            p = (x.softmax(1) * positive).sum(1) / positive.sum(1)
            return (w * -p.log()).sum() / w.sum()
        own, t = g.diagonal()[:, None], options.threshold
        most = own * (1 + t) if options.relative else own + (S * t if options.guide is None else t)
        # a number that no exponential holds, for no target times -inf is 0
        x = x.masked_fill(((g > most) & (positive == 0)) | ~admitted, -1e30)
        x = x - s * options.margin * positive
        y = positive / positive.sum(1, keepdim=True)
        each = cross_entropy(x, y, label_smoothing=options.smoothing, reduction="none")
        return (w * each).sum() / w.sum()

    x = s * a @ t.T
    g = x.detach() if options.guide is None else torch.tensor(options.guide[0] @ options.guide[1].T)
    given = {"row_ids": pairs.row_ids, "column_ids": pairs.column_ids, "match": pairs.match}
    found = clip(I, T, S, **given, weights=weights, options=options)
    # the probabilities, and the targets, are those of logits that are larger by the margin's share
    u = (w / w.sum()).numpy() / 2
    near = general(Problem(I, T, S * (1 + options.margin), 0.0, pairs, u, u)).all[:4]
    value = (side(x, g) + side(x.T, g.T)) / 2
    theirs = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, [a, t, s]))]
    balls = [Ball(x, 4 * (1 + options.smoothing) * ball.rad) for x, ball in zip(theirs, near, strict=True)]
    assert all(map(agrees, list(found)[:4], balls))


def test_distillation_is_the_mean_of_torch_s_cross_entropies_of_the_teacher_s_softmax() -> None:
    a, t, s = leaves(I, T, S)
    x, y = s * a @ t.T, torch.tensor(3.0 * GUIDE[0] @ GUIDE[1].T)
    value = (cross_entropy(x, y.softmax(1)) + cross_entropy(x.T, y.T.softmax(1))) / 2
    # targets are rounded as probabilities are
    near = softmax(I, T, Pairs(np.arange(B)), 0.5 / B, 0.5 / B)[:4]
    theirs = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, [a, t, s]))]
    found = list(distillation(I, T, S, GUIDE, 3.0))[:4]
    assert all(agrees(ours, Ball(x, 4 * ball.rad)) for ours, x, ball in zip(found, theirs, near, strict=True))
