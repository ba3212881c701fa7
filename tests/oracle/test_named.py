"""The named losses against their definitions, written with the cross entropy of torch."""

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
IDS, DIAGONAL = np.array([3, 1, 3, 2, 2, 9, 3]), torch.arange(B)


def leaves(*arrays: object) -> list[torch.Tensor]:
    return [torch.tensor(np.asarray(a, dtype=np.float64), requires_grad=True) for a in arrays]


def check(results: list, value: torch.Tensor, inputs: list[torch.Tensor], balls: list) -> None:
    """Compare the loss and its gradients, in the order of the inputs, with torch and with balls."""
    expected = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, inputs))]
    for ours, reference, ball in zip(results, expected, balls, strict=True):
        assert agrees(ours, ball)
        assert agrees(reference, ball)


def softmax(q: np.ndarray, k: np.ndarray, pairs: Pairs, u: float, v: float) -> list:
    return general(Problem(q, k, S, 0.0, pairs, np.full(len(q), u), np.full(len(k), v))).all


@pytest.mark.parametrize("positives", [None, np.array([0, 8, 8, 3, 10, 1, 6])])
def test_info_nce_takes_hard_negatives_and_a_scale_per_row(positives: np.ndarray | None) -> None:
    k, per_row = np.concatenate([T, MORE]), on_grid(rng.uniform(5, 9, size=B))
    a, t, s, beta = leaves(I, k, per_row, 0.25)
    positive_indices = np.arange(B) if positives is None else positives
    value = cross_entropy(s[:, None] * (a @ t.T) + beta, torch.tensor(positive_indices))
    result = info_nce(I, k, per_row, 0.25, positives=positives)
    p = Problem(I, k, per_row, 0.25, Pairs(positive_indices), np.full(B, 1 / B), np.zeros(B + EXTRA))
    check(list(result), value, [a, t, s, beta], general(p).all)


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_info_nce_takes_negatives_of_one_row_each(share: bool, in_batch: bool) -> None:
    own, counts = on_grid(rng.standard_normal((B, 2, D))), np.arange(B) % 3
    own[counts < 1, 0] = np.nan
    exists = np.arange(2) < counts[:, None]
    k = np.concatenate([T, MORE, np.where(exists[:, :, None], own, 0.0).reshape(-1, D)])
    a, t, s = leaves(I, k, S)
    is_seen = np.concatenate([np.eye(B, dtype=bool) | in_batch, np.ones((B, EXTRA), dtype=bool)], 1)
    is_own = exists.ravel() & (share | np.repeat(np.eye(B, dtype=bool), 2, axis=1))
    masked = torch.tensor(~np.concatenate([is_seen, is_own], 1))
    value = cross_entropy((s * a @ t.T).masked_fill(masked, -torch.inf), DIAGONAL)
    owners = np.concatenate([np.full(B, -1) if in_batch else np.arange(B), np.full(EXTRA, -1)])
    owners = np.concatenate([owners, np.where(exists.ravel(), -1 if share else np.repeat(np.arange(B), 2), -2)])
    arguments = {"row_ids": np.arange(B), "column_ids": np.arange(B, 2 * B + EXTRA)}
    arguments |= {"own": own, "counts": counts, "share": share, "in_batch": in_batch}
    pairs = Pairs(np.arange(B), owners=owners)
    result = info_nce(I, np.concatenate([T, MORE]), S, **arguments)
    check(list(result)[:4], value, [a, t, s], softmax(I, k, pairs, 1 / B, 0.0)[:4])


def test_nt_xent_is_the_cross_entropy_of_two_views_without_the_diagonal() -> None:
    a, t, s = leaves(I, T, S)
    views = np.concatenate([I, T])
    pairs = Pairs(np.roll(np.arange(2 * B), -B), excluded=np.arange(2 * B))
    loss, d_rows, d_columns, d_scale, _ = softmax(views, views, pairs, 1 / (2 * B), 0.0)
    dz = d_rows + d_columns
    check(list(nt_xent(I, T, S))[:4], plain.nt_xent(a, t, s), [a, t, s], [loss, dz[:B], dz[B:], d_scale])


def test_sup_con_is_the_mean_over_anchors_of_the_mean_over_positives() -> None:
    z, s = leaves(I, S)
    # ids 1 and 9 occur once: these samples are negatives for others, but no anchors
    pairs = Pairs(row_ids=IDS, column_ids=IDS, match="target", excluded=np.arange(B))
    result = sup_con(I, IDS, S)
    p = Problem(I, I, S, 0.0, pairs, np.where(np.isin(IDS, (1, 9)), 0.0, 1 / 5), np.zeros(B))
    loss, d_rows, d_columns, d_scale, _ = general(p).all
    value = plain.sup_con(z, torch.tensor(IDS), s)
    check([result.loss, result.d_rows, result.d_scale], value, [z, s], [loss, d_rows + d_columns, d_scale])
    assert result.d_columns.shape == (0, D)


