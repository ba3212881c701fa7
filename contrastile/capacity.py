"""``contrastile plan``: the memory of a batch on each GPU, for the loss and for the encoders, and how to make it fit.

The command computes and allocates nothing. The functions that choose the backend, the exchange and the sizes of chunks
and blocks of a call choose them here too. Bytes are the sum of the schedules' matrices and the backends' ``footprint``.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from contrastile.backends.arrays import FLOATS, ITEMSIZE
from contrastile.backends.choice import choose
from contrastile.backends.contract import Backend, BackendUnavailableError, Footprint, Options, state_dtype
from contrastile.backends.registry import load
from contrastile.backends.settings import is_keep_given
from contrastile.reporting import CannotRunError, cannot_run, colored, plain_table, within, write_json
from contrastile.schedules import timing
from contrastile.schedules.placement import SCHEDULES, Shards
from contrastile.schedules.problem import BLOCK
from contrastile.schedules.timing import Machine, Ranks, choose_exchange

MIB = 2**20
PLANNED = 0.9
"""The share of a device's memory to plan with: its libraries and its allocator keep the rest."""

_RANGES: dict[str, tuple[float, float]] = {
    "batch": (1, 2**40),
    "dim": (1, 2**40),
    "gpus": (1, 2**20),
    "encoder_mib_per_sample": (0, 1e9),
    "model_gib": (0, 1e9),
    "memory_gib": (0.001, 1e9),
    "per_host": (1, 2**20),
    "tflops": (0.001, 1e9),
    "gbs_inside": (0.001, 1e9),
    "gbs_across": (0.001, 1e9),
    "host_ms": (0, 1e9),
}
"""The smallest and the largest value of each option, within which every sum of bytes can be printed."""

_MACHINE = {
    "tflops": "TFLOP/s of a GPU, as it computes the loss alone",
    "gbs_inside": "GB/s of a GPU to its host's others",
    "gbs_across": "GB/s of a GPU to other hosts",
    "host_ms": "ms in which the host queues a block, 0 in a CUDA graph",
}
"""The assumptions of the model of time, by the names of ``Machine``'s fields."""

