"""Checks of ``contrastile.training``: chunks, replayed random numbers, weights and metrics."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from contrastile import losses
from contrastile.verify.comparison import NOTHING, Comparisons, wrong
from contrastile.verify.trial import SkipError, Subject
from contrastile.verify.worlds import Threads

_ROWS, _WIDTH, _CHUNK = 23, 20, 5
_COUNTS = [_CHUNK] * (_ROWS // _CHUNK) + [_ROWS % _CHUNK]


def training(subject: Subject, case: str) -> Comparisons:
    """Chunks, replayed generators, added gradients, weights and metrics are right."""
    if subject.backend.arrays.name != "torch" or subject.label != "float32":
        raise SkipError("in float32 of torch tensors alone")
    selector = case.partition(":")[2]
    all_checks = _numbers, _modes, _distances, _steps, _learning, _weights, _metrics, _search
    checks = [check for check in all_checks if selector in check.__name__]
    if not checks:
        raise SkipError(f"it has no {selector!r}")
    for check in checks:
        for label, is_right in check(Batch(subject)):
            yield f"{check.__name__.strip('_')}: {label}", NOTHING if is_right else wrong("it does not hold")


class Batch:
    """A parameter whose rows are embeddings, a constant table of embeddings, and the loss of both."""

    def __init__(self, subject: Subject) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        rows, constants = (torch.randn(_ROWS, _WIDTH, generator=generator).to(subject.device) for _ in range(2))
        self.subject = subject
        self.table: Any = rows.requires_grad_()
        self.fixed: Any = constants
        self.index: Any = torch.arange(_ROWS, device=subject.device)
        self.settings: dict[str, Any] = {"backend": subject.name, **subject.settings}
        self.loss: Any = partial(losses.clip_loss, **self.settings)
        self.seen: list[int] = []
        self.frozen: Any = []

    def encode(self, chunk: Any) -> Any:
        """Rows of the parameter; ``seen`` records the number of rows."""
        self.seen.append(len(chunk))
        return self.table[chunk]

    def step(self, *towers: Callable[..., Any], **settings: Any) -> Any:
        """A cached step of these towers; by default of the parameter and the frozen constants."""
        from contrastile.training import cached_step

        settings = {"scale": 10.0, "chunk": _CHUNK, "loss": self.loss, **settings}
        given_towers = towers or (self.encode, lambda chunk: self.frozen.append(len(chunk)) or self.fixed[chunk])
        return cached_step(given_towers, (self.index.clone(), self.index.clone()), **settings)


def _numbers(batch: Batch) -> Any:
    import torch

    generators: dict[str, Callable[[], float]] = {
        "Python": random.random,
        "NumPy": lambda: float(np.random.random()),
        "torch": lambda: float(torch.rand(())),
    }
    for name, draw in generators.items():
        towers, drawn_by_tower = [], []
        for features in (batch.table, batch.fixed):
            drawn: list[float] = []

            def encode(chunk: Any, features: Any = features, draw: Any = draw, drawn: Any = drawn) -> Any:
                drawn.append(draw())
                return features[chunk] * drawn[-1]

            towers.append(encode)
            drawn_by_tower.append(drawn)
        batch.fixed.requires_grad_()
        in_loss: list[float] = []
        batch.step(*towers, loss=lambda *args, numbers=in_loss, draw=draw: numbers.append(draw()) or batch.loss(*args))
        for tower, drawn in enumerate(drawn_by_tower):
            first_pass, second_pass = drawn[: len(_COUNTS)], drawn[len(_COUNTS) :]
            yield f"of {name}, replayed in tower {tower}", first_pass == second_pass
        yield f"of {name}, after it", len(set(sum(drawn_by_tower, [*in_loss, draw()]))) == 2 + 2 * len(_COUNTS)
        drawn_before: list[float] = []

        def raises_in_second_pass(chunk: Any, draw: Any = draw, drawn_before: Any = drawn_before) -> Any:
            drawn_before.append(draw())
            return batch.table[chunk] if len(drawn_before) <= len(_COUNTS) else 1 / 0

        with suppress(ZeroDivisionError):
            batch.step(raises_in_second_pass, lambda chunk: batch.fixed[chunk])
        yield f"of {name}, after an error", draw() not in drawn_before


def _modes(batch: Batch) -> Any:
    import torch

    from contrastile.training import Cached

    device, chunks, in_chunks, in_loss = batch.table.device.type, (batch.index, batch.index), list[Any](), list[Any]()

    def encode(chunk: Any) -> Any:
        in_chunks.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
        return batch.table[chunk]

    def loss(*args: Any) -> Any:
        in_loss.append((args[0] @ args[1].T).dtype)
        return batch.loss(*args)

    for dtype, later in ((torch.bfloat16, None), (torch.float16, None), (None, torch.bfloat16)):
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            value: Any = Cached(loss, (encode, lambda chunk: batch.fixed[chunk]), _CHUNK)(*chunks, scale=10.0)
        with torch.autocast(device, dtype=later, enabled=later is not None):
            value.backward()
        yield f"autocast to {dtype}, again to {later}", in_chunks[-2 * len(_COUNTS) :] == [dtype] * 2 * len(_COUNTS)
        # the loss leaves float16, in which gradients would underflow
        expected = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        yield f"autocast to {dtype}, in the loss", in_loss[-1] == expected
    gradients = []
    for factor in (1.0, 2.0**14):
        towers = (lambda chunk, features=features: features[chunk].half() for features in (batch.table, batch.fixed))
        batch.table.grad = torch.zeros_like(batch.table)
        value = factor * Cached(batch.loss, tuple(towers), _CHUNK)(*chunks, scale=1e-3)
        value.backward()
        gradients.append(batch.table.grad * (2.0**14 / factor))
    # the gradients of the factor 1 are below float16's normal numbers
    yield "a factor, before gradients are narrowed", not torch.equal(*gradients)


def _distances(batch: Batch) -> Any:
    import torch

    from contrastile.training import deep_distance

    drawn: list[float] = []
    distances: list[Any] = []

    class Phi(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(()))

        def forward(self, f: Any, g: Any) -> Any:
            assert max(len(f), len(g)) <= 9, "more than a tile of distances at once"
            drawn.append(float(torch.rand(())))
            distances.append(drawn[-1] * self.factor * (f @ g.T))
            return distances[-1]

    phi = Phi()
    loss: Any = deep_distance(phi, 9)
    loss(batch.table, batch.fixed).backward()
    count = len(drawn) // 2
    yield "random numbers, replayed", drawn[:count] == drawn[count:]
    yield "random numbers, after it", float(torch.rand(())) not in drawn
    phi.factor = torch.nn.Parameter(torch.ones(()))
    loss(batch.table, batch.fixed).backward()
    yield "a parameter that was replaced", phi.factor.grad is not None
    distances.clear()
    with torch.autocast(batch.table.device.type, torch.bfloat16):
        value: Any = loss(batch.table, batch.fixed)
    value.backward()
    forward, recomputed = distances[: len(distances) // 2], distances[len(distances) // 2 :]
    yield "autocast, again", distances[0].dtype == torch.bfloat16 and all(map(torch.equal, forward, recomputed))
    yield "autocast, and not of the loss", value.dtype == torch.float32


def _steps(batch: Batch) -> Any:
    import torch

    from contrastile.training import cached_step

    scale: Any = torch.tensor(10.0, requires_grad=True)
    value = batch.step(scale=scale)
    yield "a loss without a graph", not value.requires_grad
    yield "rows of the chunks", batch.seen == 2 * _COUNTS
    yield "a frozen tower's, once", batch.frozen == _COUNTS
    d_table, d_scale = batch.table.grad.clone(), scale.grad.clone()
    backward_results = []
    batch.step(scale=scale, backward=lambda loss: backward_results.append(loss.backward()))
    # the sum of two equal numbers is exact
    yield "gradients are added", torch.equal(batch.table.grad, 2 * d_table) and torch.equal(scale.grad, 2 * d_scale)
    # one more call is for the scale's gradient
    yield "calls of backward", len(backward_results) == len(_COUNTS) + 1
    # the step must not free the graph of the caller's scale
    batch.step(scale=(square := scale.square()))
    square.backward()
    scale.grad.zero_()
    cached_step(lambda chunk: (batch.table[chunk], batch.fixed[chunk], scale), batch.index, batch.loss, chunk=_CHUNK)
    yield "a number that every chunk gives", torch.equal(scale.grad, d_scale)
    scale.grad.zero_()
    frozen = batch.table.detach()
    batch.step(lambda chunk: frozen[chunk], lambda chunk: (batch.fixed[chunk], scale), scale=None)
    yield "a number that a frozen tower gives", torch.equal(scale.grad, d_scale)
    hook_calls: list[Any] = []
    scale.register_hook(hook_calls.append)
    batch.step(scale=scale)
    yield "calls of a hook of the scale", len(hook_calls) == 1
    batch.seen.clear()

    def index_of(chunk: Any) -> Any:
        return chunk.pop("i") if isinstance(chunk, dict) else chunk

    towers = (lambda chunk: batch.encode(index_of(chunk))), (lambda chunk: batch.fixed[index_of(chunk)])
    batch.step(*towers, split=lambda index, size: [{"i": part} for part in index.split(7)])
    yield "chunks of a splitter", batch.seen == 2 * [7, 7, 7, 2]


def _learning(batch: Batch) -> Any:
    import torch

    batch.step()
    start, rows = 2 * _CHUNK, batch.table.detach()
    late: Any = torch.nn.Parameter(rows[start:].clone())
    batch.step(lambda chunk: rows[chunk] if chunk[0] < start else late[chunk - start], lambda chunk: batch.fixed[chunk])
    yield "what later chunks use", torch.equal(late.grad, batch.table.grad[start:])


def _weights(batch: Batch) -> Any:
    from contrastile.training import Budget, stream

    wide_index = batch.index[:, None].expand(-1, 3).clone()
    batches = stream((batch.index, wide_index, batch.index), Budget(3 * _CHUNK), wide_index.device)
    yield "rows by a budget", [len(x) for (x, *_), _ in batches] == _COUNTS
    for size, total in ((_CHUNK, None), (_ROWS, None), (_CHUNK, 2.0 * _ROWS)):
        chunks = stream(batch.index, size, batch.index.device, total=total)
        for label in ("", ", a second time"):
            weights = [(len(chunk), weight) for chunk, weight in chunks]
            right = all(n / (total or _ROWS) == weight for n, weight in weights) and sum(n for n, _ in weights) == _ROWS
            yield f"of chunks of {size}, total {total}{label}", right


def _metrics(batch: Batch) -> Any:
    import torch

    from contrastile import retrieval
    from contrastile.training import rank_at_1

    generator = np.random.default_rng(0)
    # products of integers are exact, and some are equal
    query, key = (generator.integers(-1, 2, (size, 4)).astype(np.float32) for size in (_ROWS, _ROWS + 6))
    key[:_ROWS] += 2 * query
    products = query @ key.T
    positive_products = products[np.arange(_ROWS), np.arange(_ROWS)].copy()
    products[np.arange(_ROWS), np.arange(_ROWS)] = -np.inf
    expected = float(np.float32((positive_products > products.max(axis=1)).sum()) / np.float32(_ROWS))
    yield "rank at 1", float(rank_at_1(torch.from_numpy(query), torch.from_numpy(key), 7)) == expected
    near = torch.tensor([[1.0, 2.0**-9], [1.0, 0.0]])
    with torch.autocast("cpu", torch.bfloat16):
        yield "rank at 1 of what 16 bits do not tell apart", float(rank_at_1(torch.ones(1, 2), near)) == 1.0
        for k in (near, near.bfloat16(), near.sum(1, keepdim=True)):
            yield "a rank of what 16 bits do not tell apart", int(retrieval.ranks(torch.ones_like(k[:1]), k)) == 0
    towers = batch.encode, lambda chunk: (batch.fixed[chunk], -batch.fixed[chunk])
    loss: Any = lambda image, text, _, *numbers: losses.sigmoid_loss(image, text, *numbers, **batch.settings)  # noqa: E731
    metrics = batch.step(*towers, loss=loss, scale=(10.0, -3.0), metrics=("scale", "rank@1"))
    yield "the scale", float(metrics["scale"]) == 10.0
    yield "rank at 1 of a step", float(metrics["rank@1"]) == float(rank_at_1(batch.table.detach(), batch.fixed))


def _search(batch: Batch) -> Any:
    import torch

    from contrastile import retrieval

    generator = np.random.default_rng(1)
    # products of integers are exact, and many are equal; those of the first row are all 0
    n = _ROWS + 180
    rows, columns = (generator.integers(-2, 3, (size, 4)).astype(np.float32) for size in (_ROWS, n))
    positives, row_ids, column_ids = (generator.integers(0, upper, m) for upper, m in ((n, _ROWS), (9, _ROWS), (9, n)))
    rows[0], row_ids[1] = 0, 9
    x, row_numbers = rows @ columns.T, np.arange(_ROWS)
    # a positive of product 0 would lie within its own margin, if it were a negative
    positives[1] = np.argmax(x[1] == 0)
    features: Any = [torch.from_numpy(y).to(batch.subject.device) for y in (rows, columns)]
    positive_x, is_negative = x[row_numbers, positives], row_ids[:, None] != column_ids
    is_negative[row_numbers, positives] = False
    is_above = x >= positive_x[:, None]
    nearest = np.argsort(-x, axis=1, kind="stable")
    in_range = is_negative & (x <= np.minimum(positive_x + 1, positive_x - np.abs(positive_x) / 2)[:, None]) & (x <= 3)
    top = np.take_along_axis(x, nearest, 1), nearest

    def negatives(min_score: float) -> Any:
        rows = [[j for j in row if in_range[i, j] and x[i, j] >= min_score][2:5] for i, row in enumerate(nearest)]
        return [row + [-1] * (3 - len(row)) for row in rows]

    ids: Any = {"row_ids": torch.from_numpy(row_ids), "column_ids": torch.from_numpy(column_ids)}
    limits: Any = {"range_min": 2, "absolute_margin": -1.0, "relative_margin": 0.5, "max_score": 3.0}
    # GPU kernels need many rows of 16 bits, and choose their own tiles
    half: Any = [y.half() for y in features]
    positive_index = torch.from_numpy(positives)
    for (q, k), tile, min_score, repeats in ((features, 7, -1.0, 1), (features, None, 1.0, 1), (half, None, -1.0, 10)):
        keywords: Any = {"positives": positive_index.repeat(repeats), "tile": tile}
        q = q.repeat(repeats, 1)
        known_ids = ids | {"row_ids": ids["row_ids"].repeat(repeats)}
        ranks = retrieval.ranks(q, k, **keywords)[:_ROWS]
        yield "ranks", np.array_equal(ranks.cpu(), is_above.sum(axis=1) - 1)
        ranks = retrieval.ranks(q, k, **keywords, **known_ids)[:_ROWS]
        yield "ranks among ids", np.array_equal(ranks.cpu(), (is_above & is_negative).sum(axis=1))
        nearest_columns = [x[:_ROWS].cpu() for x in retrieval.top_k(q, k, 3, tile=tile)]
        yield "the nearest columns", all(np.array_equal(y, z[:, :3]) for y, z in zip(nearest_columns, top, strict=True))
        mined = retrieval.mine_hard_negatives(q, k, 3, **keywords, **known_ids, **limits, min_score=min_score)
        yield "hard negatives", mined[:_ROWS].tolist() == negatives(min_score)

    def search(group: Any) -> list[Any]:
        i, j = ((slice(9), slice(12)), (slice(9, None), slice(12, None)))[group.rank]
        shard: Any = {"positives": positive_index[i], "row_ids": ids["row_ids"][i], "column_ids": ids["column_ids"][j]}
        q, k, settings = features[0][i], features[1][j], {"group": group, "tile": 7}
        mined = retrieval.mine_hard_negatives(q, k, 3, **shard, **limits, min_score=-1.0, **settings)
        return [
            retrieval.ranks(q, k, **settings),
            retrieval.ranks(q, k, **shard, **settings),
            # more columns than either rank has
            *retrieval.top_k(q, k, n, **settings),
            mined,
        ]

    joined = [torch.cat(parts).cpu() for parts in zip(*Threads(2).run(search), strict=True)]
    # by default the positives of a rank's rows are its own columns
    positive_x = x[row_numbers, np.where(row_numbers < 9, row_numbers, row_numbers + 3)]
    expected = (x >= positive_x[:, None]).sum(axis=1) - 1, (is_above & is_negative).sum(axis=1), *top, negatives(-1.0)
    yield "searches of two", all(map(np.array_equal, joined, expected))
