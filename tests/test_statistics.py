"""N, P and D of rows and columns, and any loss of them, against full matrices in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import contrastile
from contrastile import training
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import triangle

M, N, WIDTH = 37, 53, 19
UNIT = 2.0**-53
KINDS = ("negatives", "positives", "ids", "left out", "itself", "labels")


def drawn(kind: str) -> tuple[tuple[Tensor, Tensor | None], dict[str, Any], Tensor, Tensor]:
    """Features, keywords, and which pairs are positive and which are admitted."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in (M, N))
    of_rows, of_columns = (torch.randint(0, 9, (n,), generator=draw) for n in (M, N))
    equal, everything = of_rows[:, None] == of_columns, torch.ones(M, N, dtype=torch.bool)
    where = torch.randint(-1 if kind == "positives" else 0, N, (M,), generator=draw)
    named = where[:, None] == torch.arange(N)
    ids = {"row_ids": of_rows, "column_ids": of_columns}
    others = ~torch.eye(M, dtype=torch.bool)
    found: dict[str, Any] = {
        "negatives": ({}, torch.eye(M, N, dtype=torch.bool), everything),
        "positives": ({"positives": where}, named, everything),
        "ids": ({**ids, "ids_are": "positives"}, equal, everything),
        "left out": ({**ids, "positives": where}, named, named | ~equal),
        "itself": ({}, others & False, others),
        "labels": (
            {"row_ids": of_rows, "ids_are": "positives"},
            (of_rows[:, None] == of_rows) & others,
            others,
        ),
    }
    return (rows, None if kind in KINDS[-2:] else columns), *found[kind]


def side(x: Tensor, positive: Tensor, admitted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = x.masked_fill(~positive, -torch.inf).logsumexp(1)
    mean = (x * positive).sum(1) / positive.sum(1).clamp(min=1)
    d = torch.where(positive.any(1), p - mean, torch.zeros_like(p))
    return x.masked_fill(positive | ~admitted, -torch.inf).logsumexp(1), p, d


def dense(
    rows: Tensor, columns: Tensor | None, scale: Tensor, positive: Tensor, admitted: Tensor
) -> tuple[Tensor, Tensor]:
    """All statistics, as ``stacked`` has them, and the logits."""
    x = scale * (rows @ (rows if columns is None else columns).T)
    return torch.cat(
        [torch.stack(side(*each)) for each in ((x, positive, admitted), (x.T, positive.T, admitted.T))], 1
    ), x


def stacked(found: contrastile.losses.Statistics) -> Tensor:
    return torch.cat([torch.stack(each) for each in found], 1)


def value(statistics: Tensor, weight: Tensor) -> Tensor:
    """A loss that nobody has: every statistic with a weight of its own, where there is one."""
    return (weight * torch.where(statistics.isfinite(), statistics, 0.0)).sum()


class Call:
    """A drawn call, its truth, and bounds of a float64 computation of it."""

    def __init__(self, kind: str) -> None:
        self.features, self.keywords, self.positive, self.admitted = drawn(kind)
        self.scale = torch.tensor(1.3, dtype=torch.float64)
        self.leaves = [x for x in (*self.features, self.scale) if x is not None]
        given = self.taken(self.leaves)
        exact, x = dense(*given, self.positive, self.admitted)
        self.weight = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        # half of the statistics have no part
        self.weight *= torch.rand(exact.shape, generator=torch.Generator().manual_seed(2)) < 0.5
        (slope,) = torch.autograd.grad(value(exact, self.weight), x, retain_graph=True)
        self.gradients = torch.autograd.grad(value(exact, self.weight), self.given)
        self.exact, absolute = exact.detach(), [x.detach().abs() for x in given if x is not None]
        q, k, s = absolute if len(absolute) == 3 else (absolute[0], *absolute)
        # products of WIDTH terms, twice; sums of up to M + N; exponentials and logarithms of 4 ulps
        error = 2 * UNIT * (WIDTH + 8) * (s * (q @ k.T)).max()
        self.bound = error + UNIT * (M + N + 32) * self.exact.where(self.exact.isfinite(), 0.0).abs().max()
        # no entry of |G| is larger than what its row and its column add up to
        size = self.weight.abs().sum(0)
        g = torch.expm1(4 * self.bound) * 2 * (size[:M, None] + size[M:]) + UNIT * (M + N) * slope.abs()
        wide = [s * g @ k, s * g.T @ q, (g * (q @ k.T)).sum()]
        wide = wide if self.features[1] is not None else [wide[0] + wide[1], wide[2]]
        self.bounds = [x + 8 * UNIT * y.abs() for x, y in zip(wide, self.gradients, strict=True)]

    def taken(self, leaves: list[Tensor]) -> list[Any]:
        """Rows, columns and scale that require a gradient."""
        self.given = [x.detach().clone().requires_grad_() for x in leaves]
        rows, *columns, scale = self.given
        return [rows, columns[0] if columns else None, scale]

    def check(self, found: Any, gradients: Any = None) -> None:
        """Within the bounds; in the gradients of ``given`` if they are not given."""
        with torch.no_grad():
            assert ((stacked(found) - self.exact).abs() <= self.bound)[self.exact.isfinite()].all()
            assert torch.equal(stacked(found)[~self.exact.isfinite()], self.exact[~self.exact.isfinite()])
        gradients = gradients or torch.autograd.grad(value(stacked(found), self.weight), self.given)
        for x, y, bound in zip(gradients, self.gradients, self.bounds, strict=True):
            assert ((x - y).abs() <= bound).all()


def called(call: Call, given: list[Any], **settings: Any) -> contrastile.losses.Statistics:
    rows, columns, scale = given
    if columns is not None and not call.keywords:
        return contrastile.statistics(rows, columns[:M], scale, negatives=[columns[M:]], **settings)
    return contrastile.statistics(rows, columns, scale, **call.keywords, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"backend": "numpy"}, {"tile": 8}, {"block": 16}, {}], ids=str)
