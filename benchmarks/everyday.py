"""Times the losses on this machine, each implementation in turns with the others, and writes a record.

    python benchmarks/everyday.py --out docs/results/everyday_h200.json               # what people call every day
    python benchmarks/everyday.py --part steps peers --out docs/results/gpu_h200.json
    torchrun --nproc-per-node 4 benchmarks/everyday.py --part steps peers --out ...   # the same over all GPUs of a host
    python benchmarks/everyday.py --device cpu                                        # OMP_NUM_THREADS threads
    python scripts/make_pages.py                                                      # the pages, from the records

``everyday``   every loss beside plain PyTorch, eager and compiled; over ranks clip_loss beside open_clip's local loss
``steps``      our own clip_loss beside the ceiling, a large matrix product; over ranks by every exchange and number
``peers``      clip_loss beside the ceiling and public implementations; why one cannot be loaded is recorded

A call is an eager forward and backward, host time included. Our backends are held to the oracle first, on one process:
one that fails is not timed. The record is written after every row, and keeps what an earlier run of the same commit on
the same device found.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from harness import Call, Ranks, ceiling, facts, paired, write  # noqa: E402
from peers.timed import OPEN_CLIP, PLAINS, TIMED, Loss, compiled, load_loss  # noqa: E402

import contrastile  # noqa: E402
from contrastile.bench.agreement import check  # noqa: E402
from contrastile.bench.peers import COSINE  # noqa: E402
from contrastile.bench.peers import ours as implementation  # noqa: E402
from contrastile.bench.sweep import peak_extra  # noqa: E402
from contrastile.reporting import one_line  # noqa: E402

SAME = ("device", "commit", "torch", "ranks")
KEY = ("part", "row", "name", "n", "exchange")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One call to time: a loss of ``PLAINS``. Each view has b rows per rank, or b rows in all unless ``per_rank``."""

    loss: str
    dtype: str
    b: int
    d: int = 512
    settings: dict[str, Any] = field(default_factory=dict)
    scale: float = 100.0
    per_rank: bool = True

    @property
    def label(self) -> str:
        """The case in words."""
        words = "".join(f" {name}={value}" for name, value in self.settings.items())
        words += "" if self.per_rank else " in all"
        return f"{self.loss} {self.dtype} b={self.b} d={self.d}{words}"

    def rows(self, n: int) -> int:
        """The rows of one of n ranks."""
        return self.b if self.per_rank else self.b // n

    def flops(self, n: int) -> float:
        """Operations of each rank in the products of clip_loss: one forward, three backward (X again, dQ, dK)."""
        return 8.0 * self.rows(n) ** 2 * n * self.d


def _clip(b: int, d: int = 512, **fields: Any) -> Case:
    return Case("clip_loss", "bfloat16", b, d, **fields)


SMALL = (256, 1024, 4096)
EVERYDAY = (
    *(_clip(b) for b in (*SMALL, 8192, 16384, 32768, 65536)),
    *(Case("clip_loss", "float32", b) for b in (*SMALL, 8192, 16384)),
    *(
        Case("clip_loss", "float32", b, settings={"precision": p})
        for b in (8192, 16384)
        for p in ("ieee", "split", "tf32")
    ),
    *(Case("sigmoid_loss", "bfloat16", b, 768, scale=10.0) for b in (256, 1024, 4096, 16384, 32768)),
    *(Case("nt_xent", "bfloat16", b, 128, scale=10.0) for b in (256, 1024, 4096, 16384)),
    Case("nt_xent", "bfloat16", 32768, scale=10.0),
    *(Case("sup_con", "bfloat16", b, 128, scale=10.0) for b in (256, 1024, 4096, 16384)),
    *(Case("info_nce", "bfloat16", b, 768) for b in (256, 4096, 16384)),
    *(Case("clip_loss ids", "bfloat16", b) for b in (256, 4096, 16384)),
)
OF_RANKS = tuple(_clip(b) for b in (*SMALL, 8192, 16384, 32768))
OF_CPUS = tuple(Case(name, "float32", b) for name in PLAINS for b in (64, 256, 1024, 4096))
SCALING = (
    *(_clip(32768), _clip(65536, per_rank=False), _clip(262144, per_rank=False)),
    *(_clip(32768, 1024), _clip(131072, per_rank=False)),
    *(_clip(b) for b in (2048, 4096, 8192, 16384, 65536)),
)
BESIDE_PEERS = tuple(_clip(b, per_rank=False) for b in (65536, 32768, 8192, 131072, 262144))
PARTS = ("everyday", "steps", "peers")


def cases(part: str, kind: str, size: int) -> tuple[Case, ...]:
    """The cases of a part, the most telling first."""
    if part == "everyday":
        if size > 1:
            return OF_RANKS if kind == "cuda" else OF_CPUS[:1]
        return EVERYDAY if kind == "cuda" else OF_CPUS
    part_cases = BESIDE_PEERS if part == "peers" else SCALING
    return part_cases if kind == "cuda" else tuple(replace(case, dtype="float32") for case in part_cases)


