"""Cached steps under DDP and FSDP2: the gradients of the one global loss, and one reduction per step.

It prints the largest error of a parameter's gradient, relative to its norm, beside the whole batch in one process; all
in float64.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "comm" / "programs"))

import torch
import torch.distributed as dist
from engines import say
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import contrastile
from contrastile import training

UNUSED = {"find_unused_parameters": True}
SHARDS = {2: (9, 14), 3: (9, 0, 14)}
CHUNK, INPUTS, HIDDEN, WIDTH, SCALE = 4, 5, 7, 9, 10.0
calls: list[int] = []
"""One for each reduction."""


class Towers(nn.Module):
    """Features of both sides, and the scale of the logits, from parameters that training changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.image, self.text = (
            nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
            for _ in range(2)
        )
        # FSDP2 takes no parameters without an axis
        self.logit_scale = nn.Parameter(torch.zeros(1))
        self.double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        return self.image(images), self.text(texts), self.scale()

    def scale(self) -> Tensor:
        return SCALE * self.logit_scale.exp()


def clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The loss, as open_clip's own training makes it."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    made = contrastile.nn.ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, **place)
    loss = made(image, text, scale)
    assert isinstance(loss, Tensor)
    return loss


def given(rank: int) -> tuple[Tensor, Tensor]:
    """Images and texts of a rank."""
    draw = torch.Generator().manual_seed(rank)
    image, text = torch.randn(2, SHARDS[dist.get_world_size()][rank], INPUTS, dtype=torch.float64, generator=draw)
    return image, text


def expected() -> list[Tensor]:
    """The gradients of the whole batch in one process."""
    model, parts = Towers(), [given(rank) for rank in range(dist.get_world_size())]
    loss: Any = contrastile.clip_loss(*model(*map(torch.cat, zip(*parts, strict=True))))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def largest_error(found: list[Tensor], exact: list[Tensor]) -> float:
    # where nothing learns, 0 or infinite
    return max(
        0.0 if torch.equal(x, y) else ((x - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)
    )


def gradients(model: nn.Module) -> list[Tensor]:
    """Of the parameters of ``Towers``, in their order; whole where a trainer keeps them in shards."""
    named: dict[str, Any] = {name.removeprefix("module."): x.grad for name, x in model.named_parameters()}
    found = [named[name] for name, _ in Towers().named_parameters()]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]


def counted(model: DistributedDataParallel) -> DistributedDataParallel:
    """DDP, whose reductions are counted in ``calls``; it has one bucket here."""

    # DDP reads a hook's annotations: they must be types, and no text
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        calls.append(1)
        sent = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return sent.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    return model


def fsdp(model: Any, apart: bool = True) -> Any:
    """Sharded, and each tower by itself too where they are ``apart``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tower in (model.image, model.text) if apart else ():
        fully_shard(tower, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Dispatching(Towers):
    """Towers that one forward encodes one at a time, by a buffer that DDP broadcasts before it calls forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(64))

    def forward(self, **x: Tensor) -> Tensor:  # type: ignore[override]
        ((name, given),) = x.items()
        return {"image": self.image, "text": self.text}[name](given[self.order[: len(given)]])


def ddp(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    return counted(DistributedDataParallel(module, **settings))


def scale_of(model: nn.Module) -> Callable[[], Tensor]:
    """The scale, from outside of a forward."""
    inner: Any = getattr(model, "module", model)
    return lambda: SCALE * inner.logit_scale.exp()


def towers(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], ...]:
    return (lambda x: model(image=x)), (lambda x: model(text=x))


def stepped(model: nn.Module, encode: Any, inputs: Any, *, times: int = 1, **how: Any) -> nn.Module:
    """A model after cached steps; the second comes after DDP has rebuilt its buckets and broadcast its buffers."""
    for _ in range(times):
        calls.clear()
        model.zero_grad()
        training.cached_step(encode, inputs, clip, chunk=CHUNK, **how)
    return model


def apart(inputs: Any, **settings: Any) -> nn.Module:
    """One module that is called for each tower, and the scale from outside of its forward."""
    model = ddp(Dispatching(), **settings)
    return stepped(model, towers(model), inputs, times=2, scale=scale_of(model))


