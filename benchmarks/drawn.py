"""How exact losses and gradients are on problems at random, beside plain PyTorch: what is noisier, and by how much.

``python benchmarks/drawn.py --backend torch --count 500`` draws problems of every loss and prints, for each backend,
dtype and precision, how many results have more than ``MORE`` times the error of a plain computation, and the worst; and
in how many the plain computation has more than ``MORE`` times theirs: single numbers can be exact by luck, either way.
``--json`` writes these counts and all such results.

Errors are those of ``certain_pairs.py``. A plain computation can be exact by luck: its error counts as one rounding of
the result at least. Where it is itself a tenth off or more, nothing is compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from certain_pairs import DTYPES, PARTS, Problem, as_given, measure, of_labels  # noqa: E402
from harness.record import compact, rounded  # noqa: E402
from torch.nn.functional import normalize  # noqa: E402

import contrastile  # noqa: E402
from contrastile.backends.contract import PRECISIONS  # noqa: E402
from contrastile.environment import measurement_environment  # noqa: E402
from contrastile.verify.rounding import UNIT  # noqa: E402

MORE = 3.0
KINDS = (
    "independent",
    "certain",
    "certain of others",
    "half certain",
    "half certain of others",
    "one direction",
    "copies",
    "few",
    "norms",
    "large",
)
LOSSES = ("clip_loss", "info_nce", "nt_xent", "sup_con", "sigmoid_loss")
BATCHES, WIDTHS = (17, 40, 64, 129, 256, 300, 500), (3, 8, 33, 64, 128, 200)
MOST = 1e7
"""The largest logit."""

Generator = torch.Generator


def features(kind: str, b: int, width: int, random: Generator) -> tuple[Any, Any]:
    """Two matrices (b, width), float32."""
    one, two, noise = (torch.randn(b, width, generator=random) for _ in range(3))
    if kind == "one direction":
        return normalize(1 + one / 16, dim=1), normalize(1 + two / 16, dim=1)
    if kind == "few":
        basis = torch.randn(2, width, generator=random)
        return normalize(one[:, :2] @ basis, dim=1), normalize(two[:, :2] @ basis, dim=1)
    one, two = normalize(one, dim=1), normalize(two, dim=1)
    if kind == "copies":
        one = one[torch.randint(0, max(2, b // 5), (b,), generator=random)]
        return one, normalize(one + noise / 100, dim=1)
    if kind in ("norms", "large"):
        spread = [10 ** (4 * torch.rand(b if kind == "norms" else 1, 1, generator=random) - 2) for _ in range(2)]
        return one * spread[0], two * spread[1]
    if kind == "independent":
        return one, two
    near = normalize(one + noise / math.sqrt(width), dim=1)
    if kind.endswith("of others"):
        near = near.roll(1, 0)
    return one, torch.cat([near[: b // 2], two[b // 2 :]]) if kind.startswith("half") else near


def problem(number: int, random: Generator) -> Problem:
    """One at random, of the loss that this number has."""

    def one_of(values: tuple[Any, ...]) -> Any:
        return values[int(torch.randint(0, len(values), (), generator=random))]

    loss, kind, b, width = LOSSES[number % len(LOSSES)], one_of(KINDS), one_of(BATCHES), one_of(WIDTHS)
    one, two = features(kind, b, width, random)
    scale = float(10 ** (3.6 * torch.rand((), generator=random) - 1))
    largest = max(float(x.norm(dim=1).max()) for x in (one, two)) ** 2
    scale = min(scale, MOST / largest)
    name = f"{number}: {loss}, {kind}, {b} x {width}, scale {scale:.3g}"
    if loss in ("clip_loss", "info_nce", "sigmoid_loss"):
        own, ours = torch.eye(b, dtype=torch.bool), getattr(contrastile, loss)
        if loss != "sigmoid_loss":
            return Problem(name, one, two, scale, ours, as_given, own, own | True, both=loss == "clip_loss")
        bias = one_of((-10.0, -scale / 2, 0.0))

        def with_bias(*given: Any, **how: Any) -> Any:
            return ours(*given, bias, **how)

        return Problem(name, one, two, scale, with_bias, as_given, own, own | True, bias=bias)
    labels = torch.randint(0, max(2, b // 4), (b,), generator=random) if loss == "sup_con" else None
    return of_labels(name, one, two, scale, labels)


def compared(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each result of a problem beside the plain computation's, which is the first of its rows."""
    plain, *others = rows
    for row in (row for row in others if "refused" not in row):
        for part in PARTS:
            unit = UNIT[row["dtype"] if part in ("first", "second") else "float32"]
            if math.isfinite(plain[part]) and plain[part] < 0.1:
                keys = {key: row[key] for key in ("backend", "dtype", "precision", "problem")}
                facts = {"of": part, "plain": plain[part], "error": row[part]}
                times, inverse = row[part] / max(plain[part], unit), plain[part] / max(row[part], unit)
                yield keys | facts | {"times": times, "inverse": inverse}


def is_beyond(result: dict[str, Any]) -> bool:
    """Whether it is noisier than ``MORE`` times; NaN is."""
    return not result["times"] <= MORE


def counts(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many are beyond ``MORE`` times, by backend, dtype, precision and result."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in results:
        of = "features" if each["of"] in ("first", "second") else each["of"]
        groups.setdefault((each["backend"], each["dtype"], each["precision"], of), []).append(each)
    found = []
    for (backend, dtype, precision, of), mine in groups.items():
        worst = max(mine, key=lambda each: math.inf if math.isnan(each["times"]) else each["times"])
        told = {
            "results": len(mine),
            "beyond": sum(map(is_beyond, mine)),
            "plain_beyond": sum(each["inverse"] > MORE for each in mine),
            "worst": worst["times"],
            "problem": worst["problem"],
        }
        found.append({"backend": backend, "dtype": dtype, "precision": precision, "of": of} | told)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Draw, compute, count."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--backend", nargs="+", default=["torch"], metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--precision", nargs="+", choices=("auto", *PRECISIONS), default=("auto",))
    parser.add_argument("--count", type=int, default=500, help="problems (500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    # the plain computation's products are those of float32
    torch.backends.cuda.matmul.allow_tf32 = False
    random, results = Generator().manual_seed(given.seed), list[dict[str, Any]]()
    asked = given.backend, given.precision, given.device
    for drawn in map(partial(problem, random=random), range(given.count)):
        for dtype in given.dtype:
            results += compared(list(measure(drawn, dtype, *asked)))
    found = counts(results)
    for each in found:
        what = f"{each['backend']:8} {each['dtype']:8} {each['precision']:5} {each['of']:8}"
        told = f"{each['beyond']:4} of {each['results']:5} beyond, plain {each['plain_beyond']:4},"
        print(f"{what} {told} worst {each['worst']:8.1f} x  {each['problem']}")
    if given.json is not None:
        beyond = list(filter(is_beyond, results))
        facts = measurement_environment(given.device) | {"count": given.count, "seed": given.seed}
        record = {"environment": facts, "counts": rounded(found), "beyond": rounded(beyond)}
        given.json.write_text(compact(record), encoding="utf-8")


if __name__ == "__main__":
    main()
