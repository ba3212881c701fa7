"""The two passes of gradient caching over any number of towers, and the gradient of the loss between them."""

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
from contrastile.training.graphs import Outside, gradients_of, leaves, outside_of
from contrastile.training.random_state import Autocast, RandomState, accelerators, float32_at_least
from contrastile.training.sync import Reduction, Sync, modules_of, refuse

Encode = Callable[..., Any] | Sequence[Callable[..., Any]]
Loss = Callable[..., Tensor]
Chunk = Size | Sequence[Size] | None


@dataclass
class _Tower:
    """A callable, and what the first pass recorded of each of its chunks.

    Attributes:
        encode: takes a chunk of every one of its inputs.
        inputs: the chunks of each of its inputs, which are equally many.
        states: of the random generators, before each chunk.
        rows: of each output, for each chunk; None for a number.
        learns: whether something may learn in each chunk.
    """

    encode: Callable[..., Any]
    inputs: list[Sliced | Listed]
    states: list[RandomState] = field(default_factory=list)
    rows: list[list[int | None]] = field(default_factory=list)
    learns: list[bool] = field(default_factory=list)


class Replay:
    """The second pass of a batch whose first pass has been made: see ``embed``.

    Attributes:
        outputs: the embeddings and numbers, leaves that require gradients, in inference mode none; float16 comes as
            float32, since unscaled gradients of a mean over b samples would underflow.
    """

    def __init__(
        self, encode: Encode, inputs: Any, chunk: Chunk, split: Splitter | None, sync: Sync, offload: bool
    ) -> None:
        encoders = list(encode) if isinstance(encode, Sequence) else [encode]
        wrong = [type(x).__name__ for x in encoders if not callable(x) or isinstance(x, nn.ModuleList | nn.ModuleDict)]
        if wrong or not encoders:
            got = wrong[0] if wrong else "none"
            raise TypeError(f"encode must be a callable, or one per input, got {got}; name a module or function")
        self._towers = _towers(encode, inputs, chunk, split)
        self._reduction = Reduction(sync, encoders)
        modules = modules_of(*encoders)
        seen = [x for tower in self._towers for each in tower.inputs for x in each.tensors()]
        # chunks that a splitter cut from a leaf are views of it
        if any(x.requires_grad and not (x if x._base is None else x._base).is_leaf for x in seen):
            raise ValueError("inputs must have no graph, got one, which each chunk would walk again; detach them")
        self._repeatable = not warn_of_coupled(modules)
        self._devices = accelerators([*seen, *(p for module in modules for p in module.parameters())])
        self._autocast = Autocast(self._devices)
        self._used, self._offload = False, offload
        self._differences: list[Tensor] = []
        counts = self._reduction.agree([tower.inputs[0].count for tower in self._towers])
        for tower, count in zip(self._towers, counts, strict=True):
            for each in tower.inputs:
                each.extend(count)
        self._kept = _versions(seen)
        with torch.no_grad(), self._reduction.quiet():
            self.outputs = [x for i, tower in enumerate(self._towers) for x in self._first(i, tower)]
        # in an autocast around the call older versions of torch (pytorch issue 158232) keep copies of weights that they
        # made without a graph: the gradient would stop at them
        torch.clear_autocast_cache()
        _check_unchanged(self._kept)
        if not self._reduction.fsdp:  # whose parameters come and go
            # from here on: a forward may clamp its scale
            self._kept += _versions(p for module in modules for p in module.parameters() if p.requires_grad)
        self._steps = register_optimizer_step_post_hook(partial(_count_step, {id(x) for x, _ in self._kept}))
        finalize(self, self._steps.remove)
        self._reduction.check_called()

    def _first(self, index: int, tower: _Tower) -> list[Tensor]:
        """Step 1: the outputs of a tower, joined over its chunks."""
        parts: list[list[Tensor]] = []
        stagings: dict[torch.device, Staging] = {}
        # a parameter outside of the modules may learn: with gradients on, a chunk in which nothing does has no graph
        parameters = (p for module in modules_of(tower.encode) for p in module.parameters())
        seems_frozen = not self._reduction and not any(p.requires_grad for p in parameters)
        with self._reduction.watch(index, tower.encode), torch.set_grad_enabled(seems_frozen):
            for chunk in zip(*tower.inputs, strict=True):
                tower.states.append(RandomState(self._devices))
                with self._autocast.again(), _explained(chunk):
                    found = _outputs(tower.encode(*chunk))
                tower.learns.append(not seems_frozen or any(x.requires_grad for x in found))
                found = [x.detach() for x in found]
                parts.append([_fetched(x, stagings) for x in found] if self._offload else found)
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
        for numbers in zip(*parts, strict=True):
            x = (_joined(numbers) if numbers[0].ndim > 1 else _same(numbers)).detach()
            x = x.to(torch.float32 if x.dtype is torch.float16 else x.dtype)
            if x.is_floating_point() and not torch.is_inference_mode_enabled():
                # torch leaves what it computes of inference tensors out of their gradients, and says nothing
                x = (x.clone() if x.is_inference() else x).requires_grad_()
            outputs.append(x)
        return outputs

    def differentiate(self, loss: Loss, numbers: Sequence[Any]) -> tuple[Tensor, list[Tensor | None], list[Outside]]:
        """Step 2: the loss, its gradients by the outputs, and by what else it depends on.

        Raises:
            TypeError, ValueError: the loss's value is no 0-d tensor that depends on the embeddings.
        """
        # cut, since the graph of a number is the caller's, who may use it again
        cut = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.grad_fn else x for x in numbers]
        graphs = {id(x): number for x, number in zip(cut, numbers, strict=True) if x is not number}
        with self._autocast.wide():
            value = evaluate(loss, *self.outputs, *cut)
        if not value.requires_grad:
            raise ValueError("loss must depend on the embeddings, got a value without a graph; do not detach them")
        own = {id(x) for x in self.outputs}
        outside = [x for x in leaves(value) if id(x) not in own]
        wanted = [x for x in self.outputs if x.requires_grad]
        found = gradients_of(value, [*wanted, *outside])
        by = {id(x): gradient for x, gradient in zip(wanted, found, strict=False)}
        rest: list[Outside] = []
        for x, gradient in zip(outside, found[len(wanted) :], strict=True):
            rest += outside_of(graphs.get(id(x), x), gradient)
        return value.detach().reshape(()), [by.get(id(x)) for x in self.outputs], rest

    def __call__(
        self,
        gradients: Tensor | Sequence[Tensor | None] | None = None,
        *,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Step 3: encode each chunk again and send its gradient into the encoder.

        Args:
            gradients: of each output, of its shape, None for zeros; a tensor where there is one output. By default the
                outputs' ``.grad``.
            backward: see ``cached_step``.

        Raises:
            TypeError: the gradients are no tensors, or ``backward`` is no callable.
            ValueError: there are no gradients, or not as many as outputs, or of other shapes.
            RuntimeError: called a second time, or nothing requires a gradient.
        """
        if backward is not None:
            check_backward(backward)
        if isinstance(gradients, Tensor):
            gradients = [gradients]
        given = [x.grad for x in self.outputs] if gradients is None else gradients
        wrong = [x for x in given if not isinstance(x, Tensor | None)] if isinstance(given, Sequence) else [given]
        if wrong:
            raise TypeError(
                f"gradients of outputs must be tensors or None, got {type(wrong[0]).__name__}; give one for each "
                "output, or none at all for their .grad"
            )
        if len(given) != len(self.outputs) or all(x is None for x in given):
            raise ValueError(
                f"replay must have gradients of the {len(self.outputs)} outputs, got "
                f"{sum(x is not None for x in given)}; call loss.backward() first"
            )
        for x, gradient in zip(self.outputs, given, strict=True):
            if gradient is not None and gradient.shape != x.shape:
                raise ValueError(
                    f"a gradient must have its output's shape {tuple(x.shape)}, got {tuple(gradient.shape)}; "
                    "give it as the loss's backward pass left it"
                )
        self.run([None if x is None else x.detach() for x in given], [], backward=backward)

    @torch.enable_grad()
    def run(
        self,
        gradients: Sequence[Tensor | None],
        outside: Sequence[Outside],
        upstream: Tensor | None = None,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Step 3. The gradients of what the loss depends on beside the outputs enter once, before all others.

        DDP reduces in the last chunk of the last tower that calls it, FSDP2 in the last chunk of each that does.
        """
        if self._used:
            raise RuntimeError("a batch must be replayed once, got a second backward pass; make the step again")
        self._used = True
        go_backward = self._reduction.sender(backward)
        _check_unchanged(self._kept)

        before: list[tuple[Tensor, int]] = []

        def send(terms: Sequence[Tensor]) -> bool:
            if not terms:
                return False
            surrogate = reduce(torch.add, [term.to(terms[0].device) for term in terms])
            surrogate = surrogate if upstream is None else upstream.to(surrogate.device) * surrogate
            before[:] = _versions(x for x, _ in self._kept)
            go_backward(surrogate)
            return True

        after = RandomState(self._devices)
        start = 0
        with self._reduction.quiet():
            ran = send([_term(*x) for x in outside])
        try:
            for i, tower in enumerate(self._towers):
                mine = slice(start, start + len(tower.rows[0]))
                own, embeddings, start = gradients[mine], self.outputs[mine], mine.stop
                at, learnt = [0] * len(own), False
                for j, chunk in enumerate(zip(*tower.inputs, strict=True)):
                    if not tower.learns[j]:
                        at = [x + (rows or 0) for x, rows in zip(at, tower.rows[j], strict=True)]
                        continue
                    last = j == len(tower.rows) - 1
                    _check_unchanged(before)  # a hook may step an optimizer in each backward pass
                    with self._reduction.quiet(i if last else None):
                        terms = self._again(tower, j, chunk, own, embeddings, at)
                    if j == 0 and self._reduction.ddp:
                        self._reduction.check_reached([leaf for term in terms for leaf in leaves(term)])
                    with self._reduction.completed(i) if last else self._reduction.quiet():
                        sent = send(terms)
                    learnt, ran = learnt or sent, ran or sent
                    if last and learnt and not sent and self._reduction.fsdp:
                        raise RuntimeError(
                            "FSDP2 must reduce in the backward pass of the last chunk, got one in which nothing learns "
                            "after others in which something does; put it first, or use DDP"
                        )
        finally:
            after.restore()
            self._reduction.reshard()
            self._steps.remove()
        _check_repeated(self._differences)
        if not ran:
            raise RuntimeError("something must require a gradient, got none from encode or loss; unfreeze a parameter")

    def _again(
        self,
        tower: _Tower,
        j: int,
        chunk: Any,
        gradients: Sequence[Tensor | None],
        embeddings: Sequence[Tensor],
        at: list[int],
    ) -> list[Tensor]:
        """One chunk's terms ``<output, gradient>``, with the random numbers and the autocast of the first pass.

        Raises:
            ValueError: the embeddings of the first chunk in which something learns are not those of the first pass.
        """
        tower.states[j].restore()
        with self._autocast.again():
            outputs = _outputs(tower.encode(*chunk))
        if self._repeatable:
            for x, before, rows, start in zip(outputs, embeddings, tower.rows[j], at, strict=True):
                first = before if rows is None else before[start : start + rows]
                self._differences += _difference(x, first, self._autocast.epsilon)
            if j == tower.learns.index(True):
                # of the others at the end: each would wait for the device
                _check_repeated(self._differences)
        terms = []
        for k, (x, rows, gradient) in enumerate(zip(outputs, tower.rows[j], gradients, strict=True)):
            part = gradient
            if rows is not None:
                part = None if gradient is None else gradient[at[k] : at[k] + rows]
                at[k] += rows
            # a number's gradient enters once
            if x.requires_grad and (rows is not None or j == len(tower.rows) - 1):
                dtype = float32_at_least(x.dtype)
                # first the copy, from page-locked memory, which a conversion on the host would leave
                if part is not None:
                    terms.append(_term(x, part.to(x.device, non_blocking=True).to(dtype)))
                elif self._reduction:
                    # whoever reduces waits for a gradient of every parameter
                    terms.append(_term(x, torch.zeros_like(x, dtype=dtype)))
        return terms


def _term(x: Tensor, gradient: Tensor) -> Tensor:
    if x.shape != gradient.shape:
        raise ValueError(
            f"encode must return the same shapes both times, got {tuple(x.shape)} where it was "
            f"{tuple(gradient.shape)}; let the chunk alone decide them"
        )
    # the product is in the gradient's dtype, at least float32: an upstream factor meets it before it is narrowed
    return (x.to(gradient.dtype) * gradient).sum()


def _difference(x: Tensor, before: Tensor, epsilon: float) -> list[Tensor]:
    """By what part of what is allowed an output differs from that of the first pass, and its part of the norm.

    Kernels that add in any order change roundings; the square root of a rounding is far above that, and far below what
    another dropout mask changes. NaN is the caller's.
    """
    if x.shape != before.shape or not x.is_floating_point():
        return []
    before = before.detach().to(x.device, non_blocking=True)
    part = (x.detach().to(before.dtype) - before).norm() / before.norm()
    return [torch.stack([part / max(epsilon, torch.finfo(x.dtype).eps) ** 0.5, part])]


def _check_repeated(differences: list[Tensor]) -> None:
    """Raise ValueError where an encoder has returned other numbers than before: their gradient is not the loss's."""
    found = [x.tolist() for x in differences]
    differences.clear()
    for excess, part in found:
        if excess > 1:
            raise ValueError(
                f"encode must return the same embeddings both times, got a chunk that differs by {part:.2g} of its "
                "norm; draw from torch's, NumPy's or Python's own generators, which are put back, or reset yours in "
                "encode; call torch.backends.mha.set_fastpath_enabled(False) for nn.TransformerEncoder in eval"
            )


def _fetched(x: Tensor, stagings: dict[torch.device, Staging]) -> Tensor:
    """Start to copy an embedding to the host, while the next chunk is encoded; a number stays where it is."""
    if x.ndim < 2:
        return x
    if x.device not in stagings:
        stagings[x.device] = Staging(x.device, torch.device("cpu"))
    kept = stagings[x.device].kept(x, dtype_name(x.dtype))
    stagings[x.device].store(x.detach(), kept)
    return kept


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The chunks' rows in one tensor, page-locked where they are."""
    first = parts[0]
    if not (first.device.type == "cpu" and first.is_pinned()):
        return torch.cat(list(parts))
    whole = torch.empty((sum(map(len, parts)), *first.shape[1:]), dtype=first.dtype, device="cpu", pin_memory=True)
    return torch.cat(list(parts), out=whole)


def _same(numbers: Sequence[Tensor]) -> Tensor:
    """The number that every chunk returned; a loss takes it once."""
    if len(numbers) > 1:
        found = torch.stack(list(numbers))
        if not bool(((found == found[0]) | found.isnan()).all()):
            raise ValueError(
                f"a number that encode returns must be the same for every chunk, as a scale is, got "
                f"{found.min().item():g} to {found.max().item():g}; return a number per sample as (samples, 1)"
            )
    return numbers[-1]


@contextmanager
def _explained(chunk: tuple[Any, ...]) -> Iterator[None]:
    """Where an encoder fails at a chunk without samples, raise an error that says what it must do."""
    try:
        yield
    except RuntimeError as error:
        try:
            some = any(map(samples, chunk))
        except (TypeError, ValueError):  # of a caller's splitter
            some = True
        if some:
            raise
        raise RuntimeError(
            "encode must take a chunk without samples, of first dimension 0, since there are none on this rank, got "
            f"{type(error).__name__}; encode one sample of any values for it, and return its embedding[:0]"
        ) from error


def _outputs(found: Any) -> list[Tensor]:
    outputs = list(found) if isinstance(found, tuple | list) else [found]
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


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Tensors, and how often each has been changed in place; those of inference mode do not count it."""
    return [(x, x._version) for x in tensors if not x.is_inference()]


def _count_step(kept: set[int], optimizer: Optimizer, *_: Any) -> None:
    """Count an optimizer's step as a change in place of those that it moves: a fused one does not."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if id(p) in kept and p.grad is not None:
            torch.autograd.graph.increment_version(p)


def _check_unchanged(kept: Iterable[tuple[Tensor, int]]) -> None:
    """Raise for inputs and parameters that were changed in place since, other than by a forward."""
    if any(x._version != version for x, version in kept):
        raise ValueError(
            "inputs and parameters must stay as they are until the second pass has read them again, got some that were "
            "changed in place; write x - mean instead of x.sub_(mean), and step the optimizer afterwards, in no hook"
        )


def _towers(encode: Encode, inputs: Any, chunk: Chunk, split: Splitter | None) -> list[_Tower]:
    # a list is one input of one callable, or the inputs of several
    several = isinstance(inputs, tuple) or (not callable(encode) and isinstance(inputs, list))
    given = inputs if several else (inputs,)
    if not callable(encode) and len(encode) != len(given):
        raise ValueError(
            f"encode must have one callable per input, got {len(encode)} for {len(given)} inputs; name a shared one "
            "twice, give a tuple of inputs, and a scale as scale="
        )
    if not given:
        raise ValueError("inputs must be one per tower, got none; give the batch")
    sizes = list(chunk) if isinstance(chunk, Sequence) else [chunk] * len(given)
    if len(sizes) != len(given):
        raise ValueError(f"chunk must be one size, or one per input, got {len(sizes)} for {len(given)}; give one size")
    cuts = [cut(x, size, split) for x, size in zip(given, sizes, strict=True)]
    if not callable(encode):
        return [_Tower(each, [chunks]) for each, chunks in zip(encode, cuts, strict=True)]
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
    """Raise TypeError for a backward that cannot be called."""
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
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss must return a tensor of one element, got {got}; take its mean, or pick it out")
    return value


def numbers_of(scale: Any) -> list[Any]:
    """What the loss takes after the embeddings."""
    found = []
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
        found.append(value)
    return found