def by_hand_apart(inputs: Any) -> nn.Module:
    """The two passes, with a scale that learns in the caller's own backward, before DDP listens."""
    model = ddp(Dispatching())
    outputs, replay = training.embed(towers(model), inputs, CHUNK)
    clip(*outputs, scale_of(model)()).backward()
    replay()
    return model


class Wider(Towers):
    """A parameter of these is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def unused(inputs: Any) -> nn.Module:
    model = ddp(Wider(), **UNUSED)
    stepped(model, model, inputs)
    assert model.module.extra.grad is None
    return model


class Ending(Towers):
    """Nothing learns in a chunk without samples."""

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        found = super().forward(images, texts)[:2]
        return found if len(images) else tuple(x.detach() for x in found)


def with_an_empty_chunk(x: Tensor, size: int) -> list[Tensor]:
    return [*x.split(size), x[:0]]


TRAINERS: dict[str, Callable[[Any], nn.Module]] = {
    "apart": apart,
    "by hand, apart": by_hand_apart,
    "one each": lambda x: stepped(model := Towers(), (ddp(model.image), ddp(model.text)), x, scale=scale_of(model)),
    "unused": unused,
    # DDP looks for unused parameters, and the scale is none that the last forward uses
    "unused outside": lambda x: stepped(
        model := ddp(Towers(), **UNUSED), lambda *y: model(*y)[:2], x, times=2, scale=scale_of(model)
    ),
    # it finds none in the last chunk; a rank without samples has no other chunk
    "last chunk frozen": lambda x: stepped(
        model := ddp(Ending(), **UNUSED), model, x, times=2, scale=scale_of(model), split=with_an_empty_chunk
    ),
    "unused apart": functools.partial(apart, **UNUSED),
    "bucket views": functools.partial(apart, gradient_as_bucket_view=True),
}


def frozen(which: str, inputs: Any, *, sharded: bool) -> float:
    """Called for each tower, of which one is frozen, first or last: one reduction, and the other's gradients."""
    module: Any = Dispatching()
    getattr(module, which).requires_grad_(False)
    scale: Any = SCALE if sharded else scale_of(module)
    model = fsdp(module, apart=False) if sharded else ddp(module)
    calls.clear()
    with counting() if sharded else nullcontext():
        training.cached_step(towers(model), inputs, clip, scale=scale, chunk=CHUNK)
    assert len(calls) == 1, calls
    for x in module.parameters():
        x.grad = torch.zeros_like(x) if x.grad is None else x.grad
    exact, found = expected(), gradients(model)
    for i, (name, _) in enumerate(Towers().named_parameters()):
        if name.startswith((which, *["logit"] * sharded)):
            # it does not learn
            exact[i].zero_()
    return largest_error(found, exact)


@contextmanager
def counting() -> Iterator[None]:
    """FSDP2's reductions, in ``calls``."""
    # torch before 2.13 calls the other
    collective = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    real = getattr(dist, collective)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    setattr(dist, collective, counting)
    try:
        yield
    finally:
        setattr(dist, collective, real)


def accumulated(inputs: Any) -> nn.Module:
    model = fsdp(Towers())
    with counting():
        training.cached_step(model, inputs, clip, chunk=CHUNK)
        once = len(calls)
        # again inside of the caller's own accumulation, and then out of it
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        training.cached_step(model, inputs, clip, chunk=CHUNK)
        assert len(calls) == once
        model.set_requires_gradient_sync(True)
        feeds = tuple(training.stream(x, CHUNK, "cpu") for x in inputs)
        lengths = [len(feed) for feed in feeds]
        value = training.Cached(clip, model)(*feeds)
        value.backward()
        # this step had more chunks, where another rank has more samples
        assert [len(feed) for feed in feeds] == lengths
        assert len(calls) == 2 * once
        calls[:] = calls[:once]
    for p in model.parameters():
        p.grad /= 2  # type: ignore[operator]
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank, inputs, exact = dist.get_rank(), given(dist.get_rank()), expected()
    for trainer, run in [*TRAINERS.items(), ("fsdp", accumulated)]:
        calls.clear()
        found = gradients(run(inputs))
        say(rank, f"{trainer} {len(calls)}: {largest_error(found, exact):.3g}")
    for which in ("image", "text"):
        for sharded in (False, True):
            say(rank, f"frozen {which} {sharded}: {frozen(which, inputs, sharded=sharded):.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
