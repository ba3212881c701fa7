"""``contrastile verify --report FILE``: the run as one HTML file, which loads nothing and needs no JavaScript."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from contrastile.environment import environment
from contrastile.verify import growth, plots, report
from contrastile.verify.runner import Failure, Row

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d6dae0;
  --faint: #5b6470; --heat: 217, 119, 6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #14171b; --line: #343a42; --faint: #a3acb8; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; font: 16px/1.45 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0.3rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1rem 0 0.3rem; }
.verdict { border-left: 0.5rem solid; padding: 0.6rem 0.8rem; }
.pass { border-color: #16a34a; } .fail { border-color: #dc2626; } .incomplete { border-color: #d97706; }
.word { font-weight: 700; font-size: 1.3rem; }
.faint { color: var(--faint); }
table { border-collapse: collapse; width: 100%; } td, th { padding: 0.15rem 0.3rem; text-align: left; }
.heat { table-layout: fixed; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
.heat td { text-align: center; border: 1px solid var(--paper);
  background: rgba(var(--heat), var(--h, 0)); print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.heat th:first-child { width: 7.6rem; font-weight: 400; }
.heat thead th { text-align: center; font-size: 0.72rem; padding: 0.15rem 0; }
.heat td.failed { background: #b91c1c; color: #ffffff; font-weight: 700; }
.plots { display: flex; flex-wrap: wrap; gap: 0.4rem; } .plots svg { flex: 1 1 250px; min-width: 0; max-width: 360px; }
pre { white-space: pre-wrap; border: 1px solid var(--line); padding: 0.5rem; font-size: 0.85rem; margin: 0.3rem 0; }
@media print { body { max-width: none; } section, svg, table { break-inside: avoid; } }
"""

_LOWEST = -4.0
"""log10 of the ratio at which a cell has no colour; at 1 it has all of it."""


def page(
    rows: Sequence[Row],
    failures: Sequence[Failure],
    command: Sequence[str],
    seconds: float | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """The report, as HTML.

    Args:
        rows: of the run.
        failures: its failures.
        command: the words that started it.
        seconds: how long it took, if that is to be said.
        left_out: what was not run because less was asked for.
    """
    untested = [*left_out, *report.gaps(rows), *(f"{name}: {reason}" for name, reason in report.not_run(rows))]
    untested += [f"{each} (not claimed)" for each in report.unclaimed(rows)]
    reruns = [each.command for each in failures[:50]]
    body = "".join(
        [
            _verdict(rows, seconds),
            _section("Not tested", _list(untested) or "<p>Nothing.</p>"),
            _section("Failures", "".join(_failure(group) for group in report.causes(failures))) if failures else "",
            _section("Error over bound", _heat(rows)),
            _section("Error against d, b and scale", _plots(rows)),
            _section("Skipped", _list(report.skips(rows)) or "<p>Nothing.</p>"),
            _section("Environment", _facts(environment())),
            _section("Commands", "".join(f"<pre>{escape(x)}</pre>" for x in (shlex.join(command), *reruns))),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>contrastile verify: {escape(report.verdict(rows))}</title>\n"
        f"<style>{_STYLE}{plots.STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _verdict(rows: Sequence[Row], seconds: float | None) -> str:
    word = report.verdict(rows)
    _, _, rest = report.summary(rows, seconds).partition(": ")
    said = escape(rest.partition("; not tested:")[0])
    head = f'<span class="word">{word.upper()}</span>'
    return f'<h1>contrastile verify</h1>\n<div class="verdict {word}">{head} {said}</div>\n'


def _failure(group: Sequence[Failure]) -> str:
    failure, *others = group
    row = failure.row
    where = " ".join(str(row[name]) for name in ("backend", "property", "case", "dtype"))
    more = f"<p>And {len(others)} more, likely of the same cause.</p>" if others else ""
    return f"<h3>{escape(where)}</h3><p>{escape(row['reason'])}</p><pre>{escape(failure.command)}</pre>{more}"


def _heat(rows: Sequence[Row]) -> str:
    """A table for each backend: properties by dtypes, coloured by the logarithm of the largest ratio."""
    compared = [row for row in rows if row["property"] != "all"]
    parts = [
        '<p class="faint">The largest error / bound of all cases, without the rounding of a result to its own dtype; '
        "below 1 passes. The colour is on a logarithmic scale: none at 0.0001, all of it at 1.</p>"
    ]
    for (backend, device), group in report.grouped(compared, lambda row: (row["backend"], row["device"])).items():
        dtypes = list(dict.fromkeys(row["dtype"] for row in group))
        cells = report.grouped(group, lambda row: (row["property"], row["dtype"]))
        lines = [
            f"<tr><th>{escape(name)}</th>{''.join(_cell(cells.get((name, dtype), [])) for dtype in dtypes)}</tr>"
            for name in dict.fromkeys(row["property"] for row in group)
        ]
        head = "".join(f"<th>{escape(dtype)}</th>" for dtype in dtypes)
        count = Counter(row["status"] for row in group)
        parts.append(
            f"<h3>{escape(backend)} on {escape(device)}: {count['pass']} passed, {count['fail']} failed</h3>"
            f'<table class="heat"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        )
    return "".join(parts)


def _cell(rows: Sequence[Row]) -> str:
    text = report.worst(rows)
    if any(row["status"] == "fail" for row in rows):
        return f'<td class="failed">{escape(text)}</td>'
    most = max((row["excess"] for row in rows if row["excess"] is not None), default=0.0)
    heat = 0.0 if most <= 0 else min(max(1 - math.log10(most) / _LOWEST, 0.0), 1.0)
    # some of the paper shows through, so that the text stays legible
    return f'<td style="--h:{0.75 * heat:.2f}">{escape(text)}</td>'


def _plots(rows: Sequence[Row]) -> str:
    measured = [(row, row.get("points", [])) for row in rows if row.get("points")]
    if not measured:
        return "<p>Not measured: the property growth did not run.</p>"
    parts = [
        '<p class="faint">The symmetric loss of random pairs: the norm of both gradients\' errors over their own norm. '
        "In 16 bits the result's own rounding is the floor of the error.</p>",
        plots.legend(),
    ]
    for (backend, device), group in report.grouped(
        measured, lambda each: (each[0]["backend"], each[0]["device"])
    ).items():
        drawn = "".join(plots.plot(row["dtype"], axis, points) for row, points in group for axis in growth.AXES)
        parts.append(f'<h3>{escape(backend)} on {escape(device)}</h3><div class="plots">{drawn}</div>')
    return "".join(parts)


def _facts(facts: dict[str, Any]) -> str:
    lines = (
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<table>{''.join(lines)}</table>"