_NUMBERS = 28
"""Bytes of numbers per row or column: N and P in float64, a weight, a target and a positive."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What to train, with the options of ``add_arguments``, and the assumptions of the model of time."""

    batch: int
    dim: int
    gpus: int = 1
    dtype: str = "bfloat16"
    encoder_mib_per_sample: float = 0.0
    model_gib: float = 0.0
    memory_gib: float = 80.0
    backend: str = "auto"
    device: str = "cuda"
    per_host: int | None = None
    machine: Machine = field(default_factory=Machine)

    @property
    def hosts(self) -> int:
        """The number of hosts that hold the GPUs."""
        return -(-self.gpus // min(self.gpus, self.per_host or self.gpus))

    @property
    def ranks(self) -> Ranks:
        """The ranks and their rows, for the model of time."""
        return Ranks(self.hosts, -(-self.gpus // self.hosts), self.rows, self.dim, ITEMSIZE[self.dtype])

    @property
    def rows(self) -> int:
        """The largest number of pairs on a GPU."""
        return -(-self.batch // self.gpus)


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory: its purpose, its bytes on each GPU, and their origin."""

    what: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the step: the samples that it encodes at a time, and the memory on each GPU at its peak."""

    name: str
    bytes: int
    fits: bool
    chunk: int
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time and memory of the loss and its gradients with an exchange, by the model of ``schedules.timing``.

    Attributes:
        share: the share of the step's time that matrix products take.
        bytes: bytes on each GPU, beyond the embeddings.
        hidden_from: the smallest batch whose products take ``timing.HIDDEN`` of the step; None if there is none.
    """

    exchange: str
    seconds: float
    share: float
    bytes: int
    hidden_from: int | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer of ``contrastile plan``.

    Attributes:
        exchange: "local", or one of ``placement.SCHEDULES``; ``reason`` says why.
        loss: the memory of the loss and its gradients, beyond the embeddings.
        ways: the step with all activations, in chunks, and in chunks with the embeddings on the host.
        estimates: the estimate of each exchange; empty for one GPU.
    """

    backend: str
    exchange: str
    reason: str
    loss: tuple[Item, ...]
    ways: tuple[Way, ...]
    estimates: tuple[Estimate, ...] = ()

    @property
    def best(self) -> Way | None:
        """The first way that fits."""
        return next((way for way in self.ways if way.fits), None)


def total(items: Sequence[Item]) -> int:
    """The sum of the items' bytes."""
    return sum(item.bytes for item in items)


def capacity(setup: Setup) -> Capacity:
    """Plan a setup: its backend, its exchange, and the ways to run the step.

    Raises:
        ValueError, BackendUnavailableError, TypeError: see ``registry.load``.
        CannotRunError: the backend has no ``footprint``.
    """
    name = setup.backend
    if name == "auto":
        name = choose("torch", setup.device, setup.dtype)
    backend = load(name)
    backend.check_device(setup.device)
    backend.check_dtype(setup.dtype)
    exchange, reason = "local", "one GPU exchanges nothing"
    if setup.gpus > 1:
        rows = tuple(len(range(rank, setup.batch, setup.gpus)) for rank in range(setup.gpus))
        shards, on_gpus = Shards(rows, tuple((m,) for m in rows)), setup.device == "cuda"
        per_host = setup.ranks.per_host
        hosts = tuple(tuple(range(r, min(r + per_host, setup.gpus))) for r in range(0, setup.gpus, per_host))
        choice = choose_exchange(shards, setup.dim, ITEMSIZE[setup.dtype], on_gpus=on_gpus, hosts=hosts)
        exchange, reason = choice.exchange, f"exchange {choice.exchange}: {choice.reason}"
    loss = loss_items(setup, backend, exchange)
    ways = tuple(_ways(setup, backend, exchange, loss))
    return Capacity(name, exchange, reason, loss, ways, tuple(estimates(setup, backend)))


def estimates(setup: Setup, backend: Backend) -> Iterator[Estimate]:
    """The estimate of every exchange that these GPUs can use."""
    ranks, on_gpus = setup.ranks, setup.device == "cuda"
    machine = timing.replaying(setup.machine, setup.rows, setup.batch, setup.dim, on_gpus=on_gpus)
    for exchange in SCHEDULES:
        # two levels need several hosts with several ranks each
        if ranks.size > 1 and (exchange != "two-level" or 1 < ranks.hosts < ranks.size):
            rows = timing.hidden_from(exchange, ranks, machine)
            seconds, share = timing.seconds(exchange, ranks, machine), timing.share(exchange, ranks, machine)
            memory = total(loss_items(setup, backend, exchange))
            yield Estimate(exchange, seconds, share, memory, None if rows is None else rows * setup.gpus)


def loss_items(setup: Setup, backend: Backend, exchange: str) -> tuple[Item, ...]:
    """The memory of the symmetric loss and its gradients at their peak, beyond the embeddings."""
    dtype, d, b, g = setup.dtype, setup.dim, setup.rows, setup.gpus
    item, state = ITEMSIZE[dtype], ITEMSIZE[state_dtype(dtype)]
    if exchange == "replicate":
        # and the loss of the collected features; the gradients of this rank's rows are views of its gradients
        collected = Item("collected features", 2 * setup.batch * d * item, f"rows and columns of all {g} ranks")
        return collected, *loss_items(replace(setup, gpus=1), backend, "local")
    # columns at a time: those of all ranks, of one host, or of one rank
    h = setup.ranks.per_host
    n = {"gather": b * g, "two-level": b * h}.get(exchange, b)
    kept_bytes, is_passed_around = 0, exchange in ("ring", "two-level")
    options = Options(precision=backend.auto_precision, keep=0 if is_passed_around else None)
    footprint = _footprint(setup, backend, b, n, options)
    numbers = Item("log-sum-exps", _NUMBERS * (b + n), "and weights and targets")
    if backend.keeps is not None and not is_passed_around:
        kept_bytes = backend.keeps(b, n, dtype, setup.device, options)
    kept_items = [Item("kept exponentials", kept_bytes, "see keep=")] if kept_bytes else []
    alive = [*kept_items]
    arriving: list[Item] = []
    if exchange == "ring":
        alive += [
            Item("shards", min(2, g - 1) * b * d * item, "columns of other ranks, here and arriving"),
            Item("columns' sums", 3 * b * d * state, "here, arriving, and sent"),
        ]
    elif exchange == "two-level":
        alive += [
            Item("shards", (2 * h + 1) * b * d * item, f"columns of hosts of {h} ranks, here and arriving"),
            Item("columns' sums", (3 * h + 1) * b * d * state, "here, sent, and of the host's other ranks"),
        ]
    else:
        alive.append(Item("columns' sums", n * d * state, f"{n:,} x {d}, {state_dtype(dtype)}"))
    if exchange == "gather":
        alive.append(Item("gathered columns", n * d * item, f"of all {g} ranks"))
        arriving.append(Item("arriving sums", b * (g - 1) * d * state, "of this rank's columns"))
    gradients = [Item(f"{side} gradient", b * d * item, f"{b:,} x {d}, {dtype}") for side in ("rows'", "columns'")]
    # sums in the features' own dtype become gradients in place
    cast_items = gradients if item < state else []
    if backend.finished is not None and not is_passed_around:
        alive.insert(0, gradients[0])
        # the columns' gradient reuses the workspace; kept exponentials reuse G's memory, unless they have their own
        workspace = footprint.finished - (0 if is_keep_given(options) and kept_bytes < 2 * b * n else kept_bytes)
        moments = [[Item("workspace", workspace, f"of {backend.name}")], [*arriving, *cast_items[1:]]]
    else:
        alive.insert(0, Item("rows' sums", b * d * state, f"{b:,} x {d}, {state_dtype(dtype)}"))
        moments = [
            [Item("workspace", footprint.gradients, f"of {backend.name}")],
            [Item("products", footprint.inner, "for the scale's gradient")],
            [*arriving, *cast_items],
        ]
    forward = [*kept_items, Item("workspace", footprint.lse, f"of {backend.name}, forward"), numbers]
    peaks: list[Sequence[Item]] = [forward, *([*alive, *moment, numbers] for moment in moments)]
    peak = max(peaks, key=total)
    return tuple(peak)


def _footprint(setup: Setup, backend: Backend, m: int, n: int, options: Options) -> Footprint:
    if backend.footprint is None:
        raise CannotRunError(f"the {backend.name} backend does not say what memory it takes; name another one")
    return backend.footprint(m, n, setup.dim, setup.dtype, setup.device, options)


def offloaded_items(setup: Setup, backend: Backend, block: int = BLOCK) -> tuple[Item, ...]:
    """The memory on the device for embeddings on the host with ``device=``: see ``schedules/blocked.py``."""
    dtype, d, b = setup.dtype, setup.dim, setup.batch
    item, state = ITEMSIZE[dtype], ITEMSIZE[state_dtype(dtype)]
    if b <= block:
        # one block: the loss without blocks, on a copy of the embeddings
        return Item("embeddings", 2 * b * d * item, "copied for the loss"), *loss_items(setup, backend, "local")
    footprint = _footprint(setup, backend, block, block, Options(precision=backend.auto_precision))
    # sums in the features' own dtype become gradients in place, and on a CPU nothing is copied
    is_copied = item < state and setup.device == "cuda"
    copied_gradients = [Item("gradients", 2 * block * d * item, "on their way to the host")] if is_copied else []
    return (
        Item("blocks of features", 4 * block * d * item, f"two of rows, two of columns, {block:,} each"),
        Item("their sums", 3 * block * d * state, "of one block of rows, two of columns"),
        *copied_gradients,
        Item("workspace", max(footprint.lse, footprint.gradients, footprint.inner), f"of {backend.name}"),
        Item("log-sum-exps", 2 * b * _NUMBERS, "and weights and targets"),
    )


def _ways(setup: Setup, backend: Backend, exchange: str, loss: Sequence[Item]) -> list[Way]:
    rows, memory = setup.rows, int(setup.memory_gib * 2**30 * PLANNED)
    sample = int(setup.encoder_mib_per_sample * MIB)
    width = rows * setup.dim * ITEMSIZE[setup.dtype]
    model = Item("model", int(setup.model_gib * 2**30), "weights, gradients, optimizer")
    embeddings = Item("embeddings", 2 * width, f"2 x {rows:,} x {setup.dim}, {setup.dtype}")
    gradients = Item("their gradients", 2 * width, "kept for the second pass")
    if exchange == "replicate":
        all_gradients = 2 * setup.batch * setup.dim * ITEMSIZE[setup.dtype]
        gradients = Item("their gradients", all_gradients, "views of all ranks', kept for the second pass")

    def encoder(chunk: int) -> Item:
        return Item("encoder", chunk * sample, f"{chunk:,} samples x {setup.encoder_mib_per_sample:g} MiB")

    def chunk_beside(items: Sequence[Item]) -> int:
        """The largest power of two whose activations fit beside the items, at most all rows; at least 1."""
        room = (memory - total(items)) // max(1, sample)
        return rows if room >= rows else 1 << (max(1, room).bit_length() - 1)

    def way(name: str, chunk: int, *moments: Sequence[Item]) -> Way:
        items = tuple(x for x in max(moments, key=total) if x.bytes)
        return Way(name, total(items), total(items) <= memory, chunk, items)

    def cached(chunk: int, *more: str) -> str:
        return f"cached_step({', '.join((f'chunk={chunk}', *more))})"

    ways = [way("a step with all activations", rows, [model, embeddings, *loss, encoder(rows)])]
    second_pass = [model, embeddings, gradients]
    chunk = chunk_beside(second_pass)
    ways.append(way(cached(chunk), chunk, [model, embeddings, *loss], [*second_pass, encoder(chunk)]))
    if setup.gpus == 1:
        offloaded = offloaded_items(setup, backend)
        chunk = chunk_beside([model])
        ways.append(way(cached(chunk, "offload=True"), chunk, [model, *offloaded], [model, encoder(chunk)]))
    return ways


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``contrastile plan``."""
    add = parser.add_argument
    add("--batch", type=int, required=True, metavar="B", help="pairs, of all GPUs together")
    add("--dim", "--width", type=int, required=True, metavar="D", help="width of the embeddings")
    add("--gpus", type=int, default=1, metavar="N", help="ranks, one GPU each (%(default)s)")
    add("--per-host", type=int, metavar="N", help="GPUs of a host (all)")
    for name, meaning in _MACHINE.items():
        default = getattr(Machine(), name)
        add(f"--{name.replace('_', '-')}", type=float, default=default, metavar="X", help=f"{meaning} (%(default)g)")
    add("--dtype", choices=sorted(FLOATS), default="bfloat16", help="of the embeddings (%(default)s)")
    add(
        "--encoder-mib-per-sample",
        type=float,
        default=0.0,
        metavar="MIB",
        help="what the encoders keep of one pair between forward and backward (%(default)s)",
    )
    add("--model-gib", type=float, default=0.0, metavar="GIB", help="weights, gradients, optimizer (%(default)s)")
    add("--memory-gib", type=float, metavar="GIB", help="of each GPU (what this machine's has)")
    add(
        "--backend",
        default="auto",
        metavar="NAME",
        help="auto, numpy, torch, triton, cupy or module:attribute (%(default)s)",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where the loss is computed (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the answer")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile plan``.

    Returns:
        0 if some way fits, 1 if no way fits, 2 if an option is wrong or the backend's memory is unknown.
    """
    try:
        for option, (least, most) in _RANGES.items():
            if (value := getattr(args, option)) is not None:
                within(option.replace("_", "-"), value, least, most)
        memory = _memory(args.device) if args.memory_gib is None else args.memory_gib
        machine = Machine(**{name: getattr(args, name) for name in _MACHINE})
        values = {setting.name: getattr(args, setting.name) for setting in fields(Setup) if setting.name != "machine"}
        setup = Setup(**values | {"memory_gib": memory, "machine": machine})
        answer = capacity(setup)
        if args.json:
            best, content = answer.best, {"setup": asdict(setup), **asdict(answer), "loss_bytes": total(answer.loss)}
            write_json(args.json, content | {"fits": best is not None, "best": best and best.name})
    except (CannotRunError, BackendUnavailableError, ValueError, TypeError) as error:
        return cannot_run("plan", error)
    print(report(setup, answer))
    return 0 if answer.best else 1


def _memory(device: str) -> float:
    """GiB of this machine's device."""
    from contrastile.environment import available_bytes, torch_gpus

    if device == "cuda" and not torch_gpus():
        raise CannotRunError("torch sees no GPU to read the memory from; give --memory-gib, e.g. --memory-gib 80")
    available = available_bytes(device)
    if available is None:
        raise CannotRunError("the memory cannot be read here; give --memory-gib")
    return available / 2**30


def report(setup: Setup, answer: Capacity) -> str:
    """The answer in words and tables, 80 columns wide."""
    per_gpu = "" if setup.gpus == 1 else f", {setup.rows:,} on each of {setup.gpus} GPUs"
    warning = "the loss alone: with --encoder-mib-per-sample, the encoders are planned too"
    lines = [
        *([] if setup.encoder_mib_per_sample else [colored(warning, "yellow"), ""]),
        f"{setup.batch:,} pairs of {setup.dim} {setup.dtype}{per_gpu}, {PLANNED:.0%} of {setup.memory_gib:,.1f} GiB",
        *textwrap.wrap(f"backend {answer.backend}; {answer.reason}", 80),
        "",
        _table("The loss, beyond the embeddings", answer.loss),
    ]
    best = answer.best
    for way in answer.ways[: None if best is None else answer.ways.index(best)]:
        lines += ["", f"{way.name}: {colored('does not fit', 'red')}, {way.bytes / MIB:,.1f} MiB"]
    if best is not None:
        lines += ["", _table(f"{best.name}: {colored('fits', 'green')}", best.items)]
    if answer.estimates:
        lines += ["", *_exchange_lines(setup, answer.estimates)]
    advice = "nothing fits: use more GPUs, a smaller batch or a smaller model" if best is None else f"take {best.name}"
    return "\n".join([*lines, "", advice])


def _exchange_lines(setup: Setup, estimates: Sequence[Estimate]) -> list[str]:
    """A table of the estimates, and the assumptions of the model."""
    assumed = "; ".join(f"{getattr(setup.machine, name):g} {meaning}" for name, meaning in _MACHINE.items())
    rows = [
        (
            estimate.exchange,
            f"{1e3 * estimate.seconds:,.2f}",
            f"{estimate.share:.0%}",
            f"{estimate.bytes / MIB:,.1f}",
            "never" if estimate.hidden_from is None else f"{estimate.hidden_from:,}",
        )
        for estimate in estimates
    ]
    columns = "exchange", "ms a step", "products", "MiB", f"products {timing.HIDDEN:.0%} from"
    title = f"Each exchange, by a model with {setup.ranks.per_host} GPUs per host"
    return [plain_table(title, columns, rows, right=(1, 2, 3, 4)), *textwrap.wrap(f"Assumed: {assumed}.", 80)]


def _table(title: str, items: Sequence[Item]) -> str:
    rows = [(item.what, f"{item.bytes / MIB:,.1f}", item.why) for item in items]
    rows.append(("in all", f"{total(items) / MIB:,.1f}", ""))
    return plain_table(title, ("on each GPU", "MiB", "what it is"), rows, right=(1,))
