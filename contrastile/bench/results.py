"""The results of a sweep, as data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contrastile.bench.agreement import Agreement
from contrastile.bench.peers import PLAIN
from contrastile.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to measure: the options of ``contrastile bench``, with its defaults filled in."""

    backends: tuple[str, ...]
    batches: tuple[int, ...] = (4096, 8192)
    widths: tuple[int, ...] = (512,)
    variants: tuple[str, ...] = ("aligned",)
    dtype: str = "float32"
    scale: float = 100.0
    repeat: int = 5
    device: str = "cpu"
    workspace: int | None = None
    keep: int | None = None
    threads: int | None = None
    budget: float = 300.0
    memory: bool = True


@dataclass(slots=True)
class Measurement:
    """One implementation on one workload.

    Attributes:
        implementation: its name.
        workload: size and variant.
        reason: why it was not measured, or None.
        seconds: one per round.
        matmul: FLOP/s of the matrix products before and after each sample, averaged.
        matmul_side: side of those square products.
        peak_bytes: peak extra memory by allocations.
    """

    implementation: str
    workload: Workload
    reason: str | None = None
    seconds: list[float] = field(default_factory=list)
    matmul: list[float] = field(default_factory=list)
    matmul_side: int = 0
    peak_bytes: int | None = None

    @property
    def rate(self) -> float:
        """FLOP/s: ``8 b^2 d`` over the median time."""
        return self.workload.flops / statistics.median(self.seconds)

    @property
    def share(self) -> float:
        """Median over the rounds of the rate, as a share of the matrix-product rate beside it."""
        flops = self.workload.flops
        return statistics.median(flops / t / rate for t, rate in zip(self.seconds, self.matmul, strict=True))

    def times_of(self, other: Measurement | None) -> float | None:
        """Median over the rounds of this time / the other's in the same round; None without a measured other."""
        if other is None or not other.seconds or not self.seconds:
            return None
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))

    def bytes_of(self, other: Measurement | None) -> float | None:
        """This peak / the other's; None where either is not known."""
        if other is None or not other.peak_bytes or self.peak_bytes is None:
            return None
        return self.peak_bytes / other.peak_bytes


@dataclass(slots=True)
class Sweep:
    """All results.

    Attributes:
        settings: what was asked for.
        environment: machine and versions.
        agreements: each implementation compared with the oracle.
        rows: measured and skipped workloads.
        order: labels of the timed samples, in the order in which they were taken.
        interrupted: whether it was stopped early; unfinished rounds are left out.
    """

    settings: SweepSettings
    environment: dict[str, Any]
    agreements: list[Agreement] = field(default_factory=list)
    rows: list[Measurement] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    interrupted: bool = False

    def beside(self, row: Measurement) -> tuple[Measurement | None, Measurement | None]:
        """The plain loss on the same workload; the same implementation, aligned and without ids, at the same size."""
        found = {(each.implementation, each.workload): each for each in self.rows}
        aligned = Workload("aligned", row.workload.batch, row.workload.width)
        return found.get((PLAIN, row.workload)), found.get((row.implementation, aligned))


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, interpolated; all one value for a single sample."""
    lower, middle, upper = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return lower, middle, upper
