"""Writes the parts of the pages that are made of records, of the code and of its errors, and the charts.

    python scripts/make_pages.py            every page of docs and README.md, and the charts
    python scripts/make_pages.py --check    writes nothing; exit code 1 where a page or a chart is not what it should be

A made part of a page stands between ``<!-- made by scripts/make_pages.py: NAME -->`` and ``<!-- end -->``. ``PARTS``
has the function of each name, which takes the folder of records.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

import page_tables as tables  # noqa: E402
from page_tables import Data, Row, escaped, table  # noqa: E402

from contrastile.bench import report  # noqa: E402
from contrastile.cli import COMMANDS  # noqa: E402
from contrastile.verify import plots  # noqa: E402
from contrastile.verify.growth import AXES  # noqa: E402

FILES = (
    *("examples/pictures.py", "examples/siglip.py"),
    "contrastile/backends/numpy/__init__.py",
)
"""What pages show whole."""
MADE = re.compile(r"(<!-- made by scripts/make_pages\.py: ([^\n]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def read(results: Path, name: str) -> Data:
    """A record."""
    found: Data = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return found


def timed(results: Path, parts: set[str]) -> Iterator[tuple[str, Data]]:
    """Names and records of ``benchmarks/everyday.py`` that hold one of these parts."""
    for path in sorted(results.glob("*.json")):
        data = read(results, path.stem)
        if isinstance(data, dict) and parts & {row.get("part") for row in data.get("times", [])}:
            yield path.stem, data


def everyday(results: Path) -> str:
    found = sorted(timed(results, {"everyday"}), key=lambda each: each[1]["environment"]["device"] == "cpu")
    return "\n\n".join(tables.everyday_section(*each) for each in found)


def readme(results: Path) -> str:
    return tables.readme(data for _, data in timed(results, {"everyday"}))


def gpus(results: Path, *, several: bool) -> str:
    found = [each for each in timed(results, {"steps", "peers"}) if (tables.ranks(each[1]) > 1) == several]
    return "\n\n".join(tables.gpu_section(*each) for each in tables.newest(found))


def cpu(results: Path) -> str:
    """The records of ``contrastile bench`` on a CPU, as it prints them."""
    said = io.StringIO()
    with redirect_stdout(said):
        for stem in ("cpu_8k", "cpu_16k", "cpu_64k"):
            report.show(read(results, stem))
            print()
    return f"```text\n{said.getvalue().rstrip()}\n```"


def _growth(results: Path) -> list[Row]:
    rows = [row for row in read(results, "growth_cpu")["rows"] if row.get("points")]
    return sorted(rows, key=lambda row: str(row["backend"]))


def growth_chart(results: Path) -> str:
    """The figure of docs/explanation/bounds.md: a row for each dtype of torch."""
    rows = [(f"torch {row['dtype']}", row["points"]) for row in _growth(results) if row["backend"] == "torch"]
    return plots.figure(rows, list(AXES))


def bounds(results: Path) -> str:
    """The record of ``contrastile verify --property growth --json docs/results/growth_cpu.json``."""
    facts = read(results, "growth_cpu")["environment"]
    picture = "![Error of the gradients against d, b and scale, by dtype, with its bounds](../results/growth_cpu.svg)"
    about = f"{facts['cpu']}, torch {facts['torch']}, numpy {facts['numpy']}. The largest ratio of any point:"
    beside = {"bound": "a-priori bound", "probable": "probabilistic bound", "plain": "plain computation's"}
    lines = []
    for row in _growth(results):
        worst = (max(each["error"] / each[name] for each in row["points"]) for name in beside)
        lines.append([row["backend"], row["dtype"], *(f"{ratio:.2g}" for ratio in worst)])
    head = ["backend", "dtype", *(f"error / {what}" for what in beside.values())]
    return f"{picture}\n\n{about}\n\n{table(head, lines, left=(0, 1))}"


def options(results: Path, command: str) -> str:
    """What a command of ``contrastile`` says of its own arguments."""
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    lines = []
    for action in parser._actions[1:]:
        metavar = action.metavar or action.dest.upper()
        name = metavar if isinstance(metavar, str) else metavar[0]
        value = "" if action.nargs == 0 else f"{name}{'...' if action.nargs in ('+', '*') else ''}"
        # the formatter fills in %(default)s, and argparse has no public way to ask it to
        said = argparse.HelpFormatter("")._expand_help(action) if action.help else ""
        if action.choices and len(choices := list(map(str, action.choices))) < 9:
            said += f"; one of {', '.join(choices)}"
        shown = " ".join(filter(None, [", ".join(action.option_strings), value]))
        lines.append([f"`{shown}`", escaped(said)])
    return table(["option", "meaning"], lines, left=(0, 1))


def errors(results: Path) -> str:
    """The errors that the public functions raise on invalid input."""
    lines, provoked = list[str](), importlib.import_module("provocations")
    for title, provocations in provoked.PROVOCATIONS.items():
        rows = []
        for each in provocations:
            call = f"`{each.line}`" + (f", {each.without} not installed" if each.without else "")
            rows.append([call, f"`{each.known}`", escaped(provoked.message(each, each.libraries[0]))])
        lines += [f"## {title}", table(["call", "raises", "message"], rows, left=(0, 1, 2))]
    return "\n\n".join(lines)


def conformance(results: Path) -> str:
    """Published losses: every cell, those above their bound with the command that shows them, and the facts."""
    data = read(results, "conformance")
    e, known = data["environment"], data["environment"] | data["environment"]["packages"]

    def versioned(package: str) -> str:
        return f"{package} {(known[package] or '').partition('+')[0]}"

    interpreted = ", ".join(dict.fromkeys(versioned(x["package"]) for x in data["peers"] if "inter" in x["where"]))
    versions = f"torch {e['torch']}, triton {e['packages']['triton']}, NumPy {e['numpy']}, Python {e['python']}"
    about = (
        f"{e['date'][:10]}; {versions}; on a CPU, and in Triton's interpreter: {interpreted}. "
        "[The record](../results/conformance.json) has more of every cell."
    )
    ran = [peer for peer in data["peers"] if peer["cells"]]
    columns = list(ran[0]["cells"])
    cells = [
        [f"{versioned(peer['package'])}: {peer['about']}", *(_ratio(peer["cells"][name]) for name in columns)]
        for peer in ran
    ]
    left_out = [f"{versioned(peer['package'])}: {peer['about']}" for peer in data["peers"] if not peer["cells"]]
    head = ["package", "loss", "property", "checks above", "error / bound", "worst case, and what was found"]
    above = []
    for peer in ran:
        for name, cell in peer["cells"].items():
            if cell["status"] != "fail":
                continue
            ratio = "not finite" if cell["ratio"] == "inf" else f"{cell['ratio']:.3g}"
            # the reason's other marks are meant
            what = cell["reason"].replace("|", "\\|")
            what = f"`{peer['name']} --property {cell['property']} --case {cell['case']}`: {what}"
            share = f"{cell['failed']} of {cell['checks']}"
            above.append([versioned(peer["package"]), peer["about"], name, share, ratio, what])
    facts = []
    for name in dict.fromkeys(row["fact"] for row in data["facts"]):
        rows = [row for row in data["facts"] if row["fact"] == name]
        first = rows[0]
        ranks, found = (", ".join(dict.fromkeys(str(row[key]) for row in rows)) for key in ("ranks", "found"))
        shown = [first["case"], first["says"], ranks, f"{first['what']} = {found}", first["right"], f"`{name}`"]
        facts.append([f"{first['package']} {first['version']}", *shown])
    of_facts = ["package", "property", "what its reproducer shows", "ranks", "found", "right", "reproducer"]
    parts = [
        about,
        "### Error over bound",
        "Above 1 in bold. A dash: not claimed, or not tested. The last column is the power of the batch.",
        table(["loss", *columns], cells),
        f"Not run, because they need a GPU: {'; '.join(left_out)}." if left_out else "",
        "### Above the bound",
        "To reproduce a cell, append its command to `contrastile verify --loss peers.adapters:`, in `benchmarks`. "
        "Put `TRITON_INTERPRET=1` before it for what runs in the interpreter. "
        "A bound is an element's own: an error of 1e-24 counts where the exact gradient is as small.",
        table(head, above, left=(0, 1, 2, 5)),
        "### Facts",
        "To reproduce a fact, append its name to `python benchmarks/conformance.py --fact`.",
        table(of_facts, facts, left=(0, 1, 2, 4, 5, 6)),
    ]
    return "\n\n".join(filter(None, parts))


def _ratio(cell: Row) -> str:
    """What stands in a cell of the conformance table."""
    if "power" in cell:
        return {0: "b⁰", 1: "b", 2: "b²", 3: "b³"}.get(cell["power"], f"b^{cell['power']}")
    if cell["status"] not in ("pass", "fail"):
        return "-"
    ratio = float(cell["ratio"])
    said = f"{ratio:.1g}".replace("e+0", "e").replace("e-0", "e-").replace("inf", "∞")
    return f"**{said}**" if cell["status"] == "fail" else said


def integrations(results: Path) -> str:
    """The record of ``tests/integrations/test_matrix.py``: a table for each number of ranks, and what was refused."""
    data, parts, refused = read(results, "integrations"), [], dict[str, str]()
    e, packages = data["environment"], data["environment"]["packages"]
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    parts.append(f"{e['date'][:10]}, torch {e['torch']}, {versions}. [The record](../results/integrations.json).")
    for ranks, title in ((1, "One rank"), (2, "Two ranks, under DDP or as the column says")):
        rows = {(row["library"], row["way"]): row for row in data["rows"] if row["ranks"] == ranks}
        libraries, ways = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
        lines = [[name, *(_error(rows.get((name, way))) for way in ways)] for name in libraries]
        parts += [f"**{title}**", table(["", *ways], lines)]
        refused |= {f"{', '.join(key)}: {row['said']}": "" for key, row in rows.items() if "said" in row}
    return "\n\n".join([*parts, "\n".join(f"* {escaped(said)}" for said in refused)])


def _error(row: Row | None) -> str:
    """A cell of the table of integrations: of bfloat16 also the error of the library's own loss."""
    if row is None or "said" in row:
        kind = re.search("not run|aborts", "-" if row is None else row["said"])
        return "-" if row is None else kind[0] if kind else "refused"
    error, own = (f"{row[name]:.0e}".replace("e-0", "e-") for name in ("error", "own"))
    return f"{error} ({own})" if row["way"] == "bf16" else error