def test_sup_con_without_any_positive_is_zero() -> None:
    result = sup_con(I, np.arange(B), S)
    assert result.loss == 0.0
    np.testing.assert_array_equal(result.d_rows, np.zeros((B, D)))


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize(("match", "mean"), [("drop", False), ("target", False), ("target", True)])
def test_siglip_is_the_sum_over_pairs_over_the_batch(ids: np.ndarray | None, match: str, mean: bool) -> None:
    if ids is None and match == "target":
        ids = np.arange(B)
    a, t, s, beta = leaves(I, T, S, -3.0)
    is_equal_id = np.zeros((B, B), dtype=bool) if ids is None else ids[:, None] == ids
    positive = torch.tensor(is_equal_id if match == "target" else np.eye(B, dtype=bool))
    admitted = positive | torch.tensor((match == "target") | ~is_equal_id)
    z = torch.where(positive, 1.0, -1.0).double()
    x = s * a @ t.T + beta
    value = -(logsigmoid(z * x) * admitted).sum() / B
    result = list(siglip(I, T, S, -3.0, row_ids=ids, column_ids=ids, match=match, mean=mean))
    balls = sigmoid(Problem(I, T, S, -3.0, Pairs(np.arange(B), ids, ids, match)), B).all
    if mean:
        row_sums = (logsigmoid(x) * positive).sum(1)
        value = value + (row_sums - row_sums / positive.sum(1)).sum() / B
        balls = [Ball(x, 3 * ball.rad) for x, ball in zip(result, balls, strict=True)]
    check(result, value, [a, t, s, beta], balls)


def test_an_empty_batch_is_a_loss_of_zero() -> None:
    none = np.zeros((0, D))
    for result in (
        clip(none, none, S),
        info_nce(none, T, S),
        nt_xent(none, none, S),
        sup_con(none, np.zeros(0, dtype=np.int64), S),
        siglip(none, none, S, 0.0),
    ):
        assert result.loss == 0.0
        assert result.d_rows.shape == (0, D)
        assert not result.d_columns.any()


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
    """Label smoothing is torch's, L_in is SupCon Eq. 3, the margin is CosFace Eq. 4, and a threshold is a mask.

    With a guide the mask depends on the guide's similarities alone (GISTEmbed, Sec. 3).
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
        limit = own * (1 + t) if options.relative else own + (S * t if options.guide is None else t)
        # -1e30 and not -inf, because a target of 0 times -inf is NaN; its exponential is 0
        x = x.masked_fill(((g > limit) & (positive == 0)) | ~admitted, -1e30)
        x = x - s * options.margin * positive
        y = positive / positive.sum(1, keepdim=True)
        losses = cross_entropy(x, y, label_smoothing=options.smoothing, reduction="none")
        return (w * losses).sum() / w.sum()

    x = s * a @ t.T
    g = x.detach() if options.guide is None else torch.tensor(options.guide[0] @ options.guide[1].T)
    arguments = {"row_ids": pairs.row_ids, "column_ids": pairs.column_ids, "match": pairs.match}
    result = clip(I, T, S, **arguments, weights=weights, options=options)
    # balls of logits that are larger by the factor 1 + margin bound the errors of probabilities and targets
    u = (w / w.sum()).numpy() / 2
    plain_balls = general(Problem(I, T, S * (1 + options.margin), 0.0, pairs, u, u)).all[:4]
    value = (side(x, g) + side(x.T, g.T)) / 2
    expected = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, [a, t, s]))]
    balls = [Ball(x, 4 * (1 + options.smoothing) * ball.rad) for x, ball in zip(expected, plain_balls, strict=True)]
    assert all(map(agrees, list(result)[:4], balls))


@pytest.mark.parametrize("two_sided", [True, False])
def test_distillation_is_the_mean_of_torch_s_cross_entropies_of_the_teacher_s_softmax(two_sided: bool) -> None:
    a, t, s = leaves(I, T, S)
    x, y = s * a @ t.T, torch.tensor(3.0 * GUIDE[0] @ GUIDE[1].T)
    if two_sided:
        form, share = clip.form(I, T, S), 1.0
        value = (cross_entropy(x, y.softmax(1)) + cross_entropy(x.T, y.T.softmax(1))) / 2
    else:
        form, share = info_nce.form(I, T, S), 0.3
        value = 0.7 * cross_entropy(x, torch.arange(B)) + 0.3 * cross_entropy(x, y.softmax(1))
    # the targets have the rounding errors of probabilities
    plain_balls = softmax(I, T, Pairs(np.arange(B)), 0.5 / B, 0.5 / B)[:4]
    expected = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, [a, t, s]))]
    result = list(distillation(form, (*GUIDE, 3.0), share=share))[:4]
    assert all(agrees(ours, Ball(x, 4 * ball.rad)) for ours, x, ball in zip(result, expected, plain_balls, strict=True))
