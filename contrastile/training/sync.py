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
    """The modules that the callables are, are bound to or refer to, by methods, partials, closures and containers."""
    modules: dict[int, nn.Module] = {}
    depths: dict[int, int] = {}
    # a nested recursive function would be a reference cycle, which keeps the modules alive
    for function in callables:
        _collect_modules(function, 3, modules, depths)
    return list(modules.values())


def _collect_modules(x: Any, depth: int, modules: dict[int, nn.Module], depths: dict[int, int]) -> None:
    """Add the modules that x leads to, through at most ``depth`` functions and attributes, to ``modules``."""
    if depths.get(id(x), -1) >= depth:  # x was searched before, as deep
        return
    depths[id(x)] = depth
    children: Iterable[Any] = ()
    if isinstance(x, nn.Module):
        modules[id(x)] = x
    elif isinstance(x, functools.partial):
        children = (x.func, *x.args, *x.keywords.values())
    elif inspect.ismethod(x):
        children = (x.__self__, x.__func__)
    elif inspect.isfunction(x):
        with suppress(ValueError):  # a variable of the closure has no value yet
            variables = inspect.getclosurevars(x)
            depth, children = depth - 1, (*variables.nonlocals.values(), *variables.globals.values())
    elif isinstance(x, dict | list | tuple | set):
        # 100 items suffice, because a longer container holds data, not modules
        children = itertools.islice(x.values() if isinstance(x, dict) else x, 100)
    elif not inspect.isclass(x) and not inspect.ismodule(x) and hasattr(x, "__dict__"):
        depth, children = depth - 1, (y for y in vars(x).values() if isinstance(y, nn.Module | dict | list | tuple))
    for child in children:
        _collect_modules(child, depth, modules, depths)


