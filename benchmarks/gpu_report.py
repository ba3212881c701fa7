"""Writes the measured part of docs/performance.md, and its figures, from the records in docs/results.

python benchmarks/gpu_report.py            writes page and figures
python benchmarks/gpu_report.py --check    exits 1 if the page is not what the records say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_run import figures, tables  # noqa: E402

ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- measured: written by benchmarks/gpu_report.py from docs/results -->"
END = "<!-- end of measured -->"
NOTHING = "Nothing has been measured on a GPU yet: `docs/results` holds no record. `benchmarks/gpu.py` writes one."


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Every ``gpu_*.json`` of a folder by its stem, in the order of names."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gpu_*.json"))}


def section(stem: str, data: dict[str, Any]) -> str:
    """Everything that one record shows."""
    e = data["environment"]
    sizes = (
        f"{tables.number(data['settings']['slot'], 1)} s samples"
        if data["settings"]["smoke"] is False
        else "tiny sizes"
    )
    names = ("torch", "triton", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels")
    versions = ", ".join(f"{name} {e[name]}" for name in names if e.get(name))
    card = ", ".join(
        f"{what} {e[name]}"
        for what, name in (("driver", "driver_version"), ("power limit", "power.limit"))
        if e.get(name)
    )
    when = f"{e['date'][:10]}, commit `{(e['commit'] or 'unknown')[:12]}`"
    about = ", ".join(filter(None, (when, versions, card))) + f"; {sizes}."
    parts = [
        ("Verified first", tables.verified(data)),
        ("What was aimed at", tables.aims(data)),
        (
            "Beside every alternative",
            "\n\n".join(filter(None, (tables.comparison(data), tables.peers(data), _figure(stem, data)))),
        ),
        ("Memory, itemised", tables.memory(data)),
        ("Errors, relative to float64 on the same rounded features", tables.errors(data)),
        ("Checks", tables.checks(data)),
        ("Big batches, one call on one GPU", tables.big(data)),
        ("Other widths, scales and directions", tables.further(data)),
        ("Not measured, and why", tables.skipped(data)),
    ]
    return "\n\n".join([f"### {e['device']}", about, *(f"#### {title}\n\n{text}" for title, text in parts if text)])


def _figure(stem: str, data: dict[str, Any]) -> str:
    if not tables.measured(data, group="peers"):
        return ""
    return f"![Time and memory against the batch](results/{stem}.svg)"


def generated(folder: Path) -> str:
    """The measured part of the page."""
    found = records(folder)
    return "\n\n".join(section(stem, data) for stem, data in found.items()) if found else NOTHING


def spliced(page: str, text: str) -> str:
    """The page with the part between its markers replaced.

    Raises:
        ValueError: the page lacks a marker.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r}")
    return f"{page.partition(BEGIN)[0]}{BEGIN}\n\n{text}\n\n{END}{page.partition(END)[2]}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; with --check 1 when the page is not what the records say.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    old = given.page.read_text(encoding="utf-8")
    new = spliced(old, generated(given.results))
    if given.check:
        if new != old:
            print(
                f"{given.page} is not what {given.results} says; run: python benchmarks/gpu_report.py", file=sys.stderr
            )
        return int(new != old)
    for stem, data in records(given.results).items():
        if tables.measured(data, group="peers"):
            figures.draw(data, given.results / f"{stem}.svg")
    given.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
