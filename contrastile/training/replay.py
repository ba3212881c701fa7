"""The two passes of gradient caching over any number of towers, and, between the passes, the gradient of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from numbers import Real
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from contrastile.backends.crossing import dtype_name
from contrastile.backends.staging import Staging
from contrastile.training.chunks import Listed, Size, Sliced, Splitter, check_callable, cut, samples
from contrastile.training.coupled import warn_of_coupled
from contrastile.training.graphs import LeafGrad, gradients_of, leaf_gradients_of, leaves
from contrastile.training.random_state import Autocast, RandomState, accelerators, float32_at_least
from contrastile.training.sync import Reduction, Sync, modules_of, refuse

Encode = Callable[..., Any] | Sequence[Callable[..., Any]]
Loss = Callable[..., Tensor]
Chunk = Size | Sequence[Size] | None


@dataclass
class _Tower:
    """A callable, and what the first pass recorded for each of its chunks.

    Attributes:
        encode: takes a chunk of every input.
        inputs: the chunks of each input, equally many.
        states: for each chunk, the states of the random generators before it.
        rows: for each chunk, the rows of each output; None for a number.
        learns: for each chunk, whether something in it may learn.
    """

    encode: Callable[..., Any]
    inputs: list[Sliced | Listed]
    states: list[RandomState] = field(default_factory=list)
    rows: list[list[int | None]] = field(default_factory=list)
    learns: list[bool] = field(default_factory=list)


class Replay:
    """The second pass of a batch. Its construction is the first pass: see ``embed``.

    Attributes:
        outputs: the embeddings and numbers, leaves that require gradients, except in inference mode. float16 becomes
            float32, because unscaled gradients of a mean over b samples would underflow.
    """

    def __init__(
        self, encode: Encode, inputs: Any, chunk: Chunk, split: Splitter | None, sync: Sync, offload: bool
    ) -> None:
        encoders = list(encode) if isinstance(encode, Sequence) else [encode]
        wrong = [type(x).__name__ for x in encoders if not callable(x) or isinstance(x, nn.ModuleList | nn.ModuleDict)]
        if wrong or not encoders:
            kind = wrong[0] if wrong else "none"
            raise TypeError(f"encode must be a callable, or one per input, got {kind}; name a module or function")
        self._towers = _make_towers(encode, inputs, chunk, split)
        self._reduction = Reduction(sync, encoders)
        modules = modules_of(*encoders)
        input_tensors = [x for tower in self._towers for chunks in tower.inputs for x in chunks.tensors()]
        # a splitter's chunks may be views of a leaf
        if any(x.requires_grad and not (x if x._base is None else x._base).is_leaf for x in input_tensors):
            raise ValueError("inputs must have no graph, got one, which each chunk would walk again; detach them")
        self._is_repeatable = not warn_of_coupled(modules)
        self._devices = accelerators([*input_tensors, *(p for module in modules for p in module.parameters())])
        self._autocast = Autocast(self._devices)
        self._is_used, self._offload = False, offload
        self._differences: list[Tensor] = []
        counts = self._reduction.agree([tower.inputs[0].count for tower in self._towers])
        for tower, count in zip(self._towers, counts, strict=True):
            for chunks in tower.inputs:
                chunks.extend(count)
        self._versions = _record_versions(input_tensors)
        with torch.no_grad(), self._reduction.no_reduction():
            self.outputs = [x for i, tower in enumerate(self._towers) for x in self._first_pass(i, tower)]
        # older versions of torch (pytorch issue 158232) keep weights that autocast has cast without a graph
        torch.clear_autocast_cache()
        _check_unchanged(self._versions)
        if not self._reduction.fsdp:  # FSDP2 gathers and frees its parameters
            # record them after the first pass, because a forward may clamp its scale
            self._versions += _record_versions(p for module in modules for p in module.parameters() if p.requires_grad)
        self._step_hook = register_optimizer_step_post_hook(partial(_count_step, {id(x) for x, _ in self._versions}))
        finalize(self, self._step_hook.remove)
        self._reduction.check_called()

    def _first_pass(self, index: int, tower: _Tower) -> list[Tensor]:
        """Step 1: the outputs of a tower, joined over its chunks."""
        parts: list[list[Tensor]] = []
        stagings: dict[torch.device, Staging] = {}
        # if no module learns, a parameter outside may: gradients are then on, and a chunk's graph shows whether it does
        parameters = (p for module in modules_of(tower.encode) for p in module.parameters())
        seems_frozen = not self._reduction and not any(p.requires_grad for p in parameters)
        with self._reduction.watch(index, tower.encode), torch.set_grad_enabled(seems_frozen):
            for chunk in zip(*tower.inputs, strict=True):
                tower.states.append(RandomState(self._devices))
                with self._autocast.again(), _explain_empty_chunk(chunk):
                    chunk_outputs = _checked_outputs(tower.encode(*chunk))
                tower.learns.append(not seems_frozen or any(x.requires_grad for x in chunk_outputs))
                chunk_outputs = [x.detach() for x in chunk_outputs]
                parts.append([_copy_to_host(x, stagings) for x in chunk_outputs] if self._offload else chunk_outputs)
                tower.rows.append([len(x) if x.ndim > 1 else None for x in parts[-1]])
        shapes = {tuple(None if x.ndim < 2 else (x.shape[1:], x.dtype) for x in part) for part in parts}
        if len(shapes) > 1:
            raise ValueError(
                f"encode must return outputs of the same width and dtype for every chunk, got "
                f"{sorted(map(str, shapes))}; pad them"
            )
        for staging in stagings.values():
            staging.synchronize()
        outputs = []
        for pieces in zip(*parts, strict=True):
            x = (_join_chunks(pieces) if pieces[0].ndim > 1 else _common_number(pieces)).detach()
            x = x.to(torch.float32 if x.dtype is torch.float16 else x.dtype)
            if x.is_floating_point() and not torch.is_inference_mode_enabled():
                # torch silently leaves inference tensors out of graphs
                x = (x.clone() if x.is_inference() else x).requires_grad_()
            outputs.append(x)
        return outputs

    def differentiate(self, loss: Loss, numbers: Sequence[Any]) -> tuple[Tensor, list[Tensor | None], list[LeafGrad]]:
        """Step 2: the loss, its gradients by the outputs, and its gradients by the other leaves that it depends on.

        Raises:
            TypeError, ValueError: the loss's value is no tensor of one element that depends on the embeddings.
        """
        # detach numbers, because a number's graph is the caller's, who may use it again
        leaf_numbers = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.grad_fn else x for x in numbers]
        originals = {id(x): number for x, number in zip(leaf_numbers, numbers, strict=True) if x is not number}
        with self._autocast.wide():
            value = evaluate(loss, *self.outputs, *leaf_numbers)
        if not value.requires_grad:
            raise ValueError("loss must depend on the embeddings, got a value without a graph; do not detach them")
        output_ids = {id(x) for x in self.outputs}
        other_leaves = [x for x in leaves(value) if id(x) not in output_ids]
        differentiable = [x for x in self.outputs if x.requires_grad]
        gradients = gradients_of(value, [*differentiable, *other_leaves])
        gradients_by_id = {id(x): gradient for x, gradient in zip(differentiable, gradients, strict=False)}
        leaf_gradients: list[LeafGrad] = []
        for x, gradient in zip(other_leaves, gradients[len(differentiable) :], strict=True):
            leaf_gradients += leaf_gradients_of(originals.get(id(x), x), gradient)
        return value.detach().reshape(()), [gradients_by_id.get(id(x)) for x in self.outputs], leaf_gradients

    def __call__(
        self,
        gradients: Tensor | Sequence[Tensor | None] | None = None,
        *,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Step 3: encode each chunk again and send its gradient into the encoder.

        Args:
            gradients: one for each output, of its shape, or None for zeros; a tensor if there is one output. By
                default the outputs' ``.grad``.
            backward: see ``cached_step``.

        Raises:
            TypeError: the gradients are not tensors, or ``backward`` is not callable.
            ValueError: there are no gradients, or not as many as outputs, or their shapes differ from the outputs'.
            RuntimeError: called a second time, or nothing requires a gradient.
        """
        if backward is not None:
            check_backward(backward)
        if isinstance(gradients, Tensor):
            gradients = [gradients]
        grads = [x.grad for x in self.outputs] if gradients is None else gradients
        wrong = [x for x in grads if not isinstance(x, Tensor | None)] if isinstance(grads, Sequence) else [grads]
        if wrong:
            raise TypeError(
                f"gradients of outputs must be tensors or None, got {type(wrong[0]).__name__}; give one for each "
                "output, or none at all for their .grad"
            )
        if len(grads) != len(self.outputs) or all(x is None for x in grads):
            raise ValueError(
                f"replay must have gradients of the {len(self.outputs)} outputs, got "
                f"{sum(x is not None for x in grads)}; call loss.backward() first"
            )
        for x, gradient in zip(self.outputs, grads, strict=True):
            if gradient is not None and gradient.shape != x.shape:
                raise ValueError(
                    f"a gradient must have its output's shape {tuple(x.shape)}, got {tuple(gradient.shape)}; "
                    "give it as the loss's backward pass left it"
                )
        self.run([None if x is None else x.detach() for x in grads], [], backward=backward)

    @torch.enable_grad()
    def run(
        self,
        gradients: Sequence[Tensor | None],
        leaf_gradients: Sequence[LeafGrad],
        upstream: Tensor | None = None,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Step 3. The gradients of leaves other than the outputs are sent once, before all others.

        DDP reduces in the last chunk of the last tower that calls it, FSDP2 in the last chunk of every such tower.
        """
        if self._is_used:
            raise RuntimeError("a batch must be replayed once, got a second backward pass; make the step again")
        self._is_used = True
        run_backward = self._reduction.backward_function(backward)
        _check_unchanged(self._versions)

        versions: list[tuple[Tensor, int]] = []

        def send(terms: Sequence[Tensor]) -> bool:
            if not terms:
                return False
            surrogate = reduce(torch.add, [term.to(terms[0].device) for term in terms])
            surrogate = surrogate if upstream is None else upstream.to(surrogate.device) * surrogate
            versions[:] = _record_versions(x for x, _ in self._versions)
            run_backward(surrogate)
            return True

        caller_state = RandomState(self._devices)
        start = 0
        with self._reduction.no_reduction():
            any_sent = send([_surrogate_term(*x) for x in leaf_gradients])
        try:
            for i, tower in enumerate(self._towers):
                span = slice(start, start + len(tower.rows[0]))
                tower_gradients, embeddings, start = gradients[span], self.outputs[span], span.stop
                offsets, tower_sent = [0] * len(tower_gradients), False
                for j, chunk in enumerate(zip(*tower.inputs, strict=True)):
                    if not tower.learns[j]:
                        offsets = [x + (rows or 0) for x, rows in zip(offsets, tower.rows[j], strict=True)]
                        continue
                    is_last = j == len(tower.rows) - 1
                    _check_unchanged(versions)  # a hook may step an optimizer in each backward pass
                    with self._reduction.no_reduction(i if is_last else None):
                        terms = self._encode_again(tower, j, chunk, tower_gradients, embeddings, offsets)
                    if j == 0 and self._reduction.ddp:
                        self._reduction.check_reached([leaf for term in terms for leaf in leaves(term)])
                    with self._reduction.last_backward(i) if is_last else self._reduction.no_reduction():
                        sent = send(terms)
                    tower_sent, any_sent = tower_sent or sent, any_sent or sent
                    if is_last and tower_sent and not sent and self._reduction.fsdp:
                        raise RuntimeError(
                            "FSDP2 must reduce in the backward pass of the last chunk, got one in which nothing learns "
                            "after others in which something does; put it first, or use DDP"
                        )
        finally:
            caller_state.restore()
            self._reduction.reshard()
            self._step_hook.remove()
        _check_repeated(self._differences)
        if not any_sent:
            raise RuntimeError("something must require a gradient, got none from encode or loss; unfreeze a parameter")

    def _encode_again(
        self,
        tower: _Tower,
        j: int,
        chunk: Any,
        gradients: Sequence[Tensor | None],
        embeddings: Sequence[Tensor],
        offsets: list[int],
    ) -> list[Tensor]:
        """One chunk's terms ``<output, gradient>``, with the random numbers and the autocast of the first pass.

        Raises:
            ValueError: there are not as many outputs as in the first pass, or in the first chunk in which something
                learns the embeddings differ.
        """
        tower.states[j].restore()
        with self._autocast.again():
            outputs = _checked_outputs(tower.encode(*chunk))
        if len(outputs) != (count := len(tower.rows[j])):
            raise ValueError(f"encode must return {count} tensors both times, got {len(outputs)} now; return the same")
        if self._is_repeatable:
            for x, embedding, rows, start in zip(outputs, embeddings, tower.rows[j], offsets, strict=True):
                first_output = embedding if rows is None else embedding[start : start + rows]
                self._differences += _relative_difference(x, first_output, self._autocast.epsilon)
            if j == tower.learns.index(True):
                # other chunks are checked at the end, because each check waits for the device
                _check_repeated(self._differences)
        terms = []
        for k, (x, rows, gradient) in enumerate(zip(outputs, tower.rows[j], gradients, strict=True)):
            part = gradient
            if rows is not None:
                part = None if gradient is None else gradient[offsets[k] : offsets[k] + rows]
                offsets[k] += rows
            # a number's gradient is sent once, in the last chunk
            if x.requires_grad and (rows is not None or j == len(tower.rows) - 1):
                dtype = float32_at_least(x.dtype)
                # copy, then convert: a conversion on the host would leave page-locked memory
                if part is not None:
                    terms.append(_surrogate_term(x, part.to(x.device, non_blocking=True).to(dtype)))
                elif self._reduction:
                    # a reduction waits for a gradient of every parameter
                    terms.append(_surrogate_term(x, torch.zeros_like(x, dtype=dtype)))
        return terms


def _surrogate_term(x: Tensor, gradient: Tensor) -> Tensor:
    if x.shape != gradient.shape:
        raise ValueError(
            f"encode must return the same shapes both times, got {tuple(x.shape)} where it was "
            f"{tuple(gradient.shape)}; let the chunk alone decide them"
        )
    # multiply in the gradient's dtype, at least float32, so that an upstream factor applies before narrowing
    return (x.to(gradient.dtype) * gradient).sum()


def _relative_difference(x: Tensor, first: Tensor, epsilon: float) -> list[Tensor]:
    """An output's relative difference from the first pass: over the allowed difference, and as it is.

    Kernels that sum in any order change roundings. The allowed difference, the square root of an epsilon, is far above
    those changes and far below that of another dropout mask. NaN passes: it is the caller's.
    """
    if x.shape != first.shape or not x.is_floating_point():
        return []
    first = first.detach().to(x.device, non_blocking=True)
    relative = (x.detach().to(first.dtype) - first).norm() / first.norm()
    return [torch.stack([relative / max(epsilon, torch.finfo(x.dtype).eps) ** 0.5, relative])]


def _check_repeated(differences: list[Tensor]) -> None:
    """Raise ValueError if an encoder returned other embeddings than before, whose gradient is not the loss's."""
    pairs = [x.tolist() for x in differences]
    differences.clear()
    for excess, relative in pairs:
        if excess > 1:
            raise ValueError(
                f"encode must return the same embeddings both times, got a chunk that differs by {relative:.2g} of its "
                "norm; draw from torch's, NumPy's or Python's own generators, which are put back, or reset yours in "
                "encode; call torch.backends.mha.set_fastpath_enabled(False) for nn.TransformerEncoder in eval"
            )


def _copy_to_host(x: Tensor, stagings: dict[torch.device, Staging]) -> Tensor:
    """Start to copy an embedding to the host, beside the encoding of the next chunk; a number stays where it is."""
    if x.ndim < 2:
        return x
    if x.device not in stagings:
        stagings[x.device] = Staging(x.device, torch.device("cpu"))
    host_copy = stagings[x.device].kept(x, dtype_name(x.dtype))
    stagings[x.device].store(x.detach(), host_copy)
    return host_copy


def _join_chunks(parts: Sequence[Tensor]) -> Tensor:
    """The chunks' rows in one tensor, which is page-locked if they are."""
    first = parts[0]
    if not (first.device.type == "cpu" and first.is_pinned()):
        return torch.cat(list(parts))
    whole = torch.empty((sum(map(len, parts)), *first.shape[1:]), dtype=first.dtype, device="cpu", pin_memory=True)
    return torch.cat(list(parts), out=whole)


def _common_number(numbers: Sequence[Tensor]) -> Tensor:
    """The number that every chunk returned; ValueError if they differ, because the loss takes one."""
    if len(numbers) > 1:
        stacked = torch.stack(list(numbers))
        if not bool(((stacked == stacked[0]) | stacked.isnan()).all()):
            raise ValueError(
                f"a number that encode returns must be the same for every chunk, as a scale is, got "
                f"{stacked.min().item():g} to {stacked.max().item():g}; return a number per sample as (samples, 1)"
            )
    return numbers[-1]


@contextmanager
def _explain_empty_chunk(chunk: tuple[Any, ...]) -> Iterator[None]:
    """If an encoder fails at a chunk without samples, raise an error that says what it must do."""
    try:
        yield
    except RuntimeError as error:
        try:
            has_samples = any(map(samples, chunk))
        except (TypeError, ValueError):  # a splitter's chunk, of another kind
            has_samples = True
        if has_samples:
            raise
        raise RuntimeError(
            "encode must take a chunk without samples, of first dimension 0, since there are none on this rank, got "
            f"{type(error).__name__}; encode one sample of any values for it, and return its embedding[:0]"
        ) from error


def _checked_outputs(returned: Any) -> list[Tensor]:
    outputs = list(returned) if isinstance(returned, tuple | list) else [returned]
    for x in outputs:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"encode must return a tensor or a tuple of tensors, got {type(x).__name__}; pick the embeddings out "
                "in a function of your own"
            )
        if x.ndim < 2 and x.numel() != 1:
            raise ValueError(
                f"encode must return embeddings (samples, ...) of two or more dimensions, or numbers, got shape "
                f"{tuple(x.shape)}; add a dimension"
            )
    if not outputs:
        raise TypeError("encode must return a tensor or a tuple of tensors, got none; return the embeddings")
    return outputs


