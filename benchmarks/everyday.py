"""Times what people call every day, beside plain PyTorch, eager and compiled: the losses at small and large sizes.

``python benchmarks/everyday.py`` uses one GPU, and with ``--device cpu`` OMP_NUM_THREADS threads of the host;
``torchrun --nproc-per-node 2 benchmarks/everyday.py`` compares the ranks' clip_loss with open_clip's local loss. A call
is an eager forward and backward, host time included; the calls of a row take turns. Run it after ``contrastile verify``
passed: it checks nothing. ``--out`` is the JSON that it writes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from harness.machine import facts  # noqa: E402
from harness.peers import PEERS, plain_info_nce, refusal  # noqa: E402
from harness.ranks import Ranks  # noqa: E402
from harness.record import compact, rounded, said  # noqa: E402
from harness.timing import attempt, elapsed  # noqa: E402

import contrastile  # noqa: E402
from contrastile.bench.peers import plain_loss  # noqa: E402

Loss = Callable[..., Any]
PLAIN, COMPILED = "plain", "compiled"


def plain_sigmoid(image: Any, text: Any, scale: Any) -> Any:
    """SigLIP's loss by the matrix of logits."""
    logits = scale * image @ text.T - 10.0
    signs = 2 * torch.eye(len(image), device=image.device, dtype=image.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(image)


def plain_nt_xent(first: Any, second: Any, scale: Any) -> Any:
    """SimCLR's loss by the matrix of logits."""
    views = torch.cat((first, second))
    logits = (scale * views @ views.T).fill_diagonal_(-torch.inf)
    b = len(first)
    return F.cross_entropy(logits, torch.arange(2 * b, device=views.device).roll(b))


def plain_sup_con(features: Any, labels: Any, scale: Any) -> Any:
    """SupCon's L_out by the matrix of logits."""
    logits = (scale * features @ features.T).fill_diagonal_(-torch.inf)
    log_p = F.log_softmax(logits, dim=1)
    same = (labels[:, None] == labels).fill_diagonal_(False)
    count = same.sum(1)
    return -(log_p.masked_fill(~same, 0).sum(1) / count.clamp(min=1)).sum() / (count > 0).sum()


PLAINS: dict[str, Loss] = {
    "clip_loss": plain_loss,
    "clip_loss ids": plain_loss,
    "info_nce": plain_info_nce,
    "sigmoid_loss": plain_sigmoid,
    "nt_xent": plain_nt_xent,
    "sup_con": plain_sup_con,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One call: features of ``b`` rows (of each view; per rank) and width ``d``."""

    loss: str
    dtype: str
    b: int
    d: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The row in words."""
        more = "".join(f" {name}={value}" for name, value in self.settings.items())
        return f"{self.loss} {self.dtype} b={self.b} d={self.d}{more}"


SMALL = (256, 1024, 4096)
ROWS = (
    *(Row("clip_loss", "bfloat16", b, 512) for b in (*SMALL, 8192, 16384, 32768, 65536)),
    *(Row("clip_loss", "float32", b, 512) for b in (*SMALL, 8192, 16384)),
    *(Row("clip_loss", "float32", b, 512, {"precision": p}) for b in (8192, 16384) for p in ("ieee", "split", "tf32")),
    *(Row("sigmoid_loss", "bfloat16", b, 768) for b in (256, 1024, 4096, 16384, 32768)),
    *(Row("nt_xent", "bfloat16", b, 128) for b in (256, 1024, 4096, 16384)),
    Row("nt_xent", "bfloat16", 32768, 512),
    *(Row("sup_con", "bfloat16", b, 128) for b in (256, 1024, 4096, 16384)),
    *(Row("info_nce", "bfloat16", b, 768) for b in (256, 4096, 16384)),
    *(Row("clip_loss ids", "bfloat16", b, 512) for b in (256, 4096, 16384)),
)
SEVERAL = tuple(Row("clip_loss", "bfloat16", b, 512) for b in (*SMALL, 8192, 16384, 32768))
CPU_ROWS = tuple(Row(name, "float32", b, 512) for name in PLAINS for b in (64, 256, 1024, 4096))


def inputs(row: Row, ranks: Ranks) -> tuple[list[Any], dict[str, Any]]:
    """What a row's loss takes, features and scale being leaves, and further arguments."""
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)

    def unit() -> Any:
        x = torch.randn(row.b, row.d, generator=generator, device=ranks.device)
        return F.normalize(x, dim=1).to(getattr(torch, row.dtype)).requires_grad_()

    scale = torch.tensor(10.0 if row.loss in ("nt_xent", "sup_con", "sigmoid_loss") else 100.0, device=ranks.device)
    labels = torch.randint(0, max(2, row.b // 16), (row.b,), generator=generator, device=ranks.device)
    scale.requires_grad_()
    if row.loss == "sup_con":
        return [unit(), labels, scale], {}
    return [unit(), unit(), scale], {"ids": labels} if row.loss == "clip_loss ids" else {}


def ours(row: Row, backend: str, group: Any = None) -> Loss:
    """A row's loss by the front door."""
    function = getattr(contrastile, row.loss.split()[0])
    settings = {"backend": backend, **row.settings, **({} if group is None else {"group": group})}
    if row.loss == "sigmoid_loss":
        return lambda *given, **more: function(*given, -10.0, **more, **settings)
    return lambda *given, **more: function(*given, **more, **settings)


def compiled(function: Loss) -> Loss:
    """Compiled for each size alone, as fast as the compiler can."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def implementations(row: Row, ranks: Ranks, backends: list[str]) -> dict[str, Loss]:
    """Everybody who computes a row, by name."""
    if ranks.size > 1:
        world = ranks.groups[ranks.size]
        found = {name: ours(row, name, world) for name in backends}
        for name, peer in PEERS.items():
            if name.startswith("open_clip"):
                loss, _ = refusal(peer, several=True, kind=ranks.kind)
                if loss is not None:
                    found[name] = loss
        return found
    plain = PLAINS[row.loss]
    return {**{name: ours(row, name) for name in backends}, PLAIN: plain, COMPILED: compiled(plain)}


def measure(row: Row, ranks: Ranks, contenders: dict[str, Loss], slot: float, rounds: int) -> list[dict[str, Any]]:
    """One record of each implementation."""
    given, more = inputs(row, ranks)
    leaves = [x for x in given if x.requires_grad]
    calls: dict[str, Callable[[], Any]] = {}
    found = []
    for name, loss in contenders.items():

        def step(loss: Loss = loss) -> Any:
            return torch.autograd.grad(loss(*given, **more), leaves)

        reason = attempt(ranks, step)
        if reason:
            found.append({"row": row.label, "name": name, "status": "skip", "reason": reason})
            continue
        for _ in range(4):  # an eager call is captured in a graph after a few
            step()
        calls[name] = step
    one = {name: elapsed(ranks, call, 2)[0] / 2e3 for name, call in calls.items()}
    count = {name: max(2, round(slot / max(seconds, 1e-6))) for name, seconds in one.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            whole, host = elapsed(ranks, calls[name], count[name])
            times[name].append((whole / count[name], host / count[name]))
    about = {"loss": row.loss, "dtype": row.dtype, "b": row.b, "d": row.d, "n": ranks.size, **row.settings}
    for name, samples in times.items():
        whole, host = zip(*samples, strict=True)
        found.append(
            {
                "row": row.label,
                "name": name,
                "status": "measured",
                **about,
                "median_ms": statistics.median(whole),
                "host_ms": statistics.median(host),
                "milliseconds": list(whole),
            }
        )
    return found


def main() -> int:
    """Run the command on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--backends", nargs="+", default=["auto", "triton", "cupy"], help="of the package (%(default)s)")
    add("--without", nargs="+", default=[], metavar="NAME", help="leave these out")
    add("--only", default="", metavar="WORD", help="rows whose label has this")
    add("--slot", type=float, default=0.06, help="seconds of a sample (%(default)s)")
    add("--rounds", type=int, default=5, help="samples of each (%(default)s)")
    add("--seconds", type=float, default=300, help="begin no row after this long (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--commit", help="what is measured, where there is no checkout")
    add("--out", type=Path, help="the JSON that it writes")
    given = parser.parse_args()
    ranks = Ranks.join(given.device)
    started = time.monotonic()
    data: dict[str, Any] = {"environment": facts(ranks, given.commit), "settings": {"slot": given.slot}, "rows": []}
    of_cpus = CPU_ROWS if ranks.size == 1 else CPU_ROWS[:1]
    of_gpus = ROWS if ranks.size == 1 else SEVERAL
    for row in of_cpus if given.device == "cpu" else of_gpus:
        if given.only not in row.label or ranks.share(time.monotonic() - started)[0] > given.seconds:
            continue
        gc.collect()
        if ranks.kind == "cuda":
            torch.cuda.empty_cache()
        try:
            contenders = implementations(row, ranks, given.backends)
            contenders = {name: loss for name, loss in contenders.items() if name not in given.without}
            rows = measure(row, ranks, contenders, given.slot, given.rounds)
        except torch.OutOfMemoryError as error:
            rows = [{"row": row.label, "name": "all", "status": "skip", "reason": said(error)}]
        data["rows"] += rows
        words = (f"{x['name']} {x['median_ms']:.3f} ({x['host_ms']:.2f})" for x in rows if x["status"] == "measured")
        ranks.say(f"{row.label}: {', '.join(words)}")
        for x in rows:
            if x["status"] == "skip":
                ranks.say(f"  {x['name']}: {x['reason']}")
        if given.out and ranks.rank == 0:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(compact(rounded(data)), encoding="utf-8")
    ranks.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
