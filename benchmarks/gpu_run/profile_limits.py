"""How near each kernel of a step comes to its own limit: products, special functions or bytes, whichever is largest.

* products: the FLOPs that a kernel holds, from the sizes of the step, at the rate of cuBLAS 8192^3 beside it;
* special functions: the instructions that ncu counted, 32 results each, at SPECIAL results a multiprocessor and cycle;
* bytes: what ncu counted at the device's memory, at the rate of a large copy beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
SPECIAL = 16
"""Results of the special function units, exponentials among them, a cycle and multiprocessor (Hopper)."""

PRODUCTS = {"lse_tiles": 1, "gradient_tiles": 1, "sigmoid_tiles": 1, "add_product": 2} | {
    f"{name}_{family}": 1 for name in ("forward", "gradient", "sigmoid") for family in ("sm90", "sm80")
}
PRODUCTS |= {"forward_keeping_sm90": 1, "weighted_sm90": 2}
"""Kernels that hold some of a step's products, and how many; of cuBLAS's each holds one."""

IMPOSSIBLE = 4.0
"""A kernel that many times as fast as its products at the rate of cuBLAS has returned at once: another did the work."""

FACTORS = {"ieee": (1, 1), "tf32": (1, 3), "split": (6, 6)}
"""Products of tensor cores for one product, by precision: in our kernels, in cuBLAS's."""


@dataclass(frozen=True, slots=True)
class Line:
    """One kernel of one step; None is what the record does not tell.

    Attributes:
        kernel: its name.
        launches: in one call.
        ns: in one call, all launches.
        flops: of the products that it carries out.
        tensor: share of the cycles in which the tensor cores are busy.
        products: share that its products would take at the rate of cuBLAS.
        special: share that its special functions would take.
        bytes: share that its bytes would take.
    """

    kernel: str
    launches: int
    ns: float
    flops: float
    tensor: float | None
    products: float | None
    special: float | None
    bytes: float | None

    @property
    def limit(self) -> tuple[str, float] | None:
        """The name and the share of its own limit."""
        named = {"products": self.products, "special functions": self.special, "bytes": self.bytes}
        known = {name: share for name, share in named.items() if share is not None}
        return max(known.items(), key=lambda each: each[1]) if known else None

    @property
    def left(self) -> float | None:
        """Nanoseconds above its own limit."""
        return None if self.limit is None else self.ns * max(0.0, 1 - self.limit[1])


def backends(data: Row) -> list[str]:
    """Backends in the record, in its order; records of one backend do not name it."""
    rows = [*data.get("times", []), *data.get("ncu", [])]
    return list(dict.fromkeys(row.get("backend", "triton") for row in rows))


def steps(data: Row, backend: str) -> list[str]:
    """Steps of a backend in the record, in its order."""
    return list(dict.fromkeys(row["step"] for part in ("times", "ncu") for row in _of(data, part, backend)))


def lines(data: Row, backend: str, step: str) -> list[Line]:
    """The kernels of a step, longest first; the time is ncu's where no profiler's is recorded."""
    times, counters = ({x["kernel"]: x for x in _of(data, part, backend, step)} for part in ("times", "ncu"))
    (rates,) = _of(data, "ceilings", backend, step) or ({},)
    units = data["environment"].get("multiprocessors")
    found = []
    for name, row in (times or counters).items():
        count, ns = counters.get(name), row["ns"]
        flops, kind = work(name, step)
        if rates.get(kind) and flops > IMPOSSIBLE * rates[kind] * ns:
            flops = 0.0
        found.append(
            Line(
                name,
                row["launches"],
                ns,
                flops,
                count["tensor"] / 100 if count else None,
                _share(flops, rates.get(kind), ns) if flops else None,
                _share(32 * count.get("xu", 0), SPECIAL * units, count["cycles"]) if count and units else None,
                _share(count["read"] + count["written"], rates.get("copy"), ns) if count else None,
            )
        )
    return sorted(found, key=lambda line: -line.ns)


def work(name: str, step: str) -> tuple[float, str]:
    """FLOPs of the products that a kernel carries out in a step, and the rate that they are held to."""
    b, d, _, dtype, precision, *_ = step.split(",")
    blas = name.startswith("cuBLAS ")
    products = 1 if blas else PRODUCTS.get(name, 0)
    kind = {"ieee": dtype, "split": "bfloat16", "tf32": "bfloat16" if blas else "tf32"}[precision]
    return 2.0 * int(b) ** 2 * int(d) * products * FACTORS[precision][int(blas)], kind


def whole(found: Sequence[Line]) -> Line:
    """All kernels of a step as one, each held to its own limit."""
    ns = sum(line.ns for line in found)

    def mean(name: str) -> float | None:
        known = [(line.ns, getattr(line, name)) for line in found if getattr(line, name) is not None]
        return sum(each * share for each, share in known) / ns if known and ns else None

    shares = (mean(name) for name in ("tensor", "products", "special", "bytes"))
    return Line("all", sum(x.launches for x in found), ns, sum(x.flops for x in found), *shares)


def _share(amount: float, rate: float | None, taken: float) -> float | None:
    return amount / rate / taken if rate and taken else None


def _of(data: Row, part: str, backend: str, step: str | None = None) -> list[Row]:
    rows = [row for row in data.get(part, []) if row.get("backend", "triton") == backend]
    return [row for row in rows if step in (None, row["step"])]
