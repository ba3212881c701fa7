"""The tables of the profiled part of docs/performance.md."""

from __future__ import annotations

from typing import Any

from gpu_run.tables import number, table

Row = dict[str, Any]
PRODUCTS = {"lse_tiles": 1, "gradient_tiles": 1, "cuBLAS NTN": 1, "cuBLAS NNT": 1, "add_product": 2}
"""Kernels that hold some of the four products, and how many; dQ is cuBLAS's NNT, dK its NTN, add_product both."""

LEAST_SHARE = 0.002
"""Kernels that take less of their step's time are left out of the table, and counted together below it."""


def counted(rows: list[Row]) -> list[Row]:
    """One row for each dtype and precision of a verification: how many passed, failed, were skipped, and the worst."""
    found: dict[str, Row] = {}
    for row in rows:
        one = found.setdefault(row["dtype"], {"dtype": row["dtype"], "pass": 0, "fail": 0, "skip": 0, "worst": 0.0})
        one[row["status"]] += 1
        if row["ratio"] is not None:
            one["worst"] = max(one["worst"], row["ratio"])
    return list(found.values())


def beside(rows: list[Row]) -> list[Row]:
    """One row for each property and case: error / bound by dtype and precision, or "skip", or "fail" and the ratio."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        one = found.setdefault((row["property"], row["case"]), {"property": row["property"], "case": row["case"]})
        ratio = None if row["ratio"] is None else float(f"{row['ratio']:.3g}")
        one[row["dtype"]] = {"pass": ratio, "skip": "skip"}.get(row["status"], f"{row['status']} {ratio}")
    return list(found.values())


def section(data: Row) -> str:
    """Everything that one record shows."""
    e = data["environment"]
    commit = (e["commit"] or "unknown")[:12]
    about = f"{e['date'][:10]}, commit `{commit}`, torch {e['torch']}, triton {e['triton']}."
    if e.get("note"):
        about += f" {e['note']}"
    parts = [
        ("Time of each kernel of a step, by torch's profiler", times(data.get("times", []))),
        ("Kernels of a step, by ncu", kernels(data.get("ncu", []))),
        ("Verified in every dtype and precision", verified(data.get("verify", []))),
        ("Sanitizers over a small verify", sanitizers(data.get("sanitizer", []))),
        ("First call", compiled(data.get("compile", []))),
    ]
    return "\n\n".join([f"### {e['device']}, profiled", about, *(f"#### {t}\n\n{x}" for t, x in parts if x)])


def times(rows: list[Row]) -> str:
    """Time of each kernel, and the rate at which those that hold one of the four products get through it."""
    head = ("step", "kernel", "launches", "time, us", "of those listed", "its products, 2 b² d each, TFLOP/s")
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        own = sorted((row for row in rows if row["step"] == step), key=lambda row: -float(row["ns"]))
        whole = sum(row["ns"] for row in own)
        b, d = map(int, step.split(",")[:2])
        for row in own:
            products = PRODUCTS.get(row["kernel"], 0)
            rate = number(2 * products * b * b * d / row["ns"] * 1e-3) if products else "-"
            share = f"{100 * row['ns'] / whole:.1f} %"
            name = f"`{row['kernel']}`"
            lines.append([_step(step), name, str(row["launches"]), number(row["ns"] / 1e3), share, rate])
    return table(head, lines)


def _step(step: str) -> str:
    b, d, scale, dtype, precision = step.split(",")
    kind = dtype if precision == "ieee" else f"{dtype}/{precision}"
    return f"b = {int(b):,}, d = {d}, scale {scale}, {kind}"


def kernels(rows: list[Row]) -> str:
    """Time, cycles, shares of the peaks and bytes of each kernel of each step."""
    head = ("step", "kernel", "launches", "time, us", "of the step", "tensor cores busy", "special functions busy")
    head += ("instructions issued", "L2 hits", "read, MiB", "written, MiB")
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        own = sorted((row for row in rows if row["step"] == step), key=lambda row: -float(row["ns"]))
        whole = sum(row["ns"] for row in own)
        name = _step(step)
        small = [row for row in own if row["ns"] < LEAST_SHARE * whole]
        for row in own:
            if row in small:
                continue
            shares = [f"{row[key]:.0f} %" for key in ("tensor", "special", "issue", "l2_hit")]
            traffic = [number(row[key] / 2**20) for key in ("read", "written")]
            taken = [number(row["ns"] / 1e3), f"{100 * row['ns'] / whole:.1f} %"]
            lines.append([name, f"`{row['kernel']}`", str(row["launches"]), *taken, *shares, *traffic])
        if small:
            rest = [number(sum(row["ns"] for row in small) / 1e3)]
            rest.append(f"{100 * sum(row['ns'] for row in small) / whole:.1f} %")
            launches = str(sum(row["launches"] for row in small))
            lines.append([name, f"{len(small)} others", launches, *rest, *["-"] * 6])
    return table(head, lines)


def verified(rows: list[Row]) -> str:
    """Counts and the largest error in bounds."""
    head = ("dtype", "passed", "failed", "skipped", "largest error / bound")
    names = ("pass", "fail", "skip")
    return table(head, [[row["dtype"], *(str(row[x]) for x in names), number(row["worst"])] for row in rows])


def sanitizers(rows: list[Row]) -> str:
    """Each tool's own verdict."""
    lines = [[row["tool"], "yes" if row["clean"] else "**no**", row["summary"], row["verify"]] for row in rows]
    return table(("tool", "clean", "its summary", "verify under it"), lines)


def compiled(rows: list[Row]) -> str:
    """Seconds of the first call."""
    names = ("compiled", "from_disk", "warm")
    head = ("step", "compiling all, s", "compiled before, s", "third call, s")
    return table(head, [[row["step"].replace(",", ", "), *(number(row[x]) for x in names)] for row in rows])