def _record_versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Each tensor and its version, which counts changes in place; inference tensors have none and are left out."""
    return [(x, x._version) for x in tensors if not x.is_inference()]


def _count_step(tensor_ids: set[int], optimizer: Optimizer, *_: Any) -> None:
    """Count an optimizer's step as a change in place of its parameters, which a fused optimizer does not count."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if id(p) in tensor_ids and p.grad is not None:
            torch.autograd.graph.increment_version(p)


def _check_unchanged(versions: Iterable[tuple[Tensor, int]]) -> None:
    """Raise ValueError if an input or a parameter was changed in place since its version was recorded."""
    if any(x._version != version for x, version in versions):
        raise ValueError(
            "inputs and parameters must stay as they are until the second pass has read them again, got some that were "
            "changed in place; write x - mean instead of x.sub_(mean), and step the optimizer afterwards, in no hook"
        )


def _make_towers(encode: Encode, inputs: Any, chunk: Chunk, split: Splitter | None) -> list[_Tower]:
    # a list is the only input of one callable, or the inputs of several callables
    has_many = isinstance(inputs, tuple) or (not callable(encode) and isinstance(inputs, list))
    inputs = inputs if has_many else (inputs,)
    if not callable(encode) and len(encode) != len(inputs):
        raise ValueError(
            f"encode must have one callable per input, got {len(encode)} for {len(inputs)} inputs; name a shared one "
            "twice, give a tuple of inputs, and a scale as scale="
        )
    if not inputs:
        raise ValueError("inputs must be one per tower, got none; give the batch")
    sizes = list(chunk) if isinstance(chunk, Sequence) else [chunk] * len(inputs)
    if len(sizes) != len(inputs):
        raise ValueError(f"chunk must be one size, or one per input, got {len(sizes)} for {len(inputs)}; give one size")
    cuts = [cut(x, size, split) for x, size in zip(inputs, sizes, strict=True)]
    if not callable(encode):
        return [_Tower(encoder, [chunks]) for encoder, chunks in zip(encode, cuts, strict=True)]
    counts = [chunks.count for chunks in cuts]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the inputs of one callable must be cut into equally many chunks, got {counts}; give one size for each "
            "input: chunk=(4, 12)"
        )
    return [_Tower(encode, cuts)]


