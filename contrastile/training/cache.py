"""Gradient caching (GradCache, Gao & Zhang 2021, Sec. 3.3): any contrastive batch in the memory of one chunk's graph.

Step 1 encodes all chunks without a graph, step 2 takes the gradient of the loss by the embeddings (Eq. 5, 6), step 3
encodes each chunk again and sends its rows of that gradient into the encoder (Eq. 8, 9). The parameters' gradients are
those of the whole batch, if an embedding depends on its own sample alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile.retrieval import ranks
from contrastile.training.chunks import Splitter
from contrastile.training.replay import Chunk, Encode, Loss, Replay, as_numbers, check_backward, check_loss, evaluate
from contrastile.training.sync import Sync

METRICS = ("loss", "scale", "rank@1", "loss_seconds")


def cached_step(
    encode: Encode,
    inputs: Any,
    loss: Loss,
    *,
    scale: Any = None,
    chunk: Chunk = None,
    split: Splitter | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    sync: Sync = "auto",
    offload: bool = False,
    metrics: Sequence[str] = (),
) -> Any:
    """Forward and backward of one batch in chunks: adds to every parameter's ``.grad`` and returns the loss.

    Args:
        encode: one callable per tower, in a tuple (the same one twice is fine), each called with a chunk of its input;
            or one callable for all towers, called with a chunk of every input, such as a DDP or FSDP2 module. Returns
            a tensor or a tuple of tensors: embeddings of two or more dimensions, (samples, ...), and numbers that the
            loss takes after them, such as a learnt scale of shape () or (1,).
        inputs: one input per tower, in a tuple; for one callable, a tuple of its inputs, or its only one. Each is a
            tensor, or a dict, tuple or list of tensors, of the same first dimension, which may be 0; or a ``stream``.
        loss: called as ``loss(*embeddings, *scale)``; a contrastile loss, with options by ``functools.partial``, or
            any callable that returns a 0-d tensor.
        scale: None, or the loss's argument after the embeddings: a tensor, which may have a graph; a callable that
            makes one, such as ``model.log_scale.exp``; a number; or a tuple of these (a sigmoid loss's scale and bias).
        chunk: samples per chunk, or a ``Budget`` of elements; or one for each input. Independent of the loss's tile.
            None only if every input is a ``stream``.
        split: a function (input, size) -> chunks for inputs of another kind; it must split in the same way each time.
        backward: called with a 0-d surrogate instead of ``surrogate.backward()``, once per chunk, and once for a
            ``scale`` that learns: ``accelerator.backward`` or ``lambda x: scaler.scale(x).backward()``. Not with
            DeepSpeed.
        sync: "auto" finds DDP and FSDP2 modules, or DeepSpeed's engine, in ``encode`` and lets them reduce once, in the
            last backward; a module, or several, names them; None leaves them alone. ``no_sync`` around the call holds.
        offload: whether embeddings and their gradients are kept on the host. The loss then takes the embeddings from
            the host, and needs ``device=`` to be computed elsewhere.
        metrics: any of "loss" (always there), "scale" (the first of ``scale``), "rank@1" (``rank_at_1`` of the first
            two embeddings of this rank, row i against column i; not with ``offload``) and "loss_seconds" (the time of
            the loss and its gradient by the embeddings; the encoders took the rest of the call. On CUDA the host waits
            before and after the loss).

    Returns:
        The loss, 0-d without a graph; the global batch's where the loss has a group. With metrics a dict of 0-d tensors
        with "loss" and each metric.

    Raises:
        TypeError, ValueError: an argument is invalid, or a rule of docs/how-to/training.md is broken; before any
            forward pass if it can be known then. Only an encoder that encodes a chunk differently in the second pass
            raises later: gradients of the scale and of earlier chunks are then in ``.grad``.
        RuntimeError: gradients are off, nothing requires one (under FSDP2, in the last chunk), or under DDP a parameter
            is outside of DDP or unused.
    """
    if not isinstance(metrics, Iterable):
        raise TypeError(
            f"metrics must be names among {', '.join(METRICS)}, got {type(metrics).__name__}; leave it out for none"
        )
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ValueError(f"metrics must be among {', '.join(METRICS)}, got {unknown[0]!r}; compute others from embed")
    if offload and "rank@1" in metrics:
        raise ValueError("metrics must be without rank@1 with offload=True, got it; take rank_at_1 of some rows")
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "cached_step must be called with gradients on, got no_grad; call the loss itself to evaluate"
        )
    check_loss(loss)
    if backward is not None:
        check_backward(backward)
    numbers = as_numbers(scale)
    replay = Replay(encode, inputs, chunk, split, sync, offload)
    is_timed = "loss_seconds" in metrics
    start = _synchronized_time() if is_timed else 0.0
    value, gradients, leaf_gradients = replay.differentiate(loss, numbers)
    metric_values = {"loss": value}
    if is_timed:
        metric_values["loss_seconds"] = _as_metric(_synchronized_time() - start)
    if "scale" in metrics:
        scales = [x.detach() for x in replay.outputs if x.ndim < 2] + numbers
        if not scales:
            raise ValueError("the metric 'scale' must have a scale to show, got none; give scale=, or leave it out")
        metric_values["scale"] = _as_metric(scales[0])
    if "rank@1" in metrics:
        matrices = [x.detach() for x in replay.outputs if x.ndim == 2]
        if len(matrices) < 2:
            raise ValueError(f"the metric 'rank@1' must have two (b, d) embeddings, got {len(matrices)}; leave it out")
        if len(matrices[0]) != len(matrices[1]):
            sizes = " and ".join(str(len(x)) for x in matrices[:2])
            raise ValueError(
                f"the metric 'rank@1' must have as many rows as columns, got {sizes}; leave it out, or take "
                "retrieval.ranks(..., positives=) of embeddings"
            )
        metric_values["rank@1"] = rank_at_1(matrices[0], matrices[1])
    replay.run(gradients, leaf_gradients, backward=backward)
    return metric_values if metrics else value


def _as_metric(number: Any) -> Tensor:
    """A number as a 0-d tensor; dtype and device are explicit because the caller may have changed torch's defaults."""
    if isinstance(number, Tensor):
        return number.detach().reshape(())
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")


def _synchronized_time() -> float:
    """The host's time in seconds, once CUDA, if it is in use, has finished all queued work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def rank_at_1(query: Tensor, key: Tensor, tile: int | None = None) -> Tensor:
    """Share of queries whose key of the same row has a strictly larger dot product than every other key.

    A tie counts as a miss, so embeddings that have collapsed to one point score low: see ``retrieval.ranks``.

    Args:
        query: (m, d), floating point, m >= 1.
        key: (n, d), n >= m, of the same dtype and device; rows from m on are further negatives.
        tile: see ``retrieval.ranks``.

    Returns:
        0-d float32 on the features' device; NaN for no queries.

    Raises:
        TypeError, ValueError: see ``retrieval.ranks``, whose rows are the queries.
    """
    return (ranks(query, key, tile=tile) == 0).float().mean()


class Cached:
    """A loss of a batch in chunks, for loops that call ``loss.backward()``: its backward pass encodes again.

    A factor on the loss (of a ``GradScaler``, of accumulation, of a trainer) multiplies the gradients. The arguments
    are those of ``cached_step``.

    Raises:
        TypeError: the loss is not callable.
    """

    def __init__(
        self,
        loss: Loss,
        encode: Encode,
        chunk: Chunk = None,
        *,
        split: Splitter | None = None,
        sync: Sync = "auto",
        offload: bool = False,
    ) -> None:
        check_loss(loss)
        self._loss, self._encode = loss, encode
        self._replay_options = chunk, split, sync, offload

    def __call__(self, *inputs: Any, scale: Any = None) -> Tensor:
        """The loss, 0-d; ``backward`` may be called once, and adds to every parameter's ``.grad``.

        Args:
            *inputs: one per tower: see ``cached_step``.
            scale: see ``cached_step``.

        Raises:
            TypeError, ValueError: see ``cached_step``.
        """
        numbers = as_numbers(scale)
        replay = Replay(self._encode, inputs, *self._replay_options)
        if not torch.is_grad_enabled():
            return evaluate(self._loss, *replay.outputs, *numbers).detach().reshape(())
        value, gradients, leaf_gradients = replay.differentiate(self._loss, numbers)

        def replay_chunks(upstream: Sequence[Tensor | None]) -> None:
            # None means that no gradient arrived: replay with 0, because Replay.run takes None for 1
            upstream = [torch.zeros_like(value) if x is None else x for x in upstream]
            replay.run(gradients, leaf_gradients, upstream[0])

        return second_pass(replay_chunks, (value.clone(),))[0]


def second_pass(run: Callable[[Sequence[Tensor | None]], None], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of the first pass's values, which have no graph; their backward calls ``run`` with their gradients."""
    # autograd calls the backward pass only if an input requires a gradient
    anchor = torch.zeros((), device=values[0].device, requires_grad=True)
    apply: Any = _SecondPass.apply
    outputs: tuple[Tensor, ...] = apply(anchor, run, values)
    return outputs


class _SecondPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = tuple(x.detach() for x in values)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward must be called without create_graph, got create_graph=True; the second pass gives first "
                "derivatives: take others of the loss without the gradient cache"
            )
        ctx.run(gradients)
        return None, None, None


def embed(
    encode: Encode,
    inputs: Any,
    chunk: Chunk = None,
    *,
    split: Splitter | None = None,
    sync: Sync = "auto",
    offload: bool = False,
) -> tuple[Any, Replay]:
    """The two passes as separate calls, for loops that compute their own loss.

    The arguments are those of ``cached_step``.

    Returns:
        The embeddings, leaves that require gradients (one tensor, or a tuple in the order of ``encode``), and
        ``replay``, the second pass: call it once, after ``loss.backward()`` has filled their ``.grad``.

    Raises:
        TypeError, ValueError: see ``cached_step``.
    """
    replay = Replay(encode, inputs, chunk, split, sync, offload)
    outputs = tuple(replay.outputs)
    return (outputs[0] if len(outputs) == 1 else outputs), replay
