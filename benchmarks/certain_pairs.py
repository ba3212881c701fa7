"""How exact losses and gradients are where a model is certain of its pairs, beside plain PyTorch.

``python benchmarks/certain_pairs.py --backend torch --device cpu`` prints one line a problem: relative errors, as
norms, of the loss and of its gradients for both sides and the scale, against float64 on the same rounded features; and
the same of a plain computation: full logits in float32 and autograd. With ``--json`` the rows go to a file, from which
``scripts/make_exact_page.py`` makes a page.

Saturated features are ``i`` and ``i + noise / 8``, normalised; large ones are independent, of the norm they are named
after. Nothing but the package's front door is called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from harness.record import compact, rounded  # noqa: E402
from torch.nn.functional import normalize, softplus  # noqa: E402

import contrastile  # noqa: E402
from contrastile.backends.contract import PRECISIONS, UnsupportedProblemError  # noqa: E402
from contrastile.environment import measurement_environment  # noqa: E402

PARTS = ("loss", "first", "second", "scale")
COLUMNS = ("problem", "b", "dtype", "backend", "precision", *PARTS)
DTYPES = ("float32", "bfloat16", "float16")
WIDTH = 64
Ours = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """One loss on one pair of matrices.

    Attributes:
        name: of the row.
        one: (b, d) float32.
        two: (b, d) float32.
        scale: a number.
        ours: the loss, from (one, two, scale) and the settings of the front door.
        sides: the matrices X = scale a b^T is made of, from (one, two).
        positive: (m, n) bool.
        admitted: (m, n) bool.
        both: whether columns have a loss too.
        bias: of the sigmoid loss; None for the others.
    """

    name: str
    one: Any
    two: Any
    scale: float
    ours: Ours
    sides: Callable[[Any, Any], tuple[Any, Any]]
    positive: Any
    admitted: Any
    both: bool = False
    bias: float | None = None


def features(b: int, seed: int, kind: str) -> tuple[Any, Any]:
    """Two matrices (b, WIDTH) of "saturated", or of independent features of a norm."""
    random = torch.Generator().manual_seed(seed)
    i, noise, other = (torch.randn(b, WIDTH, generator=random) for _ in range(3))
    i = normalize(i, dim=1)
    if kind == "saturated":
        return i, normalize(i + noise / 8, dim=1)
    norm = float(kind.removeprefix("norm "))
    return norm * i, norm * normalize(other, dim=1)


def clip(name: str, b: int, seed: int, kind: str, scale: float) -> Problem:
    """The symmetric loss."""
    one, two = features(b, seed, kind)
    two = two if scale >= 0 else -two
    own = torch.eye(b, dtype=torch.bool)
    return Problem(name, one, two, scale, contrastile.clip_loss, as_given, own, own | True, both=True)


def as_given(one: Any, two: Any) -> tuple[Any, Any]:
    """Rows and columns of a loss of pairs."""
    return one, two


def _joined(one: Any, two: Any) -> tuple[Any, Any]:
    both = torch.cat([one, two])
    return both, both


def info_nce(b: int, scale: float, *, dropped: bool) -> Problem:
    """Positives in any order, two of them the same; with ``dropped``, every eighth column shares a row's id."""
    one, two = features(b, 0, "saturated")
    where = torch.randperm(b, generator=torch.Generator().manual_seed(1))
    one = one[where]
    where[1], one[1] = where[0], normalize(one[0] + one[1] / 100, dim=0)
    positive = where[:, None] == torch.arange(b)
    ids = torch.arange(b) % 8
    equal = ids[where][:, None] == ids

    def ours(one: Any, two: Any, scale: Any, **how: Any) -> Any:
        device = one.device
        if dropped:
            how |= {"row_ids": ids[where].to(device), "column_ids": ids.to(device)}
        return contrastile.info_nce(one, two, scale, positives=where.to(device), **how)

    name = f"info_nce, {'ids dropped' if dropped else 'positives anywhere'}, scale {scale:g}"
    return Problem(name, one, two, scale, ours, as_given, positive, positive | ~equal if dropped else positive | True)