def check_loss(loss: Any) -> None:
    """Raise TypeError for a loss that cannot be called."""
    check_callable("loss", loss, "give the function itself, such as contrastile.clip_loss")


def check_backward(backward: Any) -> None:
    """Raise TypeError for a backward that cannot be called, and ValueError for that of an unsupported module."""
    check_callable("backward", backward, "give a function of a tensor, such as accelerator.backward")
    engine = getattr(backward, "__self__", None)
    if isinstance(engine, nn.Module):
        refuse(engine)


def evaluate(loss: Loss, *arguments: Any) -> Tensor:
    """The value of a loss.

    Raises:
        TypeError: it is no tensor of one element.
    """
    value = loss(*arguments)
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss must return a tensor of one element, got {kind}; take its mean, or pick it out")
    return value


def as_numbers(scale: Any) -> list[Any]:
    """The numbers and one-element tensors that the loss takes after the embeddings."""
    numbers = []
    for x in () if scale is None else scale if isinstance(scale, tuple | list) else (scale,):
        value = x() if callable(x) else x
        if hasattr(value, "device_mesh"):
            raise ValueError(
                "scale must be a tensor, got a DTensor: a shard of a parameter of FSDP2; return it from the module's "
                "forward, after the embeddings"
            )
        if isinstance(value, bool) or not isinstance(value, Tensor | Real):
            raise TypeError(
                f"scale must be a number, a tensor or a callable that makes one, got {type(value).__name__}; convert it"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"scale must have one element, got shape {tuple(value.shape)}; give several in a tuple")
        numbers.append(value)
    return numbers