class Reduction:
    """The DDP and FSDP2 modules, and the DeepSpeed engine, of a step.

    Attributes:
        ddp: DDP modules, whose backward passes reduce outside ``no_sync``.
        fsdp: modules that ``fully_shard`` was called on.
        engines: DeepSpeed engines, at most one, which runs backward passes itself.
    """

    def __init__(self, sync: Sync, encoders: Sequence[Callable[..., Any]]) -> None:
        """Find the modules in the encoders, or take those that ``sync`` names: see ``cached_step``.

        Raises:
            ValueError: ``sync`` is invalid, nothing would reduce the gradients, or a module reduces them in a way that
                is not supported.
        """
        self._is_auto = sync == "auto"
        if sync is None or self._is_auto:
            roots = modules_of(*encoders)
        else:
            named_modules: list[Any] = list(sync) if isinstance(sync, list | tuple) else [sync]
            for module in named_modules:
                if not isinstance(module, nn.Module):
                    raise ValueError(
                        f"sync must be 'auto', None, or the DDP or FSDP2 modules, got {module!r}; leave it out"
                    )
            roots = named_modules
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        for module in modules:
            refuse(module)
        if sync is None or not dist.is_available():
            modules = []
        self.ddp = [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]
        self.fsdp = [m for m in modules if hasattr(m, "set_requires_gradient_sync")]
        self.engines: list[Any] = [m for m in modules if _has_class(m, "DeepSpeedEngine")]
        if (count := len(self.engines)) > 1:
            raise ValueError(f"sync must find one DeepSpeed engine, got {count}; put the towers into one model")
        self._is_accumulating = False
        self._callers: dict[nn.Module, set[int]] = {}
        is_single_rank = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if sync is not None and not self and not is_single_rank and torch.is_grad_enabled():
            where = "encode" if self._is_auto else "the modules that it names"
            raise ValueError(
                f"sync must find the DDP or FSDP2 modules whose gradients are reduced, got none in {where} on one of "
                f"{dist.get_world_size()} ranks; pass the wrapped module itself as encode, name it by sync=, or give "
                "sync=None and reduce the gradients yourself"
            )

    def __bool__(self) -> bool:
        return bool(self.ddp or self.fsdp or self.engines)

    @contextmanager
    def no_reduction(self, tower: int | None = None) -> Iterator[None]:
        """Suspend reduction: ``no_sync`` for DDP, ``set_requires_gradient_sync(False)`` for FSDP2; undone on exit.

        A DeepSpeed engine is told that this is no boundary of its accumulation; ZeRO 2 reduces nevertheless.

        Args:
            tower: DDP modules and engines that this tower is the last to call still reduce.
        """
        with ExitStack() as stack:
            stack.enter_context(self._inside_accumulation(tower))
            for module in self.ddp:
                if tower is None or max(self._callers[module]) != tower:
                    stack.enter_context(module.no_sync())
            for group in self._fsdp_groups():
                stack.callback(setattr, group, "reduce_grads", group.reduce_grads)
                stack.callback(setattr, group, "all_reduce_grads", group.all_reduce_grads)
                group.reduce_grads = group.all_reduce_grads = False
            yield

    @contextmanager
    def _inside_accumulation(self, tower: int | None) -> Iterator[None]:
        """Tell the DeepSpeed engine that this is no boundary of its accumulation, unless this tower calls it last."""
        engines = [x for x in self.engines if tower is None or max(self._callers[x]) != tower]
        boundaries, was_accumulating = [x._is_gradient_accumulation_boundary for x in engines], self._is_accumulating
        self._is_accumulating = was_accumulating or bool(engines)
        for engine in engines:
            engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._is_accumulating = was_accumulating
            for engine, boundary in zip(engines, boundaries, strict=True):
                # None means that the engine counts steps by itself
                engine._is_gradient_accumulation_boundary = boundary

    def _fsdp_groups(self) -> Iterator[Any]:
        for module in self.fsdp:
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)
            # torch before 2.10 has one group for each module
            yield from [x for x in (groups if groups is not None else [state._fsdp_param_group]) if x is not None]

    def reshard(self) -> None:
        """Shard FSDP2's parameters again, as its optimizer needs them: a forward without a backward gathers them."""
        for module in self.fsdp:
            module.reshard()  # type: ignore[operator]

    def backward_function(self, backward: Callable[[torch.Tensor], Any] | None) -> Callable[[torch.Tensor], Any]:
        """The function that runs a backward pass; ValueError if the caller gave one where an engine must run it."""
        owner = getattr(backward, "__self__", None)
        is_of_engine = isinstance(owner, nn.Module) and _has_class(owner, "DeepSpeedEngine")
        if backward is not None and (self.engines or is_of_engine) and owner not in self.engines:
            raise ValueError(
                f"backward must be left out with DeepSpeed, whose engine makes it, got {backward!r}; pass the engine "
                "as encode, and to accelerate's backward the loss of Cached"
            )
        return self._engine_backward if self.engines else backward or torch.autograd.backward

    def _engine_backward(self, surrogate: torch.Tensor) -> None:
        """Run a backward pass of the engine, or a part of the one that the engine is running."""
        engine = self.engines[0]
        if not engine._running_engine_backward:
            engine.backward(surrogate)
            return
        # a hook on the engine's outputs would divide by the number of steps a second time
        if (steps := engine.gradient_accumulation_steps()) > 1:
            raise RuntimeError(
                f"gradient_accumulation_steps must be 1 for engine.backward of a loss of Cached, got {steps}; call "
                "loss.backward(), or cached_step"
            )
        torch.autograd.backward(surrogate)
        if self._is_accumulating:
            engine._backward_epilogue()

    @contextmanager
    def watch(self, tower: int, encode: Any) -> Iterator[None]:
        """Record which DDP modules and engines a tower's first pass calls."""
        encoder_modules = (encode, getattr(encode, "_orig_mod", None))

        def record(module: nn.Module, *_: Any) -> None:
            self._callers.setdefault(module, set()).add(tower)

        with ExitStack() as stack:
            for module in (*self.ddp, *self.engines):
                if any(module is x for x in encoder_modules):
                    record(module)
                else:
                    stack.callback(module.register_forward_pre_hook(record).remove)
            yield

    def check_called(self) -> None:
        """Check, after the first pass, that an encoder called each DDP module and engine: it reduces only if called.

        Raises:
            ValueError: no encoder called a module.
        """
        for module in (*self.ddp, *self.engines):
            if module not in self._callers and torch.is_grad_enabled():
                kind = "DDP module" if module in self.ddp else "DeepSpeed engine"
                raise ValueError(
                    f"encode must call the {kind} itself, got a call around its forward ({_inner_name(module)}), "
                    f"after which no gradient is reduced; pass the {kind} as encode, not its .module or a method of "
                    "it, or name those of this step by sync="
                )

    def check_reached(self, leaves: Sequence[torch.Tensor]) -> None:
        """Check that an encoder's outputs depend on no parameters outside DDP, unless ``sync`` names the modules.

        Raises:
            RuntimeError: they do, so that no rank would get those parameters' gradients of the whole batch.
        """
        if not self._is_auto or self.fsdp or dist.get_world_size() == 1:
            return
        reduced = {id(parameter) for module in self.ddp for parameter in module.parameters()}
        outside = [x for x in leaves if isinstance(x, nn.Parameter) and id(x) not in reduced]
        if outside:
            raise RuntimeError(
                f"encode must have all its parameters in DDP, got {len(outside)} outside, such as one of shape "
                f"{tuple(outside[0].shape)}, which each rank would update by itself; wrap them too, or name the DDP "
                "modules by sync= and reduce the others yourself"
            )

    @contextmanager
    def last_backward(self, tower: int) -> Iterator[None]:
        """Let DDP modules that no later tower calls reduce every parameter in this tower's last backward pass.

        A parameter that only earlier passes reached, such as a scale, is sent zeros: DDP would wait for it silently.

        Raises:
            RuntimeError: a parameter has no gradient at all, and DDP was not told to look for unused ones.
        """
        modules = [m for m in self.ddp if max(self._callers[m]) == tower and m.require_backward_grad_sync]
        unreached = [
            {
                name: x
                for name, x in m.module.named_parameters()
                if x.requires_grad and name not in m.parameters_to_ignore
            }
            for m in modules
        ]
        counts = list(map(len, unreached))
        with ExitStack() as stack:
            stack.enter_context(self._inside_accumulation(tower))
            for missing in unreached:
                for name, x in list(missing.items()):

                    def reached(_: torch.Tensor, missing: dict[str, Any] = missing, name: str = name) -> None:
                        missing.pop(name, None)

                    stack.callback(x.register_post_accumulate_grad_hook(reached).remove)
            yield
        for module, missing, count in zip(modules, unreached, counts, strict=True):
            earlier = [x for x in missing.values() if x.grad is not None]
            if module.find_unused_parameters:
                if len(missing) < count:
                    continue  # DDP completes this pass by itself
                # the last chunk reached no parameter: DDP must reduce those that earlier chunks reached
                earlier = [x.view_as(x) for x in earlier or missing.values()]
                module.reducer.prepare_for_backward(earlier)
            elif len(earlier) < len(missing):
                unused = [name for name, x in missing.items() if x.grad is None]
                raise RuntimeError(
                    f"DDP must find a gradient of every parameter, got none of {', '.join(unused)}; use them, freeze "
                    "them, or make DDP with find_unused_parameters=True"
                )
            if earlier:
                torch.autograd.backward(earlier, [torch.zeros_like(x) for x in earlier])

    def agree(self, counts: list[int]) -> list[int]:
        """The largest counts of chunks on any rank, where FSDP2 or ZeRO 2 need equal counts; else those given."""
        if not (self.fsdp or self.engines) or not dist.is_initialized():
            return counts
        parameters = (p for module in self.fsdp for p in module.parameters())
        mesh: Any = next(filter(None, (getattr(p, "device_mesh", None) for p in parameters)), None)
        device = mesh.device_type if mesh else self.engines[0].device if self.engines else "cpu"
        largest = torch.tensor(counts, device=device)
        for group in [mesh.get_group(i) for i in range(mesh.ndim)] if mesh else [None]:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        result: list[int] = largest.tolist()
        return result