def smoke(part_cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The same cases with a few rows, without duplicates."""
    return tuple({(small := replace(case, b=case.b // 1024 + 32, d=24)).label: small for case in part_cases}.values())


Job = tuple[str, str, int, Callable[[], Call] | None, str]
"""Name, exchange and number of ranks of one implementation; a function that makes its call, or None and the reason."""


def package_loss(case: Case, backend: str, **settings: Any) -> Loss:
    """A case's loss as a public function of the package."""
    bias = {"bias": -10.0} if case.loss == "sigmoid_loss" else {}
    return partial(getattr(contrastile, case.loss.split()[0]), backend=backend, **bias, **case.settings, **settings)


def jobs(part: str, case: Case, ranks: Ranks, backends: list[str]) -> Iterator[Job]:
    """Every implementation of a case."""
    size = ranks.size
    is_everyday, is_scaling = part == "everyday", part == "steps"
    rank_counts = list(ranks.groups) if is_scaling else [size]
    for name in backends:
        for n in rank_counts:
            exchanges = ["local"] if n == 1 else ["auto"] if is_everyday else ["auto", "ring", "gather"]
            if is_scaling and n not in (1, size):
                exchanges.remove("auto")
            for exchange in exchanges:
                settings = {} if n == 1 else {"group": ranks.groups[n], "exchange": exchange}
                make = partial(make_call, case, package_loss(case, name, **settings), ranks, n)
                yield name if is_everyday else f"contrastile {name}", exchange, n, make, ""
    if is_everyday and size == 1:
        torch._dynamo.reset()
        for name, loss in (("plain", PLAINS[case.loss]), ("compiled", compiled(PLAINS[case.loss]))):
            yield name, "local", 1, partial(make_call, case, loss, ranks, 1), ""
    for name, (places, _) in TIMED.items():
        is_peer = part == "peers" and (size == 1 or "ranks" in places)
        if is_peer or (is_everyday and size > 1 and name.startswith(OPEN_CLIP)):
            loss, reason = load_loss(name, several=size > 1, kind=ranks.kind)
            make = None if loss is None else partial(make_call, case, loss, ranks, size)
            yield name, "" if size > 1 else "local", size, make, reason


def inputs(case: Case, ranks: Ranks, n: int) -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments of a case's loss, whose features and scale are leaves, and its keyword arguments."""
    generator, b = torch.Generator(ranks.device).manual_seed(ranks.rank), case.rows(n)

    def unit() -> Any:
        return F.normalize(torch.randn(b, case.d, generator=generator, device=ranks.device), dim=1)

    def leaf(x: Any) -> Any:
        return x.to(getattr(torch, case.dtype)).requires_grad_()

    first = unit()
    second = F.normalize(COSINE * first + (1 - COSINE**2) ** 0.5 * unit(), dim=1)
    scale = torch.tensor(case.scale, device=ranks.device, requires_grad=True)
    labels = torch.randint(0, max(2, b // 16), (b,), generator=generator, device=ranks.device)
    if case.loss == "sup_con":
        return [leaf(first), labels, scale], {}
    return [leaf(first), leaf(second), scale], {"ids": labels} if case.loss == "clip_loss ids" else {}


def make_call(case: Case, loss: Loss, ranks: Ranks, n: int) -> Call:
    """The call to time: forward and backward."""
    arguments, keywords = inputs(case, ranks, n)
    leaves = [x for x in arguments if x.requires_grad]

    def step() -> Any:
        value = loss(*arguments, **keywords)
        return value.detach(), torch.autograd.grad(value, leaves)

    return step


class Run:
    """One machine's measurements; ``data`` is the record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started, self.ranks = args, time.monotonic(), Ranks.join(args.device)
        is_everyday = args.part == ["everyday"]
        slot = args.slot or (0.06 if is_everyday else 0.3)
        self.slot, self.ceiling = slot, (lambda: math.nan) if is_everyday else ceiling(self.ranks, slot)
        environment = facts(self.ranks, args.commit)
        self.data: dict[str, Any] = {"environment": environment, "settings": {"slot": slot}, "verify": [], "times": []}
        if args.out and args.out.exists():
            old = json.loads(args.out.read_text(encoding="utf-8"))
            if environment["commit"] and all(old["environment"].get(name) == environment.get(name) for name in SAME):
                self.data["times"] = old["times"]

    def verify(self) -> bool:
        """Compare our own backends with the oracle; one that fails is not timed."""
        dtype, all_agree = "bfloat16" if self.ranks.kind == "cuda" else "float32", True
        for name in [name for name in self.args.backends if name != "auto"]:
            row: Row = {"name": f"contrastile {name}", "dtype": dtype}
            try:
                report = check(implementation(name), dtype, self.ranks.kind, 100.0)
                row |= {"verdict": "pass" if report.agrees else "fail", "worst": report.ratio, "reason": report.reason}
            except Exception as error:  # a backend of another package may raise anything
                row |= {"verdict": "fail", "worst": None, "reason": one_line(error)[:200]}
            self.data["verify"].append(row)
            if self.ranks.failed("" if row["verdict"] == "pass" else row["reason"]):
                self.args.backends.remove(name)
                self.ranks.say(f"{name} is not timed: {row['reason']}")
                all_agree = False
        return all_agree

    def measure_parts(self) -> int:
        """Measure every part; 1 if one of our backends failed."""
        all_agree = self.verify()
        for part in self.args.part:
            part_cases = cases(part, self.ranks.kind, self.ranks.size)
            for case in smoke(part_cases) if self.args.smoke else part_cases:
                is_late = self.ranks.share(time.monotonic() - self.started)[0] > self.args.seconds
                if self.args.only not in case.label or is_late:
                    continue
                try:
                    self.record_rows(self.measure_case(part, case))
                except torch.OutOfMemoryError as error:
                    self.ranks.say(f"{case.label}: {one_line(error)[:200]}")
        self.ranks.leave()
        return 0 if all_agree else 1

    def measure_case(self, part: str, case: Case) -> list[Row]:
        """Measure a case: a row of each implementation."""
        gc.collect()
        if self.ranks.kind == "cuda":
            torch.cuda.empty_cache()
        rows, calls = list[Row](), dict[str, Call]()
        for name, exchange, n, make, reason in jobs(part, case, self.ranks, self.args.backends):
            if name in self.args.without:
                continue
            row_count = case.rows(n)
            row: Row = {"part": part, "row": case.label, "name": name, "exchange": exchange, "n": n}
            row |= {"loss": case.loss, "dtype": case.dtype, "rows": row_count, "d": case.d, **case.settings}
            row |= {"scale": case.scale, "what": "both", "graph": False, "each": case.per_rank}
            row["b"] = row_count if part == "everyday" else row_count * n
            rows.append(row)
            call = None
            try:
                call = make and make()
            except Exception as error:  # a peer may refuse the size, or fail to import
                reason = one_line(error)[:200]
            reason = self.ranks.failed(reason)
            if call is None or reason:
                row |= {"status": "skip", "reason": reason}
            else:
                calls[f"{name} {exchange} on {n}"] = call
        args = self.args
        samples = paired(self.ranks, calls, self.ceiling, self.slot, args.rounds, args.patience)
        for row in rows:
            label = f"{row['name']} {row['exchange']} on {row['n']}"
            row |= samples.get(label, {})
            limits = row.pop("ceiling_tflops", [])
            if part != "everyday" and limits:
                rates = [case.flops(row["n"]) / t * 1e-9 for t in row["milliseconds"]]
                row |= {"ceiling_tflops": limits, "fraction": [x / y for x, y in zip(rates, limits, strict=True)]}
                row["peak_bytes"] = int(max(self.ranks.share(peak_extra(calls[label], "torch", self.ranks.kind))))
        return rows

    def record_rows(self, rows: list[Row]) -> None:
        """Print rows, let them replace recorded rows of the same key, and write the file; a skip replaces nothing."""
        timings = (
            f"{x['name']} {x['exchange']} {statistics.median(x['milliseconds']):.3f}" for x in rows if "calls" in x
        )
        self.ranks.say(f"{rows[0]['row']}: {', '.join(timings)}" if rows else "no implementation")
        for row in rows:
            if row["status"] == "skip":
                self.ranks.say(f"  {row['name']}: {row['reason']}")
            replaced = [x for x in self.data["times"] if all(x.get(name) == row[name] for name in KEY)]
            if row["status"] == "measured" or not replaced:
                self.data["times"] = [*(x for x in self.data["times"] if x not in replaced), row]
        write(self.args.out if self.ranks.rank == 0 else None, self.data)


def main(arguments: list[str] | None = None) -> int:
    """Run the command on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=["everyday"], help="what to time (%(default)s)")
    add("--backends", nargs="+", default=["auto", "triton", "cupy"], help="of the package (%(default)s)")
    add("--without", nargs="+", default=[], metavar="NAME", help="leave these out")
    add("--only", default="", metavar="WORD", help="cases whose label has this")
    add("--slot", type=float, help="seconds of a sample (0.06; beside the ceiling 0.3)")
    add("--rounds", type=int, default=5, help="samples of each (%(default)s)")
    add("--patience", type=float, default=5.0, help="leave out what takes longer than so many seconds (%(default)s)")
    add("--seconds", type=float, default=300, help="begin no case after this long (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--smoke", action="store_true", help="a few rows of features: it runs, and its numbers mean nothing")
    add("--commit", help="what is measured, where there is no checkout")
    add("--out", type=Path, help="the JSON that it writes")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/everyday.py: torch sees no GPU; --device cpu runs without", file=sys.stderr)
        return 2
    return Run(args).measure_parts()


if __name__ == "__main__":
    sys.exit(main())
