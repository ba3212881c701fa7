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
"""The files that pages show whole."""
MADE = re.compile(r"(<!-- made by scripts/make_pages\.py: ([^\n]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def read(results: Path, name: str) -> Data:
    """The record of this name."""
    record: Data = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return record


def records_of(results: Path, parts: set[str]) -> Iterator[tuple[str, Data]]:
    """The names and records of ``benchmarks/everyday.py`` that hold one of these parts."""
    for path in sorted(results.glob("*.json")):
        data = read(results, path.stem)
        if isinstance(data, dict) and parts & {row.get("part") for row in data.get("times", [])}:
            yield path.stem, data


def everyday(results: Path) -> str:
    records = sorted(records_of(results, {"everyday"}), key=lambda record: record[1]["environment"]["device"] == "cpu")
    return "\n\n".join(tables.everyday_section(*record) for record in records)


def readme(results: Path) -> str:
    return tables.readme(data for _, data in records_of(results, {"everyday"}))


def gpus(results: Path, *, several: bool) -> str:
    records = [record for record in records_of(results, {"steps", "peers"}) if (tables.ranks(record[1]) > 1) == several]
    return "\n\n".join(tables.gpu_section(*record) for record in tables.newest(records))


def cpu(results: Path) -> str:
    """The records of ``contrastile bench`` on a CPU, as it prints them."""
    output = io.StringIO()
    with redirect_stdout(output):
        for stem in ("cpu_8k", "cpu_16k", "cpu_64k"):
            report.show(read(results, stem))
            print()
    return f"```text\n{output.getvalue().rstrip()}\n```"


def _growth_rows(results: Path) -> list[Row]:
    rows = [row for row in read(results, "growth_cpu")["rows"] if row.get("points")]
    return sorted(rows, key=lambda row: str(row["backend"]))


def growth_chart(results: Path) -> str:
    """The figure of docs/explanation/bounds.md: a row for each dtype of torch."""
    rows = [(f"torch {row['dtype']}", row["points"]) for row in _growth_rows(results) if row["backend"] == "torch"]
    return plots.figure(rows, list(AXES))


def bounds(results: Path) -> str:
    """The record of ``contrastile verify --property growth --json docs/results/growth_cpu.json``."""
    facts = read(results, "growth_cpu")["environment"]
    picture = "![Error of the gradients against d, b and scale, by dtype, with its bounds](../results/growth_cpu.svg)"
    about = f"{facts['cpu']}, torch {facts['torch']}, numpy {facts['numpy']}. The largest ratio of any point:"
    denominators = {"bound": "a-priori bound", "probable": "probabilistic bound", "plain": "plain computation's"}
    lines = []
    for row in _growth_rows(results):
        ratios = (max(point["error"] / point[name] for point in row["points"]) for name in denominators)
        lines.append([row["backend"], row["dtype"], *(f"{ratio:.2g}" for ratio in ratios)])
    head = ["backend", "dtype", *(f"error / {label}" for label in denominators.values())]
    return f"{picture}\n\n{about}\n\n{table(head, lines, left=(0, 1))}"


def options(results: Path, command: str) -> str:
    """The help that a command of ``contrastile`` has for its arguments."""
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    lines = []
    for action in parser._actions[1:]:
        metavar = action.metavar or action.dest.upper()
        name = metavar if isinstance(metavar, str) else metavar[0]
        value = "" if action.nargs == 0 else f"{name}{'...' if action.nargs in ('+', '*') else ''}"
        # the formatter fills in %(default)s, and argparse has no public way to ask it to
        meaning = argparse.HelpFormatter("")._expand_help(action) if action.help else ""
        if action.choices and len(choices := list(map(str, action.choices))) < 9:
            meaning += f"; one of {', '.join(choices)}"
        signature = " ".join(filter(None, [", ".join(action.option_strings), value]))
        lines.append([f"`{signature}`", escaped(meaning)])
    return table(["option", "meaning"], lines, left=(0, 1))


def errors(results: Path) -> str:
    """The errors that the public functions raise on invalid input."""
    lines, module = list[str](), importlib.import_module("provocations")
    for title, provocations in module.PROVOCATIONS.items():
        rows = []
        for case in provocations:
            # browsers keep the indentation of a script's lines only in no-break spaces
            call = "<br>".join(f"`{line}`" for line in case.text.replace("    ", 4 * "\N{NO-BREAK SPACE}").split("\n"))
            call += f", {case.without} not installed" if case.without else ""
            rows.append([call, f"`{case.known}`", escaped(module.message(case, case.libraries[0]))])
        lines += [f"## {title}", table(["call", "raises", "message"], rows, left=(0, 1, 2))]
    return "\n\n".join(lines)


def conformance(results: Path) -> str:
    """Published losses: every cell, those above their bound with the command that shows them, and the facts."""
    data = read(results, "conformance")
    e, versions_of = data["environment"], data["environment"] | data["environment"]["packages"]

    def versioned(package: str) -> str:
        return f"{package} {(versions_of[package] or '').partition('+')[0]}"

    interpreted = ", ".join(dict.fromkeys(versioned(x["package"]) for x in data["peers"] if "inter" in x["where"]))
    versions = f"torch {e['torch']}, triton {e['packages']['triton']}, NumPy {e['numpy']}, Python {e['python']}"
    about = (
        f"{e['date'][:10]}; {versions}; on a CPU, and in Triton's interpreter: {interpreted}. "
        "[The record](../results/conformance.json) has more of every cell."
    )
    peers = [peer for peer in data["peers"] if peer["cells"]]
    columns = list(peers[0]["cells"])
    cells = [
        [f"{versioned(peer['package'])}: {peer['about']}", *(_ratio_cell(peer["cells"][name]) for name in columns)]
        for peer in peers
    ]
    left_out = [f"{versioned(peer['package'])}: {peer['about']}" for peer in data["peers"] if not peer["cells"]]
    head = ["package", "loss", "property", "checks above", "error / bound", "worst case, and what was found"]
    failures = []
    for peer in peers:
        for name, cell in peer["cells"].items():
            if cell["status"] != "fail":
                continue
            ratio = "not finite" if cell["ratio"] == "inf" else f"{cell['ratio']:.3g}"
            # escape "|" alone, because other marks in a reason are Markdown
            finding = cell["reason"].replace("|", "\\|")
            finding = f"`{peer['name']} --property {cell['property']} --case {cell['case']}`: {finding}"
            failed_checks = f"{cell['failed']} of {cell['checks']}"
            failures.append([versioned(peer["package"]), peer["about"], name, failed_checks, ratio, finding])
    facts = []
    for name in dict.fromkeys(row["fact"] for row in data["facts"]):
        rows = [row for row in data["facts"] if row["fact"] == name]
        first = rows[0]
        ranks, values = (", ".join(dict.fromkeys(str(row[key]) for row in rows)) for key in ("ranks", "found"))
        fact_cells = [first["case"], first["says"], ranks, f"{first['what']} = {values}", first["right"], f"`{name}`"]
        facts.append([f"{first['package']} {first['version']}", *fact_cells])
    fact_head = ["package", "property", "what its reproducer shows", "ranks", "found", "right", "reproducer"]
    parts = [
        about,
        "## Error over bound",
        "Above 1 in bold. A dash: not claimed, or not tested. The last column is the power of the batch.",
        table(["loss", *columns], cells),
        f"Not run, because they need a GPU: {'; '.join(left_out)}." if left_out else "",
        "## Above the bound",
        "To reproduce a cell, append its command to `contrastile verify --loss peers.adapters:`, in `benchmarks`. "
        "Put `TRITON_INTERPRET=1` before it for what runs in the interpreter. "
        "A bound is an element's own: an error of 1e-24 counts where the exact gradient is as small.",
        table(head, failures, left=(0, 1, 2, 5)),
        "## Facts",
        "To reproduce a fact, append its name to `python benchmarks/conformance.py --fact`.",
        table(fact_head, facts, left=(0, 1, 2, 4, 5, 6)),
    ]
    return "\n\n".join(filter(None, parts))


def _ratio_cell(cell: Row) -> str:
    """The text of a cell of the conformance table."""
    if "power" in cell:
        return {0: "b⁰", 1: "b", 2: "b²", 3: "b³"}.get(cell["power"], f"b^{cell['power']}")
    if cell["status"] not in ("pass", "fail"):
        return "-"
    ratio = float(cell["ratio"])
    text = f"{ratio:.1g}".replace("e+0", "e").replace("e-0", "e-").replace("inf", "∞")
    return f"**{text}**" if cell["status"] == "fail" else text


def integrations(results: Path) -> str:
    """The record of ``tests/integrations/test_matrix.py``: a table for each number of ranks, and what was refused."""
    data, parts, refused = read(results, "integrations"), [], dict[str, str]()
    e, packages = data["environment"], data["environment"]["packages"]
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    parts.append(f"{e['date'][:10]}, torch {e['torch']}, {versions}. [The record](../results/integrations.json).")
    for ranks, title in ((1, "One rank"), (2, "Two ranks, under DDP or as the column says")):
        rows = {(row["library"], row["way"]): row for row in data["rows"] if row["ranks"] == ranks}
        libraries, ways = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
        lines = [[name, *(_error_cell(rows.get((name, way))) for way in ways)] for name in libraries]
        parts += [f"**{title}**", table(["", *ways], lines)]
        said = {key: row["said"] for key, row in rows.items() if "said" in row}
        refused |= {f"{', '.join(key)}: {words}": "" for key, words in said.items() if "not run" not in words}
    return "\n\n".join([*parts, "\n".join(f"* {escaped(refusal)}" for refusal in refused)])


def _error_cell(row: Row | None) -> str:
    """The text of a cell of the table of integrations; for bfloat16 with the error of the library's own loss."""
    if row is None or "said" in row:
        match = re.search("not run|aborts", "-" if row is None else row["said"])
        return "-" if row is None else match[0] if match else "refused"
    error, library_error = (f"{row[name]:.0e}".replace("e-0", "e-") for name in ("error", "own"))
    return f"{error} ({library_error})" if row["way"] == "bf16" else error


def file(results: Path, name: str) -> str:
    """A file of this repository, as a code host shows it too."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return f'``` {{.python title="{name.removeprefix("examples/")}"}}\n{text}```'


RECORD = "gpu_nvidia_h200_x4"
"""The record that the model of time is compared with."""
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
    """The page with its made parts written anew; KeyError if a part has an unknown name."""
    return MADE.sub(lambda match: f"{match[1]}\n{PARTS[match[2]](results)}\n\n", text)


def made_files(root: Path, results: Path) -> Iterator[tuple[Path, str]]:
    """The path and the text of every file with a made part, and of all charts."""
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if MADE.search(text):
            yield path, page(text, results)
    if (results / "growth_cpu.json").exists():
        yield results / "growth_cpu.svg", growth_chart(results)
    alone = ((stem, data) for stem, data in records_of(results, {"peers"}) if tables.ranks(data) == 1)
    for i, (stem, data) in enumerate(tables.newest(alone)):
        yield results / f"{stem}.svg", tables.chart(data)
        if i == 0:
            yield root / "docs" / "assets" / "home.svg", tables.chart(data)
            yield root / "docs" / "assets" / "home-phone.svg", tables.chart(data, phone=True)


def is_same(path: Path, old: str, new: str) -> bool:
    """Whether two texts of a file are equal; charts may differ by the processor's rounding of coordinates."""
    if path.suffix != ".svg":
        return old == new
    # ids are hashes of coordinates
    (words, numbers), (other_words, other_numbers) = (
        (_COORDINATE.sub("", text), [float(x) for x in _COORDINATE.findall(text)])
        for text in (re.sub(r"\b[mp][0-9a-f]{10}\b", "", text) for text in (old, new))
    )
    return words == other_words and all(abs(x - y) < 1e-5 for x, y in zip(numbers, other_numbers, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with --check compare them; 1 if one is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is stale")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="where README.md and docs are")
    args = parser.parse_args(arguments)
    stale = 0
    for path, text in made_files(args.root, args.root / "docs" / "results"):
        if path.exists() and is_same(path, path.read_text(encoding="utf-8"), text):
            continue
        stale = 1
        print(f"{path.relative_to(args.root)} {'is stale; run: python scripts/make_pages.py' if args.check else ''}")
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return stale if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
