"""Cached steps under DDP and FSDP2: the gradients of the one global loss, and one reduction per step.

It prints the largest error of the gradient of a parameter, relative to its norm, against the whole batch in one
process, in float64.
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
"""One entry for each reduction."""


class Towers(nn.Module):
    """Two encoders and a learned scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.image, self.text = (
            nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
            for _ in range(2)
        )
        # FSDP2 takes no scalar parameters
        self.logit_scale = nn.Parameter(torch.zeros(1))
        self.double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        return self.image(images), self.text(texts), self.scale()

    def scale(self) -> Tensor:
        return SCALE * self.logit_scale.exp()


def clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The loss with the arguments of open_clip's own training."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    module = contrastile.nn.ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, **place)
    loss = module(image, text, scale)
    assert isinstance(loss, Tensor)
    return loss


def shard_of(rank: int) -> tuple[Tensor, Tensor]:
    """The images and texts of a rank."""
    generator = torch.Generator().manual_seed(rank)
    image, text = torch.randn(2, SHARDS[dist.get_world_size()][rank], INPUTS, dtype=torch.float64, generator=generator)
    return image, text


def whole_batch_gradients() -> list[Tensor]:
    """The gradients of the whole batch in one process."""
    model, shards = Towers(), [shard_of(rank) for rank in range(dist.get_world_size())]
    loss: Any = contrastile.clip_loss(*model(*map(torch.cat, zip(*shards, strict=True))))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    # for a gradient of 0 the error is 0 or infinite
    return max(
        0.0 if torch.equal(x, y) else ((x - y).norm() / y.norm()).item() for x, y in zip(actual, expected, strict=True)
    )


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of the parameters of ``Towers``, in their order, gathered if a trainer shards them."""
    gradient_of: dict[str, Any] = {name.removeprefix("module."): x.grad for name, x in model.named_parameters()}
    ordered = [gradient_of[name] for name, _ in Towers().named_parameters()]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in ordered]


def count_reductions(model: DistributedDataParallel) -> DistributedDataParallel:
    """Count the reductions of DDP, which has one bucket here, in ``calls``."""

    # DDP reads the annotations of a hook, which must be types and not strings
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        calls.append(1)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    return model


def fsdp(model: Any, apart: bool = True) -> Any:
    """Shard a model, and with ``apart`` also each tower by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tower in (model.image, model.text) if apart else ():
        fully_shard(tower, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Dispatching(Towers):
    """Towers of which a forward pass encodes one, with a buffer that DDP broadcasts before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(64))

    def forward(self, **x: Tensor) -> Tensor:  # type: ignore[override]
        ((name, inputs),) = x.items()
        return {"image": self.image, "text": self.text}[name](inputs[self.order[: len(inputs)]])


def ddp(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    return count_reductions(DistributedDataParallel(module, **settings))


def scale_of(model: nn.Module) -> Callable[[], Tensor]:
    """A function that computes the scale outside of a forward pass."""
    inner: Any = getattr(model, "module", model)
    return lambda: SCALE * inner.logit_scale.exp()


def towers(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], ...]:
    return (lambda x: model(image=x)), (lambda x: model(text=x))


def train(model: nn.Module, encode: Any, inputs: Any, *, steps: int = 1, **options: Any) -> nn.Module:
    """Take cached steps. Before the second step DDP rebuilds its buckets and broadcasts its buffers."""
    for _ in range(steps):
        calls.clear()
        model.zero_grad()
        training.cached_step(encode, inputs, clip, chunk=CHUNK, **options)
    return model


def apart(inputs: Any, **settings: Any) -> nn.Module:
    """Call one module for each tower, with a scale that is computed outside of its forward pass."""
    model = ddp(Dispatching(), **settings)
    return train(model, towers(model), inputs, steps=2, scale=scale_of(model))


def by_hand_apart(inputs: Any) -> nn.Module:
    """Make the two passes by hand. The scale gets its gradient in the caller's backward pass, before DDP reduces."""
    model = ddp(Dispatching())
    outputs, replay = training.embed(towers(model), inputs, CHUNK)
    clip(*outputs, scale_of(model)()).backward()
    replay()
    return model


class WithUnused(Towers):
    """Towers with a parameter that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def unused(inputs: Any) -> nn.Module:
    model = ddp(WithUnused(), **UNUSED)
    train(model, model, inputs)
    assert model.module.extra.grad is None
    return model


class FrozenWhenEmpty(Towers):
    """Towers whose features of a chunk without samples require no gradient."""

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        features = super().forward(images, texts)[:2]
        return features if len(images) else tuple(x.detach() for x in features)


def with_an_empty_chunk(x: Tensor, size: int) -> list[Tensor]:
    return [*x.split(size), x[:0]]


TRAINERS: dict[str, Callable[[Any], nn.Module]] = {
    "apart": apart,
    "by hand, apart": by_hand_apart,
    "one each": lambda x: train(model := Towers(), (ddp(model.image), ddp(model.text)), x, scale=scale_of(model)),
    "unused": unused,
    # DDP looks for unused parameters, and the last forward pass does not use the scale
    "unused outside": lambda x: train(
        model := ddp(Towers(), **UNUSED), lambda *y: model(*y)[:2], x, steps=2, scale=scale_of(model)
    ),
    # DDP finds no used parameter in the last chunk, which is the only chunk of a rank without samples
    "last chunk frozen": lambda x: train(
        model := ddp(FrozenWhenEmpty(), **UNUSED), model, x, steps=2, scale=scale_of(model), split=with_an_empty_chunk
    ),
    "unused apart": functools.partial(apart, **UNUSED),
    "bucket views": functools.partial(apart, gradient_as_bucket_view=True),
}


def frozen(tower: str, inputs: Any, *, sharded: bool) -> float:
    """The error with one frozen tower, called first or last; asserts that there is one reduction."""
    module: Any = Dispatching()
    getattr(module, tower).requires_grad_(False)
    scale: Any = SCALE if sharded else scale_of(module)
    model = fsdp(module, apart=False) if sharded else ddp(module)
    calls.clear()
    with counting() if sharded else nullcontext():
        training.cached_step(towers(model), inputs, clip, scale=scale, chunk=CHUNK)
    assert len(calls) == 1, calls
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    expected, actual = whole_batch_gradients(), gradients(model)
    for i, (name, _) in enumerate(Towers().named_parameters()):
        if name.startswith((tower, *["logit"] * sharded)):
            # a frozen parameter has no gradient
            expected[i].zero_()
    return largest_error(actual, expected)


@contextmanager
def counting() -> Iterator[None]:
    """While open, count the reductions of FSDP2 in ``calls``."""
    # torch before 2.13 uses reduce_scatter_tensor
    collective = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    original = getattr(dist, collective)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    setattr(dist, collective, counting)
    try:
        yield
    finally:
        setattr(dist, collective, original)


def accumulated(inputs: Any) -> nn.Module:
    model = fsdp(Towers())
    with counting():
        training.cached_step(model, inputs, clip, chunk=CHUNK)
        reductions = len(calls)
        # while the caller accumulates gradients a step reduces nothing; afterwards it does
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        training.cached_step(model, inputs, clip, chunk=CHUNK)
        assert len(calls) == reductions
        model.set_requires_gradient_sync(True)
        feeds = tuple(training.stream(x, CHUNK, "cpu") for x in inputs)
        lengths = [len(feed) for feed in feeds]
        value = training.Cached(clip, model)(*feeds)
        value.backward()
        # the step added empty chunks where another rank has more samples; the feeds must not keep them
        assert [len(feed) for feed in feeds] == lengths
        assert len(calls) == 2 * reductions
        calls[:] = calls[:reductions]
    for p in model.parameters():
        p.grad /= 2  # type: ignore[operator]
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank, inputs, expected = dist.get_rank(), shard_of(dist.get_rank()), whole_batch_gradients()
    for trainer, run in [*TRAINERS.items(), ("fsdp", accumulated)]:
        calls.clear()
        actual = gradients(run(inputs))
        say(rank, f"{trainer} {len(calls)}: {largest_error(actual, expected):.3g}")
    for tower in ("image", "text"):
        for sharded in (False, True):
            say(rank, f"frozen {tower} {sharded}: {frozen(tower, inputs, sharded=sharded):.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
