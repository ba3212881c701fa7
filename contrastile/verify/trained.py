"""What only ``contrastile.training`` has: chunks, random numbers that come again, weights and metrics."""

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
    asked = case.partition(":")[2]
    every = _numbers, _modes, _distances, _steps, _learning, _weights, _metrics, _search
    checks = [x for x in every if asked in x.__name__]
    if not checks:
        raise SkipError(f"it has no {asked!r}")
    for check in checks:
        for label, right in check(Batch(subject)):
            yield f"{check.__name__.strip('_')}: {label}", NOTHING if right else wrong("it does not hold")


class Batch:
    """Rows of a parameter, which are the embeddings, and of a constant table; and a loss of both."""

    def __init__(self, subject: Subject) -> None:
        import torch

        draw = torch.Generator().manual_seed(0)
        first, second = (torch.randn(_ROWS, _WIDTH, generator=draw).to(subject.device) for _ in range(2))
        self.subject = subject
        self.table: Any = first.requires_grad_()
        self.fixed: Any = second
        self.index: Any = torch.arange(_ROWS, device=subject.device)
        self.settings: dict[str, Any] = {"backend": subject.name, **subject.settings}
        self.loss: Any = partial(losses.clip_loss, **self.settings)
        self.seen: list[int] = []
        self.frozen: Any = []

    def encode(self, chunk: Any) -> Any:
        """Rows of the parameter; how many is noted."""
        self.seen.append(len(chunk))
        return self.table[chunk]

    def step(self, *towers: Callable[..., Any], **how: Any) -> Any:
        """A cached step of towers; of the batch's own where none is given."""
        from contrastile.training import cached_step

        how = {"scale": 10.0, "chunk": _CHUNK, "loss": self.loss, **how}
        given = towers or (self.encode, lambda chunk: self.frozen.append(len(chunk)) or self.fixed[chunk])
        return cached_step(given, (self.index.clone(), self.index.clone()), **how)


def _numbers(batch: Batch) -> Any:
    import torch

    generators: dict[str, Callable[[], float]] = {
        "Python": random.random,
        "NumPy": lambda: float(np.random.random()),
        "torch": lambda: float(torch.rand(())),
    }
    for name, draw in generators.items():
        towers, every = [], []
        for x in (batch.table, batch.fixed):
            drawn: list[float] = []

            def encode(chunk: Any, x: Any = x, draw: Any = draw, drawn: Any = drawn) -> Any:
                drawn.append(draw())
                return x[chunk] * drawn[-1]

            towers.append(encode)
            every.append(drawn)
        batch.fixed.requires_grad_()
        between: list[float] = []
        batch.step(*towers, loss=lambda *given, of=between, draw=draw: of.append(draw()) or batch.loss(*given))
        for tower, drawn in enumerate(every):
            first, second = drawn[: len(_COUNTS)], drawn[len(_COUNTS) :]
            yield f"of {name}, replayed in tower {tower}", first == second
        yield f"of {name}, after it", len(set(sum(every, [*between, draw()]))) == 2 + 2 * len(_COUNTS)
        seen: list[float] = []

        def ends(chunk: Any, draw: Any = draw, seen: Any = seen) -> Any:
            seen.append(draw())
            return batch.table[chunk] if len(seen) <= len(_COUNTS) else 1 / 0

        with suppress(ZeroDivisionError):
            batch.step(ends, lambda chunk: batch.fixed[chunk])
        yield f"of {name}, after an error", draw() not in seen


