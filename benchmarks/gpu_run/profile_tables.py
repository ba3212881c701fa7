"""The tables of the profiled part of docs/performance.md."""

from __future__ import annotations

from typing import Any

from pages import noted, titled, versions, when

from gpu_run import profile_limits
from gpu_run.profile_limits import Line
from gpu_run.tables import number, table

Row = dict[str, Any]
NAMES = {"triton": "triton", "cupy": "cupy", "ampere": "cupy, sm_80 kernels", "keeping": "cupy, keeping 2 GiB"}
LEAST_SHARE = 0.002
"""Kernels that take less of their step's time are counted together, if an earlier step has shown them."""

_TRANSPOSED = {"NN": "dQ", "NT": "dK"}


def counted(rows: list[Row]) -> list[Row]:
    """One row for each backend, dtype and precision verified: how many passed, failed, were skipped, and the worst."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.get("backend", "triton"), row["dtype"]
        empty = {"backend": key[0], "dtype": key[1], "pass": 0, "fail": 0, "skip": 0, "worst": 0.0}
        one = found.setdefault(key, empty)
        one[row["status"]] += 1
        if row["ratio"] is not None:
            one["worst"] = max(one["worst"], row["ratio"])
    return list(found.values())


def beside(rows: list[Row]) -> list[Row]:
    """One row for each backend, property and case: error / bound by dtype, or "skip", or "fail" and the ratio."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        about = {name: row[name] for name in ("backend", "property", "case") if name in row}
        one = found.setdefault(tuple(about.values()), about)
        ratio = None if row["ratio"] is None else float(f"{row['ratio']:.3g}")
        one[row["dtype"]] = {"pass": ratio, "skip": "skip"}.get(row["status"], f"{row['status']} {ratio}")
    return list(found.values())


def section(data: Row) -> str:
    """Everything that one record shows."""
    e = data["environment"]
    known = when(e), versions(e, ("torch", "triton", "cupy-cuda13x"))
    about = noted(", ".join(filter(None, known)) + ".", e)
    parts = [
        *((f"Kernels of a step: {_name(x)}", kernels(data, x)) for x in profile_limits.backends(data)),
        ("What kernels are held to", ceilings(data.get("ceilings", []))),
        ("Verified in every dtype and precision", verified(data.get("verify", []))),
        ("Sanitizers", sanitizers(data.get("sanitizer", []))),
        ("First call", compiled(data.get("compile", []))),
    ]
    return "\n\n".join([titled(f"{e['device']}, profiled", e), about, *(f"#### {t}\n\n{x}" for t, x in parts if x)])


def _name(backend: str) -> str:
    return NAMES.get(backend, backend)


def _step(step: str) -> str:
    b, d, scale, dtype, precision, *loss = step.split(",")
    kind = dtype if precision == "ieee" else f"{dtype}/{precision}"
    return ", ".join((f"b = {int(b):,}, d = {d}, scale {scale}, {kind}", *loss))


def kernels(data: Row, backend: str) -> str:
    """Each kernel of each step: time, tensor cores, the shares of its three limits, and what it takes above them."""
    head = ["step", "kernel", "launches", "time, us", "of the step", "TFLOP/s of its products", "tensor cores busy"]
    head += ["products", "special functions", "bytes", "left, us"]
    rows: list[list[str]] = []
    shown: set[str] = set()
    for step in profile_limits.steps(data, backend):
        found = profile_limits.lines(data, backend, step)
        step_ns = sum(line.ns for line in found)
        small = [line for line in found if line.ns < LEAST_SHARE * step_ns and line.kernel in shown]
        shown |= {line.kernel for line in found}
        for line in found:
            if line not in small:
                rows.append([_step(step), _label(line.kernel), *_figures(line, step_ns)])
        if small:
            rows.append([_step(step), f"{len(small)} others", *_figures(profile_limits.whole(small), step_ns)[:3]])
            rows[-1] += ["-"] * (len(head) - len(rows[-1]))
        total = _figures(profile_limits.whole(found), step_ns)
        total[-1] = _microseconds(sum(line.left or 0.0 for line in found)) if any(x.limit for x in found) else "-"
        rows.append([_step(step), "**all**", *total])
    told = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    return table([head[i] for i in told], [[row[i] for i in told] for row in rows])


def _label(kernel: str) -> str:
    of = _TRANSPOSED.get(kernel.removeprefix("cuBLAS ")[:2]) if kernel.startswith("cuBLAS ") else None
    return f"`{kernel}`, {of}" if of else f"`{kernel}`"


def _figures(line: Line, step_ns: float) -> list[str]:
    """Launches, time, its share, rate, tensor cores, three limits of which the largest is marked, what is left."""
    limit = line.limit
    shares = []
    for name, share in (("products", line.products), ("special functions", line.special), ("bytes", line.bytes)):
        text = "-" if share is None else _percent(share)
        shares.append(f"**{text}**" if limit and limit[0] == name and share is not None else text)
    rate = number(line.flops / line.ns * 1e-3) if line.flops else "-"
    tensor = "-" if line.tensor is None else _percent(line.tensor)
    taken = [str(line.launches), _microseconds(line.ns), f"{100 * line.ns / step_ns:.1f} %"]
    return [*taken, rate, tensor, *shares, "-" if line.left is None else _microseconds(line.left)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _microseconds(ns: float) -> str:
    return number(ns / 1e3)


def ceilings(rows: list[Row]) -> str:
    """The rates measured beside each step."""
    head = ("backend", "step", "cuBLAS 8192³ bfloat16, TFLOP/s", "tf32, TFLOP/s", "copy, TB/s")
    lines = []
    for row in rows:
        rates = [row["bfloat16"] / 1e3, row["tf32"] / 1e3 if "tf32" in row else None, row["copy"] / 1e3]
        lines.append([_name(row["backend"]), _step(row["step"]), *map(number, rates)])
    return table(head, lines)


def verified(rows: list[Row]) -> str:
    """Counts and the largest error in bounds."""
    head = ("backend", "dtype", "passed", "failed", "skipped", "largest error / bound")
    names = ("pass", "fail", "skip")
    lines = [
        [_name(row.get("backend", "triton")), row["dtype"], *(str(row[x]) for x in names), number(row["worst"])]
        for row in rows
    ]
    return table(head, lines)


def sanitizers(rows: list[Row]) -> str:
    """What each tool found in our kernels and in others', and the verdict of what ran under it."""
    head = ["backend", "tool", "under it", "clean", "in our kernels", "elsewhere", "no place told", "its summary"]
    head.append("verdict")
    lines = []
    for row in rows:
        others = {name: count for kind in ("others", "elsewhere") for name, count in row[kind].items()}
        lost = f"{row['lost']:,}" if row.get("lost") else "none"
        clean = "yes" if row["clean"] else "**no**"
        found = [_found(row["own"]), _found(others), lost, row["summary"], row["verify"].partition(";")[0]]
        lines.append([_name(row["backend"]), row["tool"], row["what"], clean, *found])
    return table(head, lines)


def _found(kernels: dict[str, int]) -> str:
    return ", ".join(f"`{name}`: {count:,}" for name, count in kernels.items()) or "nothing"


def compiled(rows: list[Row]) -> str:
    """Seconds of the first call."""
    names = ("compiled", "from_disk", "warm")
    head = ("step", "compiling all, s", "compiled before, s", "third call, s")
    return table(head, [[_step(row["step"]), *(number(row[x]) for x in names)] for row in rows])