def among_themselves(b: int, scale: float, samples: int) -> Problem:
    """NT-Xent for 0 samples of a class, else SupCon of classes of so many."""
    count = max(samples, 2)
    one, two = features(b, 0, "saturated")
    if count > 2:
        # classes that lie together
        one = normalize(one[torch.arange(b) * 2 // count] + (one + two) / 16, dim=1)
        two = normalize(one + two / 16, dim=1)
    name = f"sup_con, classes of {samples}" if samples else "nt_xent"
    labels = torch.arange(b) * 2 // count if samples else None
    return of_labels(f"{name}, scale {scale:g}", one, two, scale, labels)


def of_labels(name: str, one: Any, two: Any, scale: float, labels: Any) -> Problem:
    """SupCon of these labels, one for both of a pair; NT-Xent for None."""
    each = torch.cat([torch.arange(len(one)) if labels is None else labels] * 2)
    itself = torch.eye(len(each), dtype=torch.bool)

    def ours(one: Any, two: Any, scale: Any, **how: Any) -> Any:
        if labels is None:
            return contrastile.nt_xent(one, two, scale, **how)
        return contrastile.sup_con(torch.cat([one, two]), each.to(one.device), scale, **how)

    return Problem(name, one, two, scale, ours, _joined, (each[:, None] == each) & ~itself, ~itself)


def problems(b: int) -> Iterator[Problem]:
    """All of a size."""
    for seed in range(3):
        yield clip(f"clip, saturated, seed {seed}, scale 100", b, seed, "saturated", 100.0)
    for scale in (30.0, 300.0, -100.0, 0.0):
        yield clip(f"clip, saturated, scale {scale:g}", b, 0, "saturated", scale)
    for norm in (30, 300, 3000):
        yield clip(f"clip, norm {norm}, scale 100", b, 0, f"norm {norm}", 100.0)
    for scale in (30.0, 100.0, 300.0):
        yield info_nce(b, scale, dropped=False)
        yield info_nce(b, scale, dropped=True)
        for samples in (0, 2, 8):
            yield among_themselves(b, scale, samples)


def full_logits(problem: Problem, terms: Callable[..., Any], one: Any, two: Any, scale: Any) -> Any:
    """The mean of the terms of each direction, ``terms(logits, positive, admitted, axis)``, or the sigmoid loss."""
    left, right = problem.sides(one, two)
    x = scale * (left @ right.T)
    masks = problem.positive.to(x.device), problem.admitted.to(x.device)
    if problem.bias is not None:
        return softplus(torch.where(masks[0], -1, 1) * (x + problem.bias), threshold=1000).sum() / len(x)
    found = [terms(x, *masks, axis).mean() for axis in ((1, 0) if problem.both else (1,))]
    return sum(found) / len(found)


def plain_terms(x: Any, positive: Any, admitted: Any, axis: int) -> Any:
    """The log-sum-exp less the mean of the positives' logits, as it is written in papers."""
    return torch.where(admitted, x, -torch.inf).logsumexp(axis) - _mean(x, positive, axis)


def exact_terms(x: Any, positive: Any, admitted: Any, axis: int) -> Any:
    """The same with the positives out of the sum: neither the loss nor, of a lone positive, its derivative cancels."""
    negative = torch.where(admitted & ~positive, x, -torch.inf).logsumexp(axis)
    own = torch.where(positive, x, -torch.inf).logsumexp(axis)
    spread = torch.where(positive.sum(axis) == 1, 0.0, own - _mean(x, positive, axis))
    return softplus(negative - own) + spread


def _mean(x: Any, positive: Any, axis: int) -> Any:
    return torch.where(positive, x, 0.0).sum(axis) / positive.sum(axis)


def outcome(loss: Callable[..., Any], problem: Problem, dtype: Any, state: Any, device: str) -> list[Any]:
    """The loss and its gradients, float64 on the host."""
    leaves = [x.to(device, dtype).requires_grad_() for x in (problem.one, problem.two)]
    scale = torch.tensor(problem.scale, dtype=state, device=device, requires_grad=True)
    value = loss(*leaves, scale)
    found = torch.autograd.grad(value, [*leaves, scale])
    return [x.detach().double().cpu() for x in (value, *found)]


def errors(found: list[Any], exact: list[Any]) -> dict[str, float]:
    """Relative to the norm of what is exact; absolute where that is 0."""
    return {
        name: float((a - b).norm() / (b.norm() if b.norm() > 0 else 1.0))
        for name, a, b in zip(PARTS, found, exact, strict=True)
    }


def measure(
    problem: Problem, dtype: str, backends: list[str], precisions: list[str], device: str
) -> Iterator[dict[str, Any]]:
    """A row for the plain computation, and one for each backend and precision that takes the problem."""
    kind = getattr(torch, dtype)
    rounded = [x.to(kind).float() for x in (problem.one, problem.two)]
    given = Problem(**(vars(problem) | {"one": rounded[0], "two": rounded[1]}))
    exact = outcome(partial(full_logits, problem, exact_terms), given, torch.float64, torch.float64, device)
    row = {"problem": problem.name, "b": len(problem.one), "dtype": dtype}

    def plain(one: Any, two: Any, scale: Any) -> Any:
        return full_logits(problem, plain_terms, one.float(), two.float(), scale)

    yield (
        row
        | {"backend": "plain", "precision": "ieee"}
        | errors(outcome(plain, given, kind, torch.float32, device), exact)
    )
    for name in backends:
        for precision in precisions if dtype == "float32" else ("ieee",):

            def ours(*x: Any, name: str = name, precision: str = precision) -> Any:
                return problem.ours(*x, backend=name, precision=precision)

            try:
                found = outcome(ours, given, kind, torch.float32, device)
            except UnsupportedProblemError as error:
                yield row | {"backend": name, "precision": precision, "refused": str(error)}
                continue
            yield row | {"backend": name, "precision": precision} | errors(found, exact)


def main(arguments: list[str] | None = None) -> None:
    """The table of all problems."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--backend", nargs="+", default=["torch"], metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--batch", nargs="+", type=int, default=[256, 4096])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    # the plain computation's products are those of float32
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    print(f"{'problem':42} {'b':>5} {'dtype':8} {'backend':8} {'by':5}", *(f"{part:>8}" for part in PARTS))
    for b in options.batch:
        for problem in problems(b):
            for dtype in options.dtype:
                for row in measure(problem, dtype, options.backend, options.precision, options.device):
                    rows.append(row)
                    if "refused" not in row:
                        what = f"{row['dtype']:8} {row['backend']:8} {row['precision']:5}"
                        print(f"{row['problem']:42} {b:5} {what}", *(f"{row[part]:8.1e}" for part in PARTS), flush=True)
    if options.json is not None:
        told = [[row[name] for name in COLUMNS] for row in rows if "refused" not in row]
        found = {"environment": measurement_environment(options.device), "columns": COLUMNS, "rows": rounded(told)}
        options.json.write_text(compact(found), encoding="utf-8")


if __name__ == "__main__":
    main()
