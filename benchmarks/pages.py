"""Writes the measured parts of the pages, and their figures, from the records in docs/results.

python benchmarks/pages.py            writes the measured parts of PAGES, and the figures
python benchmarks/pages.py --check    exits 1 if a page is not what the records say
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "scripts")]

import page_writing  # noqa: E402
from harness import figures, tables  # noqa: E402

ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results"
BEGIN = "<!-- measured: written by benchmarks/pages.py from docs/results -->"
PACKAGES = ("torch", "triton", "cupy-cuda13x", "nccl", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels")
TRAINERS = ("transformers", "sentence-transformers", "gradcache")
KERNELS = {"cpu": ("torch",), "cuda": ("triton", "cupy")}
"""The backends that the times of ``everyday.py`` depend on."""
CHANGED = "The kernels have changed since."
KEPT = ("contrastile cupy", "contrastile cupy, keeping 2 GiB", "contrastile cupy, keeping 8 GiB")
Data = dict[str, Any]
Records = dict[str, dict[str, Data]]
"""By the script that wrote them, and by the stems of their names."""
SCRIPTS = {"run": "gpu_*.json", "everyday": "everyday_*.json", "training": "training_*.json"}


def section(stem: str, data: Data) -> str:
    """What one record shows: the machine, what was verified, one table of ours, one of all, the largest batches."""
    e = data["environment"]
    several = e.get("ranks", 1) > 1
    commit = (e["commit"] or "unknown")[:12]
    links = [f"links {e['links']}"] if e.get("links") else []
    power = [f"power limit {e['power.limit'].replace('.00', '')}"] if e.get("power.limit") else []
    about = ", ".join([e["date"][:10], f"commit `{commit}`", *versions(e), *links, *power])
    about += f". [The record](../results/{stem}.json) has every sample."
    told = [about, e.get("note", ""), tables.verified(data)]
    keeping = any(row["name"] == KEPT[1] for row in tables.measured(data, "steps"))
    alone = tables.steps(data, KEPT, least=2) if keeping else tables.steps(data, figures.OURS)
    ours = tables.scaling(data) if several else alone
    parts = [
        f"### {tables.machine(e)}, {commit}",
        " ".join(filter(None, told)),
        ours,
        tables.peers(data),
        tables.big(data),
    ]
    return "\n\n".join(filter(None, parts))


def everyday_section(stem: str, data: Data, root: Path) -> str:
    """All calls of a record of ``everyday.py``."""
    e = data["environment"]
    found = [f"torch {e['torch']}"] if on_cpu(e) else versions(e)
    about = f"{', '.join([*found, measured_at(e, root)])} [The record](../results/{stem}.json) has every sample."
    return "\n\n".join([f"### {tables.machine(e)}", about, tables.everyday(data)])


def versions(environment: Data, more: tuple[str, ...] = ()) -> list[str]:
    """The packages that a record was measured with."""
    return [f"{name} {environment[name]}" for name in (*PACKAGES, *more) if environment.get(name)]


def training_section(stem: str, data: Data, root: Path) -> str:
    """A record of ``training.py``: the optimizer step of each, the loss alone, and memory over the batch."""
    e, settings = data["environment"], data["settings"]
    facts = ", ".join([*versions(e, TRAINERS), measured_at(e, root)])
    about = f"{tables.machine(e)}: {facts} [The record](../results/{stem}.json) has more."
    what = (
        f"One optimizer step of MiniLM (random weights, no dropout) on {settings['batch']:,} "
        f"pairs of {settings['tokens']} random tokens, encoded under {settings['autocast']} autocast. Each takes the "
        "chunk with which it is fastest. *Autocast around the call*: the encoder brings none; the call of the loss is "
        "under it and the backward pass is not, as a trainer has it."
    )
    return "\n\n".join(filter(None, [about, what, tables.training(data), tables.training_memory(data)]))


def measured_at(environment: Data, root: Path) -> str:
    """The commit and the date of a record, and whether the kernels have changed since."""
    commit = environment["commit"] or "unknown"
    said = f"commit `{commit[:12]}`, {environment['date'][:10]}."
    kernels = KERNELS["cpu" if on_cpu(environment) else "cuda"]
    return f"{said} {CHANGED}" if changed_since(commit, root, kernels) else said


def changed_since(commit: str, root: Path, kernels: Sequence[str]) -> bool:
    """Whether these backends, or what calls them, differ from a commit's; False where nobody can tell."""
    rooms = "autograd", "schedules", *(f"backends/{name}" for name in kernels)
    command = ["git", "-C", str(root), "diff", "--quiet", commit, "--", *(f"contrastile/{room}" for room in rooms)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 1
    except OSError:
        return False


def on_cpu(environment: Data) -> bool:
    """Whether a record is a host's."""
    return bool(environment["device"] == "cpu")


def of_ranks(records: dict[str, Data], several: bool) -> dict[str, Data]:
    """The records of several GPUs, or of one."""
    return {stem: x for stem, x in records.items() if (x["environment"].get("ranks", 1) > 1) == several}


def performance(records: Records, root: Path) -> str:
    """The records of one GPU."""
    return "\n\n".join(section(stem, x) for stem, x in of_ranks(records["run"], several=False).items())


def scaling(records: Records, root: Path) -> str:
    """The records of several GPUs."""
    return "\n\n".join(section(stem, x) for stem, x in of_ranks(records["run"], several=True).items())


def all_calls(records: Records, root: Path) -> str:
    """The records of ``everyday.py``, GPUs first."""
    found = sorted(records["everyday"].items(), key=lambda each: on_cpu(each[1]["environment"]))
    return "\n\n".join(everyday_section(stem, x, root) for stem, x in found)


def steps(records: Records, root: Path) -> str:
    """The records of ``training.py``; without any a comment, so that the page does not show."""
    found = [training_section(stem, x, root) for stem, x in records["training"].items()]
    return "\n\n".join(["## Measured", *found] if found else ["<!-- benchmarks/training.py has no record yet -->"])


def readme(records: Records, root: Path) -> str:
    """Everyday calls on the GPU that was measured last, and on several of its kind."""
    everyday = {stem: x for stem, x in records["everyday"].items() if not on_cpu(x["environment"])}
    alone = of_ranks(everyday, several=False)
    if not alone:
        return ""
    latest = max(alone.values(), key=lambda x: str(x["environment"]["date"]))
    e = latest["environment"]
    several = [x for x in of_ranks(everyday, several=True).values() if x["environment"]["device"] == e["device"]]
    fewest = min(several, key=lambda x: int(x["environment"]["ranks"]), default=None)
    about = f"{e['device']}, torch {e['torch']}, {measured_at(e, root)}"
    if fewest and fewest["environment"]["commit"] != e["commit"]:
        about += f" Several GPUs: {measured_at(fewest['environment'], root)}"
    return f"{about}\n\n{tables.everyday_calls(latest, fewest)}"


PAGES: dict[Path, Callable[[Records, Path], str]] = {
    Path("docs/benchmarks/everyday.md"): all_calls,
    Path("docs/benchmarks/gpu.md"): performance,
    Path("docs/benchmarks/many-gpus.md"): scaling,
    Path("docs/how-to/training.md"): steps,
    Path("README.md"): readme,
}


def spliced(page: str, text: str) -> str:
    """The page with its measured part replaced: see ``page_writing``."""
    text = text or "Nothing has been measured yet: `benchmarks/run.py` and `benchmarks/everyday.py` write the records."
    return page_writing.spliced(page, BEGIN, text)


def read(folder: Path, pattern: str) -> dict[str, Data]:
    """Records by the stems of their names."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))}


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
    records = {script: read(given.results, pattern) for script, pattern in SCRIPTS.items()}
    wrong = 0
    for name, made in PAGES.items():
        path = given.root / name
        old = path.read_text(encoding="utf-8")
        new = spliced(old, made(records, given.root))
        if given.check and CHANGED in new:
            print(f"{name}: {CHANGED[:-1].lower()} the record; measure again", file=sys.stderr)
        # a record cannot hold the commit that adds it, or what comes behind: that makes no page wrong
        if given.check and new.replace(f" {CHANGED}", "") != old.replace(f" {CHANGED}", ""):
            print(f"{name} is not what the records say; run: python benchmarks/pages.py", file=sys.stderr)
            wrong = 1
        if not given.check:
            path.write_text(new, encoding="utf-8")
    latest, assets = figures.newest(records["run"]), given.root / "docs" / "assets"
    if latest and not given.check:
        figures.home(latest, assets)
    elif latest and not figures.is_home(latest, assets):
        print("the home page's chart is not of the newest record; run: python benchmarks/pages.py", file=sys.stderr)
        wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
