"""The report of a run as one HTML file, which loads no other file and needs no JavaScript."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from html import escape

from contrastile.environment import environment
from contrastile.verify import growth, plots, report
from contrastile.verify.runner import Failure, Row

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; font: 16px/1.45 system-ui, sans-serif; }
h1 { padding: 0.6rem 1rem; border-radius: 0.4rem; color: #ffffff; print-color-adjust: exact; }
.pass { background: #15803d; } .fail { background: #b91c1c; } .incomplete { background: #b45309; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.8rem; line-height: 1.25; }
.heat { border-collapse: collapse; table-layout: fixed; width: 100%; font-size: 0.8rem; }
.heat td { text-align: center; background: rgba(217, 119, 6, var(--h, 0)); print-color-adjust: exact; }
.heat th:first-child { width: 9rem; text-align: left; font-weight: 400; }
.heat td.failed { background: #b91c1c; color: #ffffff; font-weight: 700; }
svg { max-width: 100%; height: auto; }
"""

_LOWEST = -4.0
"""log10 of the ratio at which a cell has no colour; a ratio of 1 has full colour."""


def page(
    rows: Sequence[Row],
    failures: Sequence[Failure],
    command: Sequence[str],
    seconds: float | None = None,
    left_out: Sequence[str] = (),
    seed: int = 0,
) -> str:
    """The terminal's report, a heat map of all properties, plots and the environment, as HTML.

    Raises:
        ImportError: there are measurements to plot, and matplotlib is not installed.
    """
    terminal = io.StringIO()
    with contextlib.redirect_stdout(terminal):
        report.show(rows, failures, quiet=False, seconds=seconds, left_out=left_out)
    # FORCE_COLOR colours a table even in a string
    text = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    verdict, facts = report.verdict(rows), {"seed": seed, **environment()}
    body = [
        f'<h1 class="{verdict}">contrastile verify: {verdict.upper()}</h1>\n',
        f"<p>{facts['date']}, contrastile {facts['contrastile']}, commit {facts['commit']}, seed {seed}</p>\n",
        f"<pre>$ {escape(shlex.join(command))}\n\n{escape(text)}</pre>\n",
        _section("Error over bound", _heat(rows)),
        _section("Error against d, b and scale", _plots(rows)),
        _section("Environment", f"<pre>{escape(json.dumps(facts, indent=1))}</pre>"),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>contrastile verify: {verdict}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{''.join(body)}</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n"


def _heat(rows: Sequence[Row]) -> str:
    """A table for each backend: properties by dtypes, coloured by the logarithm of the largest ratio."""
    compared = [row for row in rows if row["property"] != "all"]
    sections = [
        "<p>The largest error / bound of all cases, without the rounding of a result to its own dtype; "
        "below 1 passes. The colour is on a logarithmic scale: none at 0.0001, all of it at 1.</p>"
    ]
    for (backend, device), group in report.grouped(compared, lambda row: (row["backend"], row["device"])).items():
        dtypes = list(dict.fromkeys(row["dtype"] for row in group))
        rows_of_cell = report.grouped(group, lambda row: (row["property"], row["dtype"]))
        body = [
            f"<tr><th>{escape(name)}</th>{''.join(_cell(rows_of_cell.get((name, dtype), [])) for dtype in dtypes)}</tr>"
            for name in dict.fromkeys(row["property"] for row in group)
        ]
        head = "".join(f"<th>{escape(dtype)}</th>" for dtype in dtypes)
        counts = Counter(row["status"] for row in group)
        sections.append(
            f"<h3>{escape(backend)} on {escape(device)}: {counts['pass']} passed, {counts['fail']} failed</h3>"
            f'<table class="heat"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
        )
    return "".join(sections)


def _cell(rows: Sequence[Row]) -> str:
    text = report.worst(rows)
    if any(row["status"] == "fail" for row in rows):
        return f'<td class="failed">{escape(text)}</td>'
    largest_excess = max((row["excess"] for row in rows if row["excess"] is not None), default=0.0)
    heat = 0.0 if largest_excess <= 0 else min(max(1 - math.log10(largest_excess) / _LOWEST, 0.0), 1.0)
    # at most 0.75, so that the text stays legible
    return f'<td style="--h:{0.75 * heat:.2f}">{escape(text)}</td>'


def _plots(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.get("points")]
    if not measured:
        return "<p>Not measured: the property growth did not run.</p>"
    sections = [
        "<p>The symmetric loss of random pairs: the norm of both gradients' errors over their own norm. "
        "In 16 bits the result's own rounding is the floor of the error.</p>"
    ]
    for (backend, device), group in report.grouped(measured, lambda row: (row["backend"], row["device"])).items():
        figure = plots.figure([(row["dtype"], row.get("points", [])) for row in group], list(growth.AXES))
        sections.append(f"<h3>{escape(backend)} on {escape(device)}</h3>{figure}")
    return "".join(sections)