def _modes(batch: Batch) -> Any:
    import torch

    from contrastile.training import Cached

    kind, chunks, seen, wide = batch.table.device.type, (batch.index, batch.index), list[Any](), list[Any]()

    def encode(chunk: Any) -> Any:
        seen.append(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        return batch.table[chunk]

    def loss(*given: Any) -> Any:
        wide.append((given[0] @ given[1].T).dtype)
        return batch.loss(*given)

    for dtype, there in ((torch.bfloat16, None), (torch.float16, None), (None, torch.bfloat16)):
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            value: Any = Cached(loss, (encode, lambda chunk: batch.fixed[chunk]), _CHUNK)(*chunks, scale=10.0)
        with torch.autocast(kind, dtype=there, enabled=there is not None):
            value.backward()
        yield f"autocast to {dtype}, again to {there}", seen[-2 * len(_COUNTS) :] == [dtype] * 2 * len(_COUNTS)
        # in float16 gradients would underflow
        right = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        yield f"autocast to {dtype}, in the loss", wide[-1] == right
    found = []
    for factor in (1.0, 2.0**14):
        towers = (lambda chunk, x=x: x[chunk].half() for x in (batch.table, batch.fixed))
        batch.table.grad = torch.zeros_like(batch.table)
        value = factor * Cached(batch.loss, tuple(towers), _CHUNK)(*chunks, scale=1e-3)
        value.backward()
        found.append(batch.table.grad * (2.0**14 / factor))
    # these are below float16's normal numbers
    yield "a factor, before gradients are narrowed", not torch.equal(*found)


def _distances(batch: Batch) -> Any:
    import torch

    from contrastile.training import deep_distance

    drawn: list[float] = []
    seen: list[Any] = []

    class Phi(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(()))

        def forward(self, f: Any, g: Any) -> Any:
            assert max(len(f), len(g)) <= 9, "more than a tile of distances at once"
            drawn.append(float(torch.rand(())))
            seen.append(drawn[-1] * self.factor * (f @ g.T))
            return seen[-1]

    phi = Phi()
    loss: Any = deep_distance(phi, 9)
    loss(batch.table, batch.fixed).backward()
    half = len(drawn) // 2
    yield "random numbers, replayed", drawn[:half] == drawn[half:]
    yield "random numbers, after it", float(torch.rand(())) not in drawn
    phi.factor = torch.nn.Parameter(torch.ones(()))
    loss(batch.table, batch.fixed).backward()
    yield "a parameter that was replaced", phi.factor.grad is not None
    seen.clear()
    with torch.autocast(batch.table.device.type, torch.bfloat16):
        value: Any = loss(batch.table, batch.fixed)
    value.backward()
    first, again = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    yield "autocast, again", seen[0].dtype == torch.bfloat16 and all(map(torch.equal, first, again))
    yield "autocast, and not of the loss", value.dtype == torch.float32


def _steps(batch: Batch) -> Any:
    import torch

    from contrastile.training import cached_step

    scale: Any = torch.tensor(10.0, requires_grad=True)
    value = batch.step(scale=scale)
    yield "a loss without a graph", not value.requires_grad
    yield "rows of the chunks", batch.seen == 2 * _COUNTS
    yield "a frozen tower's, once", batch.frozen == _COUNTS
    first, of_scale = batch.table.grad.clone(), scale.grad.clone()
    called = []
    batch.step(scale=scale, backward=lambda x: called.append(x.backward()))
    # a sum of two equal numbers is exact
    yield "gradients are added", torch.equal(batch.table.grad, 2 * first) and torch.equal(scale.grad, 2 * of_scale)
    # the scale's gradient enters by itself
    yield "calls of backward", len(called) == len(_COUNTS) + 1
    # the graph of a number is the caller's, who goes on with it
    batch.step(scale=(made := scale.square()))
    made.backward()
    scale.grad.zero_()
    cached_step(lambda chunk: (batch.table[chunk], batch.fixed[chunk], scale), batch.index, batch.loss, chunk=_CHUNK)
    yield "a number that every chunk gives", torch.equal(scale.grad, of_scale)
    scale.grad.zero_()
    frozen = batch.table.detach()
    batch.step(lambda chunk: frozen[chunk], lambda chunk: (batch.fixed[chunk], scale), scale=None)
    yield "a number that a frozen tower gives", torch.equal(scale.grad, of_scale)
    hooked: list[Any] = []
    scale.register_hook(hooked.append)
    batch.step(scale=scale)
    yield "calls of a hook of the scale", len(hooked) == 1
    batch.seen.clear()

    def popped(chunk: Any) -> Any:
        return chunk.pop("i") if isinstance(chunk, dict) else chunk

    towers = (lambda chunk: batch.encode(popped(chunk))), (lambda chunk: batch.fixed[popped(chunk)])
    batch.step(*towers, split=lambda x, size: [{"i": y} for y in x.split(7)])
    yield "chunks of a splitter", batch.seen == 2 * [7, 7, 7, 2]


def _learning(batch: Batch) -> Any:
    import torch

    batch.step()
    later, rows = 2 * _CHUNK, batch.table.detach()
    late: Any = torch.nn.Parameter(rows[later:].clone())
    batch.step(lambda chunk: rows[chunk] if chunk[0] < later else late[chunk - later], lambda chunk: batch.fixed[chunk])
    yield "what later chunks use", torch.equal(late.grad, batch.table.grad[later:])


def _weights(batch: Batch) -> Any:
    from contrastile.training import Budget, stream

    wide = batch.index[:, None].expand(-1, 3).clone()
    batches = stream((batch.index, wide, batch.index), Budget(3 * _CHUNK), wide.device)
    yield "rows by a budget", [len(x) for (x, *_), _ in batches] == _COUNTS
    for size, total in ((_CHUNK, None), (_ROWS, None), (_CHUNK, 2.0 * _ROWS)):
        chunks = stream(batch.index, size, batch.index.device, total=total)
        for label in ("", ", a second time"):
            found = [(len(chunk), weight) for chunk, weight in chunks]
            right = all(n / (total or _ROWS) == weight for n, weight in found) and sum(n for n, _ in found) == _ROWS
            yield f"of chunks of {size}, total {total}{label}", right


def _metrics(batch: Batch) -> Any:
    import torch

    from contrastile import retrieval
    from contrastile.training import rank_at_1

    draw = np.random.default_rng(0)
    # integers: every product is exact, and some are equal
    query, key = (draw.integers(-1, 2, (size, 4)).astype(np.float32) for size in (_ROWS, _ROWS + 6))
    key[:_ROWS] += 2 * query
    products = query @ key.T
    own = products[np.arange(_ROWS), np.arange(_ROWS)].copy()
    products[np.arange(_ROWS), np.arange(_ROWS)] = -np.inf
    right = float(np.float32((own > products.max(axis=1)).sum()) / np.float32(_ROWS))
    yield "rank at 1", float(rank_at_1(torch.from_numpy(query), torch.from_numpy(key), 7)) == right
    near = torch.tensor([[1.0, 2.0**-9], [1.0, 0.0]])
    with torch.autocast("cpu", torch.bfloat16):
        yield "rank at 1 of what 16 bits do not tell apart", float(rank_at_1(torch.ones(1, 2), near)) == 1.0
        for x in (near, near.bfloat16(), near.sum(1, keepdim=True)):
            yield "a rank of what 16 bits do not tell apart", int(retrieval.ranks(torch.ones_like(x[:1]), x)) == 0
    towers = batch.encode, lambda chunk: (batch.fixed[chunk], -batch.fixed[chunk])
    loss: Any = lambda image, text, _, *numbers: losses.sigmoid_loss(image, text, *numbers, **batch.settings)  # noqa: E731
    found = batch.step(*towers, loss=loss, scale=(10.0, -3.0), metrics=("scale", "rank@1"))
    yield "the scale", float(found["scale"]) == 10.0
    yield "rank at 1 of a step", float(found["rank@1"]) == float(rank_at_1(batch.table.detach(), batch.fixed))


def _search(batch: Batch) -> Any:
    import torch

    from contrastile import retrieval

    draw = np.random.default_rng(1)
    # integers: every product is exact, and many are equal; of the first row all
    n = _ROWS + 180
    rows, columns = (draw.integers(-2, 3, (size, 4)).astype(np.float32) for size in (_ROWS, n))
    positives, of_rows, of_columns = (draw.integers(0, most, m) for most, m in ((n, _ROWS), (9, _ROWS), (9, n)))
    rows[0], of_rows[1] = 0, 9
    x, each = rows @ columns.T, np.arange(_ROWS)
    # within its own margin, if it counted
    positives[1] = np.argmax(x[1] == 0)
    given: Any = [torch.from_numpy(y).to(batch.subject.device) for y in (rows, columns)]
    own, other = x[each, positives], of_rows[:, None] != of_columns
    other[each, positives] = False
    beats = x >= own[:, None]
    nearest = np.argsort(-x, axis=1, kind="stable")
    fits = other & (x <= np.minimum(own + 1, own - np.abs(own) / 2)[:, None]) & (x <= 3)
    top = np.take_along_axis(x, nearest, 1), nearest

    def mined(least: float) -> Any:
        rows = [[j for j in row if fits[i, j] and x[i, j] >= least][2:5] for i, row in enumerate(nearest)]
        return [row + [-1] * (3 - len(row)) for row in rows]

    ids: Any = {"row_ids": torch.from_numpy(of_rows), "column_ids": torch.from_numpy(of_columns)}
    limits: Any = {"range_min": 2, "absolute_margin": -1.0, "relative_margin": 0.5, "max_score": 3.0}
    # kernels, where there are some, take many rows of 16 bits and have tiles of their own
    half: Any = [y.half() for y in given]
    where = torch.from_numpy(positives)
    for (q, k), tile, least, times in ((given, 7, -1.0, 1), (given, None, 1.0, 1), (half, None, -1.0, 10)):
        named: Any = {"positives": where.repeat(times), "tile": tile}
        q = q.repeat(times, 1)
        known = ids | {"row_ids": ids["row_ids"].repeat(times)}
        places = retrieval.ranks(q, k, **named)[:_ROWS]
        yield "ranks", np.array_equal(places.cpu(), beats.sum(axis=1) - 1)
        places = retrieval.ranks(q, k, **named, **known)[:_ROWS]
        yield "ranks among ids", np.array_equal(places.cpu(), (beats & other).sum(axis=1))
        near = [x[:_ROWS].cpu() for x in retrieval.top_k(q, k, 3, tile=tile)]
        yield "the nearest columns", all(np.array_equal(y, z[:, :3]) for y, z in zip(near, top, strict=True))
        found = retrieval.mine_hard_negatives(q, k, 3, **named, **known, **limits, min_score=least)
        yield "hard negatives", found[:_ROWS].tolist() == mined(least)

    def part(group: Any) -> list[Any]:
        i, j = ((slice(9), slice(12)), (slice(9, None), slice(12, None)))[group.rank]
        own: Any = {
            "positives": where[i],
            "row_ids": ids["row_ids"][i],
            "column_ids": ids["column_ids"][j],
        }
        q, k, how = given[0][i], given[1][j], {"group": group, "tile": 7}
        found = retrieval.mine_hard_negatives(q, k, 3, **own, **limits, min_score=-1.0, **how)
        return [
            retrieval.ranks(q, k, **how),
            retrieval.ranks(q, k, **own, **how),
            # more columns than either has
            *retrieval.top_k(q, k, n, **how),
            found,
        ]

    of_two = [torch.cat(parts).cpu() for parts in zip(*Threads(2).run(part), strict=True)]
    # a rank's rows have its own columns for positives
    own = x[each, np.where(each < 9, each, each + 3)]
    right = (x >= own[:, None]).sum(axis=1) - 1, (beats & other).sum(axis=1), *top, mined(-1.0)
    yield "searches of two", all(map(np.array_equal, of_two, right))
