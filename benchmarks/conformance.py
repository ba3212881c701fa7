"""Holds published losses to the cases of ``contrastile verify``, and writes docs/results/conformance.json.

::

    pip install -r benchmarks/peers/requirements.txt
    python benchmarks/conformance.py                           # everything; takes minutes
    python benchmarks/conformance.py --only lightly inf_cl     # these peers; the others stay as they were recorded
    python benchmarks/conformance.py --only --facts            # the facts alone
    python scripts/make_conformance_page.py                    # the page and its figure, from the record
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from peers import adapters, reproduce, stubs, table  # noqa: E402

import contrastile  # noqa: E402
from contrastile.environment import measurement_environment  # noqa: E402

RESULT = HERE.parent / "docs" / "results" / "conformance.json"
ALSO = ("triton",)


def environment() -> dict[str, Any]:
    """What everything ran with: versions, and what was stood in for."""
    packages = sorted({peer.package for peer in adapters.PEERS.values()} - {"contrastile", "torch"}, key=str.lower)
    versions = {name: reproduce.installed(name) for name in (*packages, *ALSO)}
    more = {"contrastile": contrastile.__version__, "packages": versions, "stand-ins": list(stubs.install())}
    return measurement_environment() | more


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Holds published losses to the cases of contrastile verify.")
    parser.add_argument("--only", nargs="*", choices=[*adapters.PEERS], metavar="PEER", help=", ".join(adapters.PEERS))
    parser.add_argument("--facts", action="store_true", help="run the facts, too, where --only is given")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    record = (
        json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {"peers": [], "facts": []}
    )
    known = {row["name"]: row for row in record["peers"]}

    def write() -> None:
        peers = [known[name] for name in adapters.PEERS if name in known]
        told = {"environment": environment(), "peers": peers, "facts": record["facts"]}
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    for name in adapters.PEERS if options.only is None else options.only:
        print(name, flush=True)
        known[name] = table.in_a_process(name)
        write()
    if options.only is None or options.facts:
        record["facts"] = [row for fact in reproduce.facts() for row in reproduce.run(fact)]
        write()


if __name__ == "__main__":
    main()
