"""Writes the measured parts of the pages, and their figures, from the records in docs/results.

python benchmarks/pages.py            writes the pages of PAGES, README.md and the figures
python benchmarks/pages.py --check    exits 1 if a page is not what the records say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from harness import figures, tables  # noqa: E402

ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results"
BEGIN = "<!-- measured: written by benchmarks/pages.py from docs/results -->"
END = "<!-- end of measured -->"
PACKAGES = ("torch", "triton", "cupy-cuda13x", "nccl", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels")
OURS = ("contrastile triton", "contrastile cupy")
KEPT = ("contrastile cupy", "contrastile cupy, keeping 2 GiB", "contrastile cupy, keeping 8 GiB")
Data = dict[str, Any]


def section(stem: str, data: Data) -> str:
    """What one record shows: the machine, what was verified, one table of ours, one of all, the largest batches."""
    e = data["environment"]
    several = e.get("ranks", 1) > 1
    title = f"### {e['ranks']} x {e['device']}" if several else f"### {e['device']}"
    commit = (e["commit"] or "unknown")[:12]
    links = [f"links {e['links']}"] if e.get("links") else []
    versions = [f"{name} {e[name]}" for name in PACKAGES if e.get(name)]
    power = [f"power limit {e['power.limit']}"] if e.get("power.limit") else []
    about = ", ".join([e["date"][:10], f"commit `{commit}`", *versions, *links, *power])
    about += f". [The record](../results/{stem}.json) has every sample."
    told = [about, e.get("note", ""), tables.verified(data)]
    figure = f"![Measured on {e['device']}](../results/{stem}.svg)" if figures.drawn(data) else ""
    keeping = any(row["name"] == KEPT[1] for row in tables.measured(data, "steps"))
    alone = tables.steps(data, KEPT, least=2) if keeping else tables.steps(data, OURS)
    ours = tables.scaling(data) if several else alone
    parts = [f"{title}, {commit}", " ".join(filter(None, told)), ours, tables.peers(data), tables.big(data), figure]
    return "\n\n".join(filter(None, parts))


def performance(records: dict[str, Data]) -> str:
    """The records of one GPU."""
    return "\n\n".join(section(stem, x) for stem, x in records.items() if x["environment"].get("ranks", 1) == 1)


def scaling(records: dict[str, Data]) -> str:
    """The records of several GPUs."""
    return "\n\n".join(section(stem, x) for stem, x in records.items() if x["environment"].get("ranks", 1) > 1)


def readme(records: dict[str, Data]) -> str:
    """The comparison with the alternatives on one GPU, and what memory to spare buys."""
    parts = []
    for data in records.values():
        e = data["environment"]
        if e.get("ranks", 1) == 1 and tables.measured(data, "peers"):
            parts += [f"One {e['device']}, bfloat16, d = 512, the loss with all its gradients, medians of one run:"]
            parts += [tables.peers(data, shares=False)]
        kept = tables.steps(data, KEPT, least=2)
        if any(row["name"] == KEPT[1] for row in tables.measured(data, "steps")):
            parts += [
                f"One {e['device']} with memory to spare, in a run of its own: exponentials kept from forward "
                "spare the backward pass a product. Time, share of cuBLAS' rate for four products, peak extra memory:",
                kept,
            ]
    return "\n\n".join(parts)


PAGES: dict[Path, Callable[[dict[str, Data]], str]] = {
    Path("docs/benchmarks/gpu.md"): performance,
    Path("docs/benchmarks/many-gpus.md"): scaling,
    Path("README.md"): readme,
}


def spliced(page: str, text: str) -> str:
    """The page with the part between its markers replaced.

    Raises:
        ValueError: the page lacks a marker.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r}")
    text = text or "Nothing has been measured yet: `benchmarks/run.py` writes the record."
    return f"{page.partition(BEGIN)[0]}{BEGIN}\n\n{text}\n\n{END}{page.partition(END)[2]}"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages and the figures; with --check, compare.

    Returns:
        0; with --check 1 when a page is not what the records say.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="where the pages are")
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is not what the records say")
    given = parser.parse_args(arguments)
    paths = sorted(given.results.glob("gpu_*.json"))
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    wrong = 0
    for name, made in PAGES.items():
        path = given.root / name
        old = path.read_text(encoding="utf-8")
        new = spliced(old, made(records))
        if new != old and given.check:
            print(f"{name} is not what the records say; run: python benchmarks/pages.py", file=sys.stderr)
            wrong = 1
        if not given.check:
            path.write_text(new, encoding="utf-8")
    latest, assets = figures.newest(records), given.root / "docs" / "assets"
    if latest and not given.check:
        figures.home(latest, assets)
    elif latest and not figures.is_home(latest, assets):
        print("the home page's chart is not of the newest record; run: python benchmarks/pages.py", file=sys.stderr)
        wrong = 1
    for stem, data in records.items():
        if not given.check and figures.drawn(data):
            figures.draw(data, given.results / f"{stem}.svg")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
