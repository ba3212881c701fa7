"""Runs the reproducers of ``facts`` and says whether each still shows what it says.

::

    python benchmarks/peers/reproduce.py                        # all
    python benchmarks/peers/reproduce.py open_clip_default      # some
    python benchmarks/peers/reproduce.py --json facts.json

A reproducer is a file of a few lines that needs torch and the one package. Its docstring says what it shows, and then
``package``, ``case``, ``ranks`` (numbers of ranks to run it on) and ``interpreter`` (it runs a kernel, on a GPU or in
Triton's interpreter). It prints one line, ``what = found, right value``. Where the two differ, the fact is reproduced.
The exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FACTS = HERE / "facts"
SECONDS = 120
LINE = re.compile(r"^(?P<what>.+) = (?P<found>\S+), right (?P<right>\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fact:
    """A reproducer.

    Attributes:
        name: of the file, without its suffix.
        says: what it shows, in one sentence.
        package: its name on PyPI.
        case: the property of the table that it belongs to.
        ranks: numbers of ranks to run it on; (1,) for a single process.
        interpreter: whether it runs a kernel, so that it needs a GPU or Triton's interpreter.
    """

    name: str
    says: str
    package: str
    case: str
    ranks: tuple[int, ...] = (1,)
    interpreter: bool = False

    @property
    def path(self) -> Path:
        """The file."""
        return FACTS / f"{self.name}.py"

    @property
    def command(self) -> str:
        """What runs it."""
        return f"python benchmarks/peers/reproduce.py {self.name}"


def read(path: Path) -> Fact:
    """A reproducer's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    says, _, rest = text.partition("\n\n")
    fields = dict(line.split(": ", 1) for line in rest.splitlines())
    ranks = tuple(int(n) for n in fields.get("ranks", "1").split())
    return Fact(path.stem, " ".join(says.split()), fields["package"], fields["case"], ranks, "interpreter" in fields)


def facts(names: Sequence[str] = ()) -> list[Fact]:
    """Those of these names, or all.

    Raises:
        SystemExit: there is none of a name.
    """
    known = {path.stem: path for path in sorted(FACTS.glob("*.py"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"there is no fact {', '.join(unknown)}; there are {', '.join(known)}")
    return [read(known[name]) for name in names or known]


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run(fact: Fact) -> Iterator[dict[str, Any]]:
    """A row for each number of ranks: what was found, what is right, whether they differ."""
    found = installed(fact.package)
    row = {"fact": fact.name, "says": fact.says, "package": fact.package, "version": found, "case": fact.case}
    for ranks in fact.ranks:
        here = row | {"ranks": ranks, "interpreter": fact.interpreter, "command": fact.command}
        if found is None:
            yield here | {"status": "skip", "reason": f"{fact.package} is not installed"}
            continue
        output = _output(fact, ranks)
        shown = LINE.search(output)
        if shown is None:
            yield here | {"status": "fail", "reason": " ".join(output.split())[-300:]}
            continue
        status = "reproduced" if shown["found"] != shown["right"] else "not reproduced"
        yield here | {"status": status, **shown.groupdict()}


def _output(fact: Fact, ranks: int) -> str:
    """Everything that the reproducer prints."""
    launcher = ["-m", "torch.distributed.run", "--local-ranks-filter", "0", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else ()), str(HERE / "stubs.py"), str(fact.path)]
    how = {"TRITON_INTERPRET": str(int(fact.interpreter and not _gpu())), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | how, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    return ended.stdout + ended.stderr


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Runs reproducers of facts about published packages.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for fact in facts(options.names):
        print(f"{fact.name}: {fact.says}", flush=True)
        for row in run(fact):
            ranks = f", {row['ranks']} ranks" if row["ranks"] > 1 else ""
            what = row.get("reason") or f"{row['what']} = {row['found']}, right {row['right']}"
            print(f"  {row['package']} {row['version']}{ranks}: {row['status']}: {what}", flush=True)
            rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["status"] in ("fail", "not reproduced") for row in rows))


if __name__ == "__main__":
    main()