def file(results: Path, name: str) -> str:
    """A file of this repository, as a code host shows it too."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return f'``` {{.python title="{name.removeprefix("examples/")}"}}\n{text}```'


RECORD = "gpu_nvidia_h200_x4"
"""The one that the model of time is compared with."""
_COORDINATE = re.compile(r"-?\d+\.\d+")
PARTS: dict[str, Callable[[Path], str]] = {
    "everyday calls": everyday,
    "everyday calls of the README": readme,
    "one GPU": partial(gpus, several=False),
    "several GPUs": partial(gpus, several=True),
    "several hosts": lambda results: tables.hosts(RECORD, read(results, RECORD)),
    "contrastile bench on a CPU": cpu,
    "growth": bounds,
    "conformance": conformance,
    "integrations": integrations,
    "errors": errors,
    **{f"file {name}": partial(file, name=name) for name in FILES},
    **{f"options of {name}": partial(options, command=name) for name in COMMANDS},
}


def page(text: str, results: Path) -> str:
    """A page with its made parts as they should be; a name of no part raises KeyError."""
    return MADE.sub(lambda found: f"{found[1]}\n{PARTS[found[2]](results)}\n\n", text)


def made(root: Path, results: Path) -> Iterator[tuple[Path, str]]:
    """Every file with a made part, and all charts: where, and what it should hold."""
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if MADE.search(text):
            yield path, page(text, results)
    if (results / "growth_cpu.json").exists():
        yield results / "growth_cpu.svg", growth_chart(results)
    alone = ((stem, data) for stem, data in timed(results, {"peers"}) if tables.ranks(data) == 1)
    for i, (stem, data) in enumerate(tables.newest(alone)):
        yield results / f"{stem}.svg", tables.chart(data)
        if i == 0:
            yield root / "docs" / "assets" / "home.svg", tables.chart(data)
            yield root / "docs" / "assets" / "home-phone.svg", tables.chart(data, phone=True)


def same(path: Path, old: str, new: str) -> bool:
    """Whether a file is as it should be; of a chart but for what the processor's rounding leaves in coordinates."""
    if path.suffix != ".svg":
        return old == new
    # ids are hashes of coordinates
    (words, numbers), (others, found) = (
        (_COORDINATE.sub("", text), [float(x) for x in _COORDINATE.findall(text)])
        for text in (re.sub(r"\b[mp][0-9a-f]{10}\b", "", text) for text in (old, new))
    )
    return words == others and all(abs(x - y) < 1e-5 for x, y in zip(numbers, found, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Write, or with --check compare; 1 where something is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is stale")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="where README.md and docs are")
    given = parser.parse_args(arguments)
    stale = 0
    for path, text in made(given.root, given.root / "docs" / "results"):
        if path.exists() and same(path, path.read_text(encoding="utf-8"), text):
            continue
        stale = 1
        print(f"{path.relative_to(given.root)} {'is stale; run: python scripts/make_pages.py' if given.check else ''}")
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return stale if given.check else 0


if __name__ == "__main__":
    sys.exit(main())