def test_a_process_alone(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", 9)
    call = Call(kind)
    # the second call of a signature is a prepared one
    for _ in range(2):
        call.check(called(call, call.taken(call.leaves), **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_numpy_have_the_statistics_alone(kind: str) -> None:
    call = Call(kind)
    given = [None if x is None else x.detach().numpy() for x in call.taken(call.leaves)]
    call.keywords = {name: x if isinstance(x, str) else x.numpy() for name, x in call.keywords.items()}
    found = called(call, given)
    assert all(type(x) is np.ndarray and x.dtype == np.float64 for each in found for x in each)
    call.check([[torch.from_numpy(x.copy()) for x in each] for each in found], call.gradients)


def test_a_compiled_step_and_a_transform() -> None:
    for call, run in (
        (Call("left out"), torch.compile(called, backend="eager", fullgraph=True)),
        (Call("ids"), called),
    ):
        call.check(run(call, call.taken(call.leaves)))
    found = torch.func.grad(lambda *given: value(stacked(called(call, given)), call.weight), (0, 1, 2))(*call.leaves)
    call.check(called(call, call.leaves), found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchange", ["ring", "gather", "replicate"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("counts", [((7, 0, 30), (9, 14, 30)), ((M,), (N,))])
def test_over_ranks(kind: str, exchange: str, reduction: str, counts: Any) -> None:
    """The ranks' own losses add up to the loss of the test: their gradients are those of this sum."""
    call, ranks = Call(kind), len(counts[0])
    keywords, given = call.keywords, call.taken(call.leaves)
    if kind == "negatives":
        keywords = {"positives": torch.arange(M)}

    def program(comm: InProcess) -> Any:
        def own(x: Tensor, of: int) -> Tensor:
            return x.split(counts[of])[comm.rank]

        rows, columns, scale = (None if x is None else x.detach() for x in given)
        parts = [own(rows, 0), None if columns is None else own(columns, 1), scale.clone()]
        leaves = [x.requires_grad_() for x in parts if x is not None]
        mine = {k: x if isinstance(x, str) else own(x, int(k == "column_ids")) for k, x in keywords.items()}
        settings = {"group": comm, "exchange": exchange, "parameter_reduction": reduction}
        found = contrastile.statistics(*parts, **mine, **settings)
        weights = [
            own(x.T, of).T for x, of in ((call.weight[:, :M], 0), (call.weight[:, M:], int(columns is not None)))
        ]
        total = sum(value(torch.stack(each), weight) for each, weight in zip(found, weights, strict=True))
        return *(torch.stack(each).detach() for each in found), *torch.autograd.grad(total, leaves)

    over_rows, over_columns, *gradients = zip(*InProcessGroup[Any](ranks).run(program), strict=True)
    found = [list(torch.cat(each, 1)) for each in (over_rows, over_columns)]
    # each rank holds the whole scale, and 1 / n of its gradient
    call.check(found, [*map(torch.cat, gradients[:-1]), sum(gradients[-1])])


def test_a_gradient_cache_takes_a_loss_of_the_user_s_own() -> None:
    call = Call("left out")
    towers = [torch.nn.Embedding.from_pretrained(x.clone(), freeze=False) for x in call.leaves[:2]]
    scale = call.leaves[2].clone().requires_grad_()
    inputs = torch.arange(M), torch.arange(N)

    def loss(*given: Any) -> Tensor:
        return value(stacked(called(call, list(given))), call.weight)

    training.cached_step(tuple(towers), inputs, loss, scale=scale, chunk=10)
    call.check(called(call, call.leaves), [*(x.weight.grad for x in towers), scale.grad])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"ids_are": "labels"}, "ids_are must be 'false_negatives' or 'positives', got 'labels'"),
        ({"ids_are": "positives"}, "row_ids must be given with ids_are='positives', got none"),
        ({"positives": torch.full((M,), N)}, r"positives must lie in -1\.\.52 "),
        ({"row_ids": torch.zeros(M, dtype=torch.int64)}, "row_ids and column_ids must be given together"),
        ({"columns": None, "positives": torch.zeros(M)}, "positives must be None with columns=None, got one"),
        (
            {"ids_are": "positives", "row_ids": torch.zeros(M), "positives": torch.zeros(M)},
            "positives must be None with ids_are='positives', got some",
        ),
        ({}, "rows and columns must have as many rows as each other"),
    ],
)
def test_what_makes_no_sense_is_refused(keywords: dict[str, Any], message: str) -> None:
    rows, columns = torch.ones(M, 3), torch.ones(N, 3)
    given = {"columns": columns, **keywords}
    with pytest.raises(ValueError, match=message):
        contrastile.statistics(rows, given.pop("columns"), 1.0, **given)
    with pytest.raises(ValueError, match=r"loss must be one of contrastile\.clip_loss"):
        contrastile.value_and_grad(contrastile.statistics)