def refuse(module: nn.Module) -> None:
    """Raise ValueError for a module that reduces gradients in a way that is not supported."""
    kind = type(module).__name__
    if kind == "FullyShardedDataParallel":
        raise ValueError("encode must not be FSDP1, got FullyShardedDataParallel; use fully_shard (FSDP2) or DDP")
    if isinstance(module, nn.parallel.DistributedDataParallel) and module.static_graph:
        raise ValueError(
            f"DDP must have static_graph=False, got True ({_inner_name(module)}), which counts the chunks' "
            "backward passes that reduce nothing; drop it"
        )
    if getattr(getattr(module, "_join_config", None), "enable", False):
        raise ValueError(
            f"DDP must be outside of Join, got one inside ({_inner_name(module)}), where each chunk is a message "
            "of its own; give all ranks equally many batches, whose sizes may differ"
        )
    if _has_class(module, "InferenceEngine") or _has_class(module, "PipelineEngine"):
        raise ValueError(
            f"DeepSpeed must train by its DeepSpeedEngine, got {kind}; use what deepspeed.initialize gives"
        )
    if not _has_class(module, "DeepSpeedEngine"):
        return
    engine: Any = module
    if engine.zero_optimization_stage() > 2:
        raise ValueError(
            f"DeepSpeed must be at ZeRO stage 0 to 2, got stage {engine.zero_optimization_stage()}, which takes each "
            "chunk's backward pass for a whole step's; use FSDP2"
        )
    if not hasattr(engine, "_running_engine_backward"):
        raise ValueError("DeepSpeed must say when it goes backward, got a version that does not; upgrade it")


def _has_class(module: nn.Module, name: str) -> bool:
    """Whether the module's class or a base has this name: DeepSpeed need not be imported."""
    return any(cls.__name__ == name for cls in type(module).__mro__)


def _inner_name(module: Any) -> str:
    return type(module.module).__name__
