"""Holds two backends to each other: on drawn problems they differ by at most the sum of their derived bounds.

``python benchmarks/agreement.py [cupy triton] [--examples 1000] [--device cuda] [--out FILE]`` draws problems from
around the named cases (``contrastile.verify.strategies``), as many for each dtype that both backends take, and writes
the largest difference in bounds. A problem on which they disagree is shrunk and printed as ``contrastile verify
--case`` takes it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from contrastile.backends import registry  # noqa: E402
from contrastile.backends.contract import Backend  # noqa: E402
from contrastile.environment import measurement_environment  # noqa: E402
from contrastile.verify import strategies  # noqa: E402
from contrastile.verify.bounds import bounds  # noqa: E402
from contrastile.verify.comparison import Worst, compare  # noqa: E402
from contrastile.verify.rearrange import combined  # noqa: E402
from contrastile.verify.selection import DTYPES  # noqa: E402
from contrastile.verify.trial import Subject  # noqa: E402
from contrastile.verify.truth import truth  # noqa: E402

AGREE, DISAGREE, CANNOT = 0, 1, 2


def difference(recipe: strategies.Recipe, subjects: tuple[Subject, Subject]) -> Worst:
    """The element in which two backends differ most, as a share of the sum of their bounds."""
    problem = strategies.problem(recipe, subjects[0].dtype)
    oracle = truth(problem)
    found = [subject.run(problem, options=recipe.options) for subject in subjects]
    allowed = [bounds(problem, oracle, each.accuracy, each.dtype, options=recipe.options) for each in subjects]
    return compare(found[0], found[1], combined(lambda a, b: a + b, *allowed))


def agreement(backends: dict[str, Backend], dtype: str, device: str, examples: int, seed: int) -> dict[str, Any]:
    """One row: the worst of ``examples`` problems in one dtype."""
    first, second = (Subject(name, each, dtype, device, seed, examples) for name, each in backends.items())
    drawn = 0

    def hold(recipe: strategies.Recipe) -> Worst:
        nonlocal drawn
        drawn += 1
        return difference(recipe, (first, second))

    started = time.monotonic()
    case, worst = strategies.search(strategies.recipes(), hold, first)
    return {
        "dtype": dtype,
        "problems": drawn,
        "ratio": worst.ratio if math.isfinite(worst.ratio) else None,
        "agree": worst.ratio <= 1,
        "worst": str(worst),
        "case": case,
        "seconds": round(time.monotonic() - started, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 when the backends disagree somewhere; 2 where one of them cannot be loaded.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("backends", nargs="*", default=["cupy", "triton"], metavar="NAME", help="two backends (cupy triton)")
    add("--examples", type=int, default=1000, help="problems in all (%(default)s)")
    add("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="those of them that both take (all)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where (%(default)s)")
    add("--seed", type=int, default=0, help="of the drawing (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="where the rows go, as JSON")
    given = parser.parse_args(arguments)
    if len(set(given.backends)) != 2:
        parser.error(f"two backends are held to each other, got {' and '.join(given.backends)}")
    try:
        backends = {name: registry.load(name) for name in given.backends}
    except ImportError as error:
        print(f"benchmarks/agreement.py: {error}", file=sys.stderr)
        return CANNOT
    dtypes = [dtype for dtype in given.dtype if all(dtype in each.dtypes for each in backends.values())]
    each = -(-given.examples // max(1, len(dtypes)))
    rows = []
    for dtype in dtypes:
        rows.append(agreement(backends, dtype, given.device, each, given.seed))
        print(rows[-1], flush=True)
    if given.out is not None:
        report = {"environment": measurement_environment(given.device), "backends": list(backends), "rows": rows}
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return AGREE if rows and all(row["agree"] for row in rows) else DISAGREE


if __name__ == "__main__":
    sys.exit(main())
