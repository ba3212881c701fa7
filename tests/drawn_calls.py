"""Calls of the public losses drawn at random, each held to full matrices in float64: no part of the package states it.

A seed decides everything: the loss, who calls it (autograd, ``value_and_grad``, a module, ``torch.func``, the gradient
cache, several ranks), how the features lie in memory and what they share with each other, dtypes, numbers, options and
the modes that torch is in. Run more of them than the tests do:

    python tests/drawn_calls.py --count 20000 --first 0

A change that must keep every bit is held to the version before it, on one machine:

    python tests/drawn_calls.py --bits before.json                       # with the version before
    python tests/drawn_calls.py --bits after.json --against before.json  # exit code 1 if a bit differs
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from full_matrices import Truth, truth
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import contrastile
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.training import cached_step

DTYPES = {"float32": 0.45, "float64": 0.25, "bfloat16": 0.2, "float16": 0.1}
LOSSES = ("clip_loss", "info_nce", "nt_xent", "sup_con", "sigmoid_loss")
INTERFACES = {
    "autograd": 0.4,
    "value_and_grad": 0.15,
    "numpy": 0.1,
    "module": 0.1,
    "torch.func": 0.07,
    "cached_step": 0.08,
    "ranks": 0.1,
}
MODES = ("none", "none", "dispatch mode", "thread", "autocast", "retained graph", "interleaved", "float64 by default")


def views(kind: str, base: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Two matrices of b rows as views of one base, which is the leaf; of "apart" they share its storage and no row."""
    half = base.shape[0] // 2
    x, y = base[:b], base[half : half + b]
    if kind == "same":
        return x, x
    if kind == "detached":
        return x, x.detach()
    if kind == "overlapping":
        return x, base[1 : b + 1]
    if kind == "every other row":
        return base[: 2 * b : 2], x
    if kind == "repeated row":
        return x[:1].expand(b, -1), x
    if kind == "columns first":
        return x.T.contiguous().T, y
    if kind == "every other column":
        even = base.shape[1] // 2 * 2
        return base[:b, :even:2], base[half : half + b, 1:even:2]
    if kind == "square":
        square = base[:b, :b]
        return square, square.T
    if kind == "misaligned":
        flat = base.reshape(-1)
        d = base.shape[1]
        return flat[1 : 1 + b * d].reshape(b, d), flat[3 + b * d : 3 + 2 * b * d].reshape(b, d)
    return x, y


VIEWS = (
    *("apart", "apart", "same", "detached", "overlapping", "every other row", "repeated row", "columns first"),
    *("every other column", "square", "misaligned"),
)


@dataclass
class Call:
    """A drawn call: its arrays in the features' dtype, and how it is made."""

    seed: int
    loss: str
    interface: str
    dtype: str
    view: str
    mode: str
    b: int
    base: Tensor
    scale: float
    bias: float | None
    settings: dict[str, Any]
    upstream: float
    named: dict[str, Any] = field(default_factory=dict)
    labels: Tensor | None = None
    negatives: list[Tensor] = field(default_factory=list)
    trains: bool = True
    scale_kind: str = "number"
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [self.loss, self.interface, self.dtype, self.view, self.mode, f"b = {self.b}", f"d = {self.width}"]
        words += [f"scale {self.scale:g} as {self.scale_kind}", f"upstream {self.upstream:g}", str(self.settings)]
        words += sorted(self.named) + [f"{len(self.negatives)} negatives"] * bool(self.negatives)
        return f"seed {self.seed}: {', '.join(words)}" + f", rows per rank {self.sizes}" * bool(self.sizes)

    @property
    def width(self) -> int:
        return self.base.shape[1]

    @property
    def towers(self) -> int:
        return 1 if self.loss == "sup_con" else 2

    def numbers(self, kind: str | None = None) -> list[Any]:
        """The scale and the bias, as this kind of number."""
        kind = kind or self.scale_kind
        dtype = torch.float64 if self.dtype == "float64" else torch.float32

        def made(x: float) -> Any:
            if kind in ("number", "NumPy's"):
                return x if kind == "number" else np.float64(x)
            return torch.tensor([x] if kind == "one element" else x, dtype=dtype, requires_grad=kind != "frozen")

        return [made(x) for x in (self.scale, self.bias) if x is not None]

    def with_negatives(self, negatives: list[Tensor]) -> dict[str, Any]:
        """The keyword arguments."""
        return self.named | ({"negatives": negatives[0] if len(negatives) == 1 else negatives} if negatives else {})

    def made(
        self, x: Any, y: Any, numbers: list[Any], named: dict[str, Any], through: Any = None, **settings: Any
    ) -> Any:
        """What the loss returns, or what ``through`` makes of it."""
        function = getattr(contrastile, self.loss)
        function = function if through is None else through(function)
        return function(x, self.labels if self.loss == "sup_con" else y, *numbers, **named, **settings)


