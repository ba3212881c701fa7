"""The record of a sweep as lines and as a picture."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from contrastile.bench.peers import PLAIN
from contrastile.reporting import colored, wrapped

_MIB = 2**20

PICTURES = (".png", ".pdf", ".svg")
"""The file types of a picture."""


def show(record: dict[str, Any]) -> None:
    """Print the machine, the settings, and one line for each measurement or for the reason why it is missing."""
    facts, settings = record["environment"], record["settings"]
    threads = facts.get("threads") or facts["cores"]
    where = f"{facts['cpu']}, {threads} threads" if facts["device"] == "cpu" else facts["device"]
    print(f"{where}, torch {facts['torch']}" if facts["torch"] else f"{where}, numpy {facts['numpy']}")
    rounds = f"{settings['repeat']} round{'s' * (settings['repeat'] > 1)}"
    print(f"Symmetric loss, forward and backward; {settings['dtype']}, scale {settings['scale']:g}, {rounds}")
    width = max((len(row["implementation"]) for row in record["rows"]), default=0)
    size = None
    for row in record["rows"]:
        if size != (size := f"{row['variant']}, b = {row['batch']:,}, d = {row['width']}"):
            print(f"\n{size}")
        print(f"  {row['implementation']:{width}}  {_line(row)}")
    spreads = [row["spread"] for row in record["rows"] if not row.get("steady", True)]
    if spreads:
        warning = f"this machine is busy: times vary by up to {max(spreads):.0%}, so the ratios mean little"
        print("\n" + wrapped(colored(warning, "yellow")))
    agreements = [agreement for agreement in record["agreements"] if agreement["ratio"] is not None]
    if agreements:
        checked = ", ".join(f"{agreement['implementation']} {agreement['ratio']:.2g}" for agreement in agreements)
        print("\n" + wrapped(f"held to the oracle first, error / bound: {checked}"))


def _line(row: dict[str, Any]) -> str:
    """A measurement in words: 0.203 s, 10 MiB: 1.6 x faster, 6.5 x less memory than plain."""
    if row["status"] == "skip":
        return f"skipped: {row['reason']}"
    seconds, peak = row["seconds"]["median"], row["peak_extra_bytes"]
    factor, unit = next((x for x in ((1.0, "s"), (1e-3, "ms")) if seconds >= x[0] / 10), (1e-6, "us"))
    line = f"{_digits(seconds / factor, 3)} {unit}"
    line += "" if peak is None else f", {_digits(peak / _MIB, 2)} MiB"
    time, memory = row["time_over_plain"], row["memory_over_plain"]
    if row["implementation"] == PLAIN or time is None:
        return line
    compared = [_times(time, "faster", "slower", "as fast")]
    compared += [] if memory is None else [_times(memory, "less memory", "more memory", "as much memory")]
    conjunction = "as" if compared[-1].startswith("as ") else "than"
    return f"{line}: {', '.join(compared)} {conjunction} {PLAIN}"


def _digits(x: float, digits: int) -> str:
    """A number with at least this many digits, trailing zeros included: 1.00, 1.01."""
    decimals = max(0, digits - 1 - math.floor(math.log10(x))) if x > 0 else 0
    return f"{x:,.{decimals}f}"


def _times(ratio: float, below: str, above: str, same: str) -> str:
    """The ratio of our cost to another's in words: "1.6 x faster"."""
    if 0.95 < ratio < 1.05:
        return same
    return colored(f"{1 / ratio:.2g} x {below}", "green") if ratio < 1 else colored(f"{ratio:.2g} x {above}", "yellow")


def plot(record: dict[str, Any], path: Path) -> None:
    """Write a picture of time and, where measured, peak extra memory against b: log-log, one line per implementation.

    The dashed line is the time of ``8 b^2 d`` at the median matrix-product rate of the run: the limit.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    measured = [row for row in record["rows"] if row["status"] == "measured"]
    has_several = len({(row["variant"], row["width"]) for row in measured}) > 1
    # Draw no panel for memory if none was measured.
    titles = ("time, s", "peak extra memory, MiB")[: 2 if any(row["peak_extra_bytes"] for row in measured) else 1]
    figure = Figure(figsize=(5.5 * len(titles), 4.5), layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in measured:
        suffix = f", {row['variant']}, d = {row['width']}" if has_several else ""
        lines.setdefault(row["implementation"] + suffix, []).append(row)
    for label, rows in lines.items():
        style = "s-" if rows[0]["implementation"] == PLAIN else "o-"
        panels[0].plot([row["batch"] for row in rows], [row["seconds"]["median"] for row in rows], style, label=label)
        with_memory = [row for row in rows if row["peak_extra_bytes"]]
        for axes in panels[1:]:
            peaks = [row["peak_extra_bytes"] / _MIB for row in with_memory]
            axes.plot([row["batch"] for row in with_memory], peaks, style, label=label)
    for width in sorted({row["width"] for row in measured}):
        rows = [row for row in measured if row["width"] == width]
        rate = statistics.median(rate for row in rows for rate in row["matmul_gflops"])
        b = sorted({row["batch"] for row in rows})
        label = f"8 b² d at {rate:.0f} GFLOP/s (matmul)" + (f", d = {width}" if has_several else "")
        panels[0].plot(b, [8e-9 * n * n * width / rate for n in b], "k--", linewidth=1, label=label)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="batch b", ylabel=title)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
    machine = f"{record['environment']['device']} ({record['environment']['cpu']})"
    figure.suptitle(f"symmetric loss, forward and backward, {record['settings']['dtype']}, {machine}")
    figure.savefig(path, dpi=150)
