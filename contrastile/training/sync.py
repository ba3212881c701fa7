"""Data-parallel encoders: gradients are reduced once per step, in the last backward pass, instead of per chunk."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Sync = str | nn.Module | Sequence[nn.Module] | None


def modules_of(*callables: Any) -> list[nn.Module]:
    """The modules that callables are, are bound to, or name, also in lists and dicts: methods, partials, closures."""
    found: dict[int, nn.Module] = {}
    seen: dict[int, int] = {}
    # a function within this one would hold itself, and the modules, until the garbage collector runs
    for each in callables:
        _visit(each, 3, found, seen)
    return list(found.values())


def _visit(x: Any, depth: int, found: dict[int, nn.Module], seen: dict[int, int]) -> None:
    """Add the modules of x to those found."""
    if seen.get(id(x), -1) >= depth:  # a shorter way leads further
        return
    seen[id(x)] = depth
    below: Iterable[Any] = ()
    if isinstance(x, nn.Module):
        found[id(x)] = x
    elif isinstance(x, functools.partial):
        below = (x.func, *x.args, *x.keywords.values())
    elif inspect.ismethod(x):
        below = (x.__self__, x.__func__)
    elif inspect.isfunction(x):
        with suppress(ValueError):  # a variable that has no value yet
            names = inspect.getclosurevars(x)
            depth, below = depth - 1, (*names.nonlocals.values(), *names.globals.values())
    elif isinstance(x, dict | list | tuple | set):
        # a table of data is no list of modules
        below = itertools.islice(x.values() if isinstance(x, dict) else x, 100)
    elif not inspect.isclass(x) and not inspect.ismodule(x) and hasattr(x, "__dict__"):
        depth, below = depth - 1, (y for y in vars(x).values() if isinstance(y, nn.Module | dict | list | tuple))
    for each in below:
        _visit(each, depth, found, seen)


class Reduction:
    """The DDP and FSDP2 modules, and the DeepSpeed engine, of a step.

    Attributes:
        ddp: modules whose forward and backward reduce, outside ``no_sync``.
        fsdp: modules that ``fully_shard`` was called on.
        engines: of DeepSpeed, at most one, which makes its backward passes itself.
    """

    def __init__(self, sync: Sync, encoders: Sequence[Callable[..., Any]]) -> None:
        """Find the modules, for ``sync`` of ``cached_step`` in the encoders.

        Raises:
            ValueError: ``sync`` is invalid, nobody would reduce the gradients, or an engine does that is
                not known to work.
        """
        self._auto = sync == "auto"
        if sync is None or self._auto:
            roots = modules_of(*encoders)
        else:
            named: list[Any] = list(sync) if isinstance(sync, list | tuple) else [sync]
            for each in named:
                if not isinstance(each, nn.Module):
                    raise ValueError(
                        f"sync must be 'auto', None, or the DDP or FSDP2 modules, got {each!r}; leave it out"
                    )
            roots = named
        inside = list(dict.fromkeys(module for root in roots for module in root.modules()))
        for module in inside:
            refuse(module)
        if sync is None or not dist.is_available():
            inside = []
        self.ddp = [m for m in inside if isinstance(m, nn.parallel.DistributedDataParallel)]
        self.fsdp = [m for m in inside if hasattr(m, "set_requires_gradient_sync")]
        self.engines: list[Any] = [m for m in inside if _is_a(m, "DeepSpeedEngine")]
        if (count := len(self.engines)) > 1:
            raise ValueError(f"sync must find one DeepSpeed engine, got {count}; put the towers into one model")
        self._between = False
        self._called: dict[nn.Module, set[int]] = {}
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if sync is not None and not self and not alone and torch.is_grad_enabled():
            where = "encode" if self._auto else "the modules that it names"
            raise ValueError(
                f"sync must find the DDP or FSDP2 modules whose gradients are reduced, got none in {where} on one of "
                f"{dist.get_world_size()} ranks; pass the wrapped module itself as encode, name it by sync=, or give "
                "sync=None and reduce the gradients yourself"
            )

    def __bool__(self) -> bool:
        return bool(self.ddp or self.fsdp or self.engines)

    @contextmanager
    def quiet(self, tower: int | None = None) -> Iterator[None]:
        """Suppress reduction: ``no_sync`` for DDP, ``set_requires_gradient_sync(False)`` for FSDP2; restored after.

        To a DeepSpeed engine it is no boundary of an accumulation; ZeRO 2 reduces all the same.

        Args:
            tower: DDP modules and engines that this tower is the last to call are left as they are.
        """
        with ExitStack() as stack:
            stack.enter_context(self._unfinished(tower))
            for module in self.ddp:
                if tower is None or max(self._called[module]) != tower:
                    stack.enter_context(module.no_sync())
            for group in self._groups():
                stack.callback(setattr, group, "reduce_grads", group.reduce_grads)
                stack.callback(setattr, group, "all_reduce_grads", group.all_reduce_grads)
                group.reduce_grads = group.all_reduce_grads = False
            yield

    @contextmanager
    def _unfinished(self, tower: int | None) -> Iterator[None]:
        """A DeepSpeed engine is at no boundary of its accumulation, unless this tower is the last to call it."""
        engines = [x for x in self.engines if tower is None or max(self._called[x]) != tower]
        before, outer = [x._is_gradient_accumulation_boundary for x in engines], self._between
        self._between = outer or bool(engines)
        for engine in engines:
            engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._between = outer
            for engine, boundary in zip(engines, before, strict=True):
                # None where the engine counts by itself
                engine._is_gradient_accumulation_boundary = boundary

    def _groups(self) -> Iterator[Any]:
        for module in self.fsdp:
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)
            # torch before 2.10 has one group for each module
            yield from [x for x in (groups if groups is not None else [state._fsdp_param_group]) if x is not None]

    def reshard(self) -> None:
        """Bring FSDP2's parameters back to where its optimizer has them: a forward without a backward leaves them."""
        for module in self.fsdp:
            module.reshard()  # type: ignore[operator]

    def sender(self, backward: Callable[[torch.Tensor], Any] | None) -> Callable[[torch.Tensor], Any]:
        """What makes the backward passes; ValueError where it is a caller's, and an engine must."""
        owner = getattr(backward, "__self__", None)
        others = isinstance(owner, nn.Module) and _is_a(owner, "DeepSpeedEngine")
        if backward is not None and (self.engines or others) and owner not in self.engines:
            raise ValueError(
                f"backward must be left out with DeepSpeed, whose engine makes it, got {backward!r}; pass the engine "
                "as encode, and to accelerate's backward the loss of Cached"
            )
        return self._by_engine if self.engines else backward or torch.autograd.backward

    def _by_engine(self, surrogate: torch.Tensor) -> None:
        """A backward pass of the engine, or a part of the one that it is making."""
        engine = self.engines[0]
        if not engine._running_engine_backward:
            engine.backward(surrogate)
            return
        # a hook of the engine's outputs would divide by it again
        if (steps := engine.gradient_accumulation_steps()) > 1:
            raise RuntimeError(
                f"gradient_accumulation_steps must be 1 for engine.backward of a loss of Cached, got {steps}; call "
                "loss.backward(), or cached_step"
            )
        torch.autograd.backward(surrogate)
        if self._between:
            engine._backward_epilogue()

    @contextmanager
    def watch(self, tower: int, encode: Any) -> Iterator[None]:
        """Record the DDP modules and engines that a tower's first pass calls."""
        itself = (encode, getattr(encode, "_orig_mod", None))

        def record(module: nn.Module, *_: Any) -> None:
            self._called.setdefault(module, set()).add(tower)

        with ExitStack() as stack:
            for module in (*self.ddp, *self.engines):
                if any(module is x for x in itself):
                    record(module)
                else:
                    stack.callback(module.register_forward_pre_hook(record).remove)
            yield

    def check_called(self) -> None:
        """Raise for a DDP module or engine that could not reduce; after the first pass, before any gradient.

        Raises:
            ValueError: no encoder called it.
        """
        for module in (*self.ddp, *self.engines):
            if module not in self._called and torch.is_grad_enabled():
                what = "DDP module" if module in self.ddp else "DeepSpeed engine"
                raise ValueError(
                    f"encode must call the {what} itself, got a call around its forward ({_name(module)}), after "
                    f"which no gradient is reduced; pass the {what} as encode, not its .module or a method of it, or "
                    "name those of this step by sync="
                )

    def check_reached(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raise for parameters beside DDP's in what an encoder computed, unless ``sync`` names the modules.

        Raises:
            RuntimeError: no rank would get their gradient of the whole batch.
        """
        if not self._auto or self.fsdp or dist.get_world_size() == 1:
            return
        reduced = {id(parameter) for module in self.ddp for parameter in module.parameters()}
        beside = [x for x in leaves if isinstance(x, nn.Parameter) and id(x) not in reduced]
        if beside:
            raise RuntimeError(
                f"encode must have all its parameters in DDP, got {len(beside)} outside, such as one of shape "
                f"{tuple(beside[0].shape)}, which each rank would update by itself; wrap them too, or name the DDP "
                "modules by sync= and reduce the others yourself"
            )

    @contextmanager
    def completed(self, tower: int) -> Iterator[None]:
        """Around a tower's last backward pass: DDP modules that no later tower calls reduce every parameter.

        Also those that only earlier passes reached, such as a scale, or another tower's: DDP would wait for them
        silently.

        Raises:
            RuntimeError: a parameter has no gradient at all, where DDP was not told to look for unused ones.
        """
        owed = [m for m in self.ddp if max(self._called[m]) == tower and m.require_backward_grad_sync]
        waiting = [
            {
                name: x
                for name, x in m.module.named_parameters()
                if x.requires_grad and name not in m.parameters_to_ignore
            }
            for m in owed
        ]
        everything = list(map(len, waiting))
        with ExitStack() as stack:
            stack.enter_context(self._unfinished(tower))
            for missing in waiting:
                for name, x in list(missing.items()):

                    def reached(_: torch.Tensor, missing: dict[str, Any] = missing, name: str = name) -> None:
                        missing.pop(name, None)

                    stack.callback(x.register_post_accumulate_grad_hook(reached).remove)
            yield
        for module, missing, count in zip(owed, waiting, everything, strict=True):
            late = [x for x in missing.values() if x.grad is not None]
            if module.find_unused_parameters:
                if len(missing) < count:
                    continue  # which DDP itself completes
                # nothing learns in the last chunk: DDP is told of the parameters that earlier ones reached
                late = [x.view_as(x) for x in late or missing.values()]
                module.reducer.prepare_for_backward(late)
            elif len(late) < len(missing):
                unused = [name for name, x in missing.items() if x.grad is None]
                raise RuntimeError(
                    f"DDP must find a gradient of every parameter, got none of {', '.join(unused)}; use them, freeze "
                    "them, or make DDP with find_unused_parameters=True"
                )
            if late:
                torch.autograd.backward(late, [torch.zeros_like(x) for x in late])

    def agree(self, counts: list[int]) -> list[int]:
        """The largest numbers of chunks on any rank, where FSDP2's forward gathers or ZeRO 2's backward reduces."""
        if not (self.fsdp or self.engines) or not dist.is_initialized():
            return counts
        parameters = (p for module in self.fsdp for p in module.parameters())
        mesh: Any = next(filter(None, (getattr(p, "device_mesh", None) for p in parameters)), None)
        device = mesh.device_type if mesh else self.engines[0].device if self.engines else "cpu"
        most = torch.tensor(counts, device=device)
        for group in [mesh.get_group(i) for i in range(mesh.ndim)] if mesh else [None]:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        found: list[int] = most.tolist()
        return found


def refuse(module: nn.Module) -> None:
    """Raise for engines whose way of reducing is not supported."""
    kind = type(module).__name__
    if kind == "FullyShardedDataParallel":
        raise ValueError("encode must not be FSDP1, got FullyShardedDataParallel; use fully_shard (FSDP2) or DDP")
    if isinstance(module, nn.parallel.DistributedDataParallel) and module.static_graph:
        raise ValueError(
            f"DDP must have static_graph=False, got True ({_name(module)}), which counts the chunks' backward passes "
            "that reduce nothing; drop it"
        )
    if getattr(getattr(module, "_join_config", None), "enable", False):
        raise ValueError(
            f"DDP must be outside of Join, got one inside ({_name(module)}), where each chunk is a message of its own; "
            "give all ranks equally many batches, whose sizes may differ"
        )
    if _is_a(module, "InferenceEngine") or _is_a(module, "PipelineEngine"):
        raise ValueError(
            f"DeepSpeed must train by its DeepSpeedEngine, got {kind}; use what deepspeed.initialize gives"
        )
    if not _is_a(module, "DeepSpeedEngine"):
        return
    engine: Any = module
    if engine.zero_optimization_stage() > 2:
        raise ValueError(
            f"DeepSpeed must be at ZeRO stage 0 to 2, got stage {engine.zero_optimization_stage()}, which takes each "
            "chunk's backward pass for a whole step's; use FSDP2"
        )
    if not hasattr(engine, "_running_engine_backward"):
        raise ValueError("DeepSpeed must say when it goes backward, got a version that does not; upgrade it")


def _is_a(module: nn.Module, name: str) -> bool:
    """Whether it is of a class of DeepSpeed, without an import of it."""
    return any(each.__name__ == name for each in type(module).__mro__)


def _name(module: Any) -> str:
    return type(module.module).__name__