def drawn(seed: int) -> Call:
    """The call of a seed."""
    r = np.random.default_rng(seed)

    def pick(table: Any) -> Any:
        if isinstance(table, dict):
            return str(r.choice(list(table), p=np.array(list(table.values())) / sum(table.values())))
        return table[int(r.integers(len(table)))]

    loss, interface, dtype, view, mode = pick(LOSSES), pick(INTERFACES), pick(DTYPES), pick(VIEWS), pick(MODES)
    b = int(pick((1, 2, 3, 5, 8, 16, 23, 32, 33, 47, 64, 100, 129, 257)))
    if r.random() < 0.01:
        b = int(pick((1000, 1088, 1280)))
    d = int(pick((1, 2, 3, 7, 8, 16, 31, 40, 64, 65)))
    if interface == "module":
        loss = pick(("clip_loss", "sigmoid_loss"))
    if interface in ("cached_step", "ranks", "numpy"):
        view = "apart"
    if interface not in ("autograd", "module", "cached_step"):
        mode = "none"
    if interface == "cached_step" and mode not in ("none", "thread"):
        mode = "none"
    if view == "every other column":
        d = max(2, d)
    if view == "square":
        d = b = min(b, 129)
    scale = float(pick((1.0, 8.25, 14.3, 33.3, 100.0, 0.0, -5.7)))
    norm = float(pick((1.0, 1.0, 1.0, 0.2)))
    if dtype == "bfloat16" and interface == "numpy":
        dtype = "float32"
    base = torch.from_numpy(r.standard_normal((2 * b + 4, d)))
    base = base + pick((0.0, 0.0, 2.0)) * torch.from_numpy(r.standard_normal((1, d)))
    if r.random() < 0.3:
        # pairs of a trained model
        half = base.shape[0] // 2
        base[half : half + b] = base[:b] + 0.3 * base[half : half + b]
    base = (norm * torch.nn.functional.normalize(base, dim=1)).to(getattr(torch, dtype))
    settings: dict[str, Any] = {}
    if r.random() < 0.3:
        settings["tile"] = pick((1, 7, 8, 16, (16, 32), (64, 64), 33))
    if r.random() < 0.2:
        settings[pick(("workspace", "keep"))] = int(pick((0, 1, 64)))
    if r.random() < 0.15 and interface in ("autograd", "value_and_grad", "module"):
        settings["block"] = int(pick((1, 5, 16, 64)))
    if r.random() < 0.2:
        settings["backend"] = pick(("torch", "numpy", "auto"))
    if settings.get("backend") == "numpy" and (dtype == "bfloat16" or mode in ("autocast", "dispatch mode")):
        del settings["backend"]
    call = Call(seed, loss, interface, dtype, view, mode, b, base, scale, None, settings, 1.0)
    call.upstream = float(pick((1.0, -2.5, 1 / 3, 0.0, 1234.567 if dtype != "float16" else 3.3)))
    if interface in ("value_and_grad", "numpy"):
        call.upstream = 1.0
    call.trains = bool(r.random() < 0.7)
    call.scale_kind = pick(("number", "0-d", "one element", "frozen", "NumPy's"))
    if loss == "sigmoid_loss":
        call.bias = float(pick((0.0, -10.0, 1.7)))
    if loss == "sup_con":
        call.labels = torch.from_numpy(r.integers(-2, max(1, b // 2), b) * int(pick((1, 2**40))))
    if loss in ("clip_loss", "sigmoid_loss") and interface != "module" and r.random() < 0.3:
        call.named["ids"] = torch.from_numpy(r.integers(0, max(1, b // 2), b))
    if loss == "info_nce" and interface not in ("cached_step", "ranks") and view != "every other column":
        for _ in range(int(r.integers(0, 3)) if r.random() < 0.5 else 0):
            more = torch.from_numpy(r.standard_normal((int(r.integers(0, 9)), base.shape[1])))
            call.negatives.append((norm * torch.nn.functional.normalize(more, dim=1)).to(base.dtype))
        n = b + sum(len(x) for x in call.negatives)
        if r.random() < 0.4:
            call.named["positives"] = torch.from_numpy(r.integers(0, n, b))
        if r.random() < 0.3:
            call.named["row_ids"] = torch.from_numpy(r.integers(0, b, b))
            call.named["column_ids"] = torch.from_numpy(r.integers(0, b, n))
    if interface == "ranks":
        cuts = np.sort(r.integers(0, b + 1, int(r.integers(0, 4))))
        call.sizes = tuple(int(x) for x in np.diff([0, *cuts, b]))
        call.settings["exchange"] = pick(("ring", "gather", "replicate", "auto"))
        call.settings["parameter_reduction"] = pick(("mean", "sum"))
    return call


def compare(what: str, got: Any, expected: Any, bound: Any) -> None:
    got, expected, bound = (
        torch.as_tensor(np.asarray(x) if isinstance(x, float) else x) for x in (got, expected, bound)
    )
    got = got.detach().double().reshape(expected.shape)
    excess = (got - expected).abs() - bound
    if not bool((excess <= 0).all()):
        worst = int(torch.nan_to_num(excess, nan=torch.inf).argmax())
        values = [float(x.reshape(-1)[worst]) for x in (got, expected, bound)]
        raise AssertionError("{}: {!r} in place of {!r}, bound {:.3g}".format(what, *values))


@dataclass
class Found:
    """What a call gives: the loss, and gradients of the base, the negatives and the numbers, None where not asked for.

    times: how many backward passes have been added up.
    """

    loss: Any
    base: Any = None
    negatives: Any = None
    numbers: Any = ()
    times: int = 1

    def judge(self, t: Truth) -> None:
        compare("loss", self.loss, t.loss, t.loss_bound)
        negatives = (
            [] if self.negatives is None else [*zip(self.negatives, t.negatives, t.negatives_bound, strict=True)]
        )
        base = [] if self.base is None else [(self.base, t.base, t.base_bound)]
        for i, (got, expected, bound) in enumerate([*base, *negatives]):
            compare(f"gradient of feature {i}", got, self.times * expected, 2 * self.times * bound)
        for i, got in enumerate(self.numbers):
            if got is not None:
                compare(f"gradient of number {i}", got, self.times * t.numbers[i], 2 * self.times * t.numbers_bound[i])


def through_views(call: Call, gradients: Any) -> Tensor:
    """The gradient of the base, from those of its views."""
    leaf = call.base.clone().double().requires_grad_()
    into: Any = 0.0
    for view, g in zip(views(call.view, leaf, call.b), gradients, strict=False):
        into = into + (view * torch.as_tensor(g).double()).sum()
    return torch.autograd.grad(into, leaf)[0]


@contextlib.contextmanager
def mode_of(call: Call) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if call.mode == "dispatch mode":
            stack.enter_context(FlopCounterMode(display=False))
        if call.mode == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        if call.mode == "float64 by default":
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, torch.float32)
        yield


def by_autograd(call: Call) -> Found:
    base, *more = (x.clone().requires_grad_(call.trains) for x in (call.base, *call.negatives))
    numbers = call.numbers()

    def forward() -> Tensor:
        x, y = views(call.view, base, call.b)
        if call.interface == "module":
            made = contrastile.nn.ClipLoss if call.loss == "clip_loss" else contrastile.nn.SigLipLoss
            return made(**call.settings)(x, y, *numbers)
        return call.made(x, y, numbers, call.with_negatives(more), **call.settings)

    with mode_of(call):
        other = forward() if call.mode == "interleaved" else None
        value = forward()
        if not value.requires_grad:
            assert not call.trains
            return Found(value)
        if other is not None:
            (call.upstream * other).backward()
        if call.mode == "retained graph":
            (call.upstream * value).backward(retain_graph=True)
        (call.upstream * value).backward()
    found = Found(value, numbers=[getattr(x, "grad", None) for x in numbers])
    found.times = 1 + (call.mode in ("interleaved", "retained graph"))
    if call.trains:
        found.base, found.negatives = base.grad, [x.grad for x in more]
    return found


def by_value_and_grad(call: Call) -> Found:
    x, y = views(call.view, call.base, call.b)
    numbers = [v.detach() if isinstance(v, Tensor) else v for v in call.numbers()]
    named, settings = call.with_negatives(call.negatives), dict(call.settings)
    if call.interface == "numpy":

        def convert(v: Any) -> Any:
            return [convert(e) for e in v] if isinstance(v, list) else v.numpy() if isinstance(v, Tensor) else v

        call, x, y, numbers = replace(call, labels=convert(call.labels)), x.numpy(), y.numpy(), convert(numbers)
        named = {name: convert(v) for name, v in named.items()}
        if call.seed % 2:
            settings["backend"] = "numpy"
    value, gradients = call.made(x, y, numbers, named, through=partial(contrastile.value_and_grad, **settings))
    plain = call.made(x, y, numbers, named, **settings)
    assert float(plain) == float(value)
    return Found(value, through_views(call, gradients[: call.towers]), None, gradients[call.towers :])


def by_torch_func(call: Call) -> Found:
    dtype = torch.float64 if call.dtype == "float64" else torch.float32
    numbers = [torch.tensor(v, dtype=dtype) for v in (call.scale, call.bias) if v is not None]
    named = call.with_negatives(call.negatives)

    def scaled(x: Tensor, y: Tensor, *numbers: Tensor) -> tuple[Tensor, Tensor]:
        value = call.made(x, y, list(numbers), named, **call.settings)
        return call.upstream * value, value

    which = *range(call.towers), *range(2, 2 + len(numbers))
    gradients, value = torch.func.grad(scaled, which, has_aux=True)(*views(call.view, call.base, call.b), *numbers)
    return Found(value, through_views(call, gradients[: call.towers]), None, gradients[call.towers :])


def by_cached_step(call: Call) -> Found:
    """Tables for encoders: their gradients are the features'."""
    tables = [torch.nn.Parameter(x.clone()) for x in views(call.view, call.base, call.b)[: call.towers]]
    numbers = call.numbers("0-d")

    def loss(*given: Tensor) -> Tensor:
        return call.made(given[0], given[call.towers - 1], list(given[call.towers :]), call.named, **call.settings)

    where = [torch.arange(call.b)] * call.towers
    encode = [lambda i, table=table: table[i] for table in tables]
    value = cached_step(
        encode, where, loss, scale=numbers, chunk=1 + call.seed % 17, backward=lambda x: (call.upstream * x).backward()
    )
    return Found(value, through_views(call, [x.grad for x in tables]), None, [x.grad for x in numbers])


def by_ranks(call: Call) -> Found:
    starts, n = np.cumsum([0, *call.sizes]), len(call.sizes)

    def program(communicator: InProcess) -> tuple[Any, ...]:
        part = slice(int(starts[communicator.rank]), int(starts[communicator.rank + 1]))
        x, y = (v[part].clone().requires_grad_() for v in views(call.view, call.base, call.b))
        numbers, named = call.numbers("0-d"), {name: v[part] for name, v in call.named.items()}
        here = replace(call, labels=None if call.labels is None else call.labels[part])
        value = here.made(x, y, numbers, named, **call.settings, group=communicator)
        (call.upstream * value).backward()
        return value, [x.grad, y.grad][: call.towers], [v.grad for v in numbers]

    group: InProcessGroup[Any] = InProcessGroup(n, late=bool(call.seed % 2))
    values, features, numbers = zip(*group.run(program), strict=True)
    assert len({float(value.detach()) for value in values}) == 1
    reduced = n if call.settings["parameter_reduction"] == "mean" else 1
    base = through_views(call, [torch.cat(parts).double() / reduced for parts in zip(*features, strict=True)])
    return Found(
        values[0], base, None, [sum(x.double() for x in each) / reduced for each in zip(*numbers, strict=True)]
    )


WAYS: dict[str, Callable[[Call], Found]] = {
    "autograd": by_autograd,
    "module": by_autograd,
    "value_and_grad": by_value_and_grad,
    "numpy": by_value_and_grad,
    "torch.func": by_torch_func,
    "cached_step": by_cached_step,
    "ranks": by_ranks,
}


def check(seed: int) -> None:
    """Raise AssertionError, or whatever the call raises, unless the call of a seed is right."""
    call = drawn(seed)

    def judged() -> None:
        WAYS[call.interface](call).judge(truth(call, views))

    if call.mode != "thread":
        judged()
        return
    failed: list[BaseException] = []

    def run() -> None:
        try:
            judged()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def bits(seed: int, backend: str, device: str) -> str | None:
    """A hash of all that a call gives, through this backend and there; None where they cannot make the call."""
    call = drawn(seed)
    # the ranks of one process would share the one thread of autograd that a GPU has
    elsewhere = ("numpy", "cached_step", "ranks") if device != "cpu" else ("numpy",) if backend != "numpy" else ()
    refused = {"triton": ("float64",), "cupy": ("float64",), "numpy": ("bfloat16", "float16")}.get(backend, ())
    if call.interface in elsewhere or call.dtype in refused or call.mode in ("autocast", "dispatch mode"):
        return None
    call = replace(call, settings=call.settings | {"backend": backend}, base=call.base.to(device))
    call.negatives = [x.to(device) for x in call.negatives]
    call.named = {name: x.to(device) for name, x in call.named.items()}
    call.labels = None if call.labels is None else call.labels.to(device)
    found = WAYS[call.interface](call)
    arrays = [found.loss, found.base, *(found.negatives or ()), *found.numbers]
    told = [torch.as_tensor(x).detach().cpu() for x in arrays if x is not None]
    return hashlib.sha256(b"".join(str(x.dtype).encode() + x.double().numpy().tobytes() for x in told)).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    add = parser.add_argument
    add("--count", type=int, default=20000)
    add("--first", type=int, default=0)
    add("--bits", type=Path, metavar="FILE", help="judge nothing: write a hash of every call's results")
    add("--against", type=Path, metavar="FILE", help="an earlier such file")
    add("--backend", nargs="+", default=["numpy", "torch"], help="of --bits (%(default)s)")
    add("--device", default="cpu", help="of --bits (%(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(asked.first, asked.first + asked.count)
    if asked.bits:
        hashes = {f"{x} seed {seed}": bits(seed, x, asked.device) for x in asked.backend for seed in seeds}
        asked.bits.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
        before = json.loads(asked.against.read_text(encoding="utf-8")) if asked.against else hashes
        differing = [name for name in hashes.keys() | before.keys() if hashes.get(name) != before.get(name)]
        print(*sorted(differing), f"{len(differing)} of {sum(map(bool, hashes.values()))} differ", sep="\n")
        return bool(differing)
    wrong = 0
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            wrong += 1
            print(f"{drawn(seed)}\n    {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{asked.count} calls, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
