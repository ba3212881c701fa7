"""The settings of a call, and the plan that the public losses make from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Backend, Options
from contrastile.backends.registry import load
from contrastile.schedules.problem import Problem

Tile = int | tuple[int, int] | None


class Settings(TypedDict, total=False):
    """The keyword arguments that every loss, ``value_and_grad`` and the modules of ``contrastile.nn`` take.

    Attributes:
        backend: "auto", a name from ``contrastile.backends.names()``, or "module:attribute" for a backend of your own.
        tile: largest tile of logits to hold, a number or (rows, columns); None lets the backend choose.
        precision: how float32 features are multiplied: "auto" in the backend's fastest way that rounds no more than
            float32 does; "ieee" in float32; "tf32" with factors rounded to nearest tf32; "split" as parts on tensor
            cores. A backend refuses a precision that it does not have.
        workspace: MiB in which triton and cupy form the logits' gradient, chunk by chunk; None for
            CONTRASTILE_WORKSPACE_MIB, or 512. Other backends ignore it.
        keep: MiB of exponentials that cupy, and torch on a CPU, may keep from the forward for the backward pass. None
            means CONTRASTILE_KEEP_MIB. Without it cupy keeps what fits in the workspace, if that makes a step faster,
            and torch keeps all or nothing, up to 64 MiB. Other backends ignore it.
        group: the processes that share the batch: a torch.distributed group, "world" for its default group, a
            DeviceMesh of one dimension, or an mpi4py communicator; every rank passes its own part. None means this
            process alone.
        exchange: "ring" passes the columns around (O(b d / n) memory per rank); "gather" collects them (O(b d));
            "two-level" collects the columns of one host at a time and passes them from host to host; "replicate" also
            collects the rows, in one message, and computes the whole loss on each rank; "auto" chooses by sizes, hosts
            and device. All give the same loss.
        parameter_reduction: how the trainer reduces the parameters' gradients over the ranks: "mean" (as DDP and FSDP
            do) or "sum". The reduced gradient is that of the global loss, for the encoders, scale and bias.
        device: the device, e.g. "cuda", that computes the loss of torch features on the host, block by block, copying
            each block while computing the one before. The gradients are on the host. None means the features' device.
        block: the largest number of rows, and of columns, on the device at a time, for features on the device or the
            host; None for all at once, or 65,536 for features on the host. It determines the order of the sums.
    """

    backend: str
    tile: Tile
    precision: str
    workspace: int | None
    keep: int | None
    group: Any
    exchange: str
    parameter_reduction: str
    device: Any
    block: int | None


DEFAULTS: Settings = {
    "backend": "auto",
    "tile": None,
    "precision": "auto",
    "workspace": None,
    "keep": None,
    "group": None,
    "exchange": "auto",
    "parameter_reduction": "mean",
    "device": None,
    "block": None,
}

AnySettings = Settings | dict[str, Any]


def complete(settings: AnySettings) -> dict[str, Any]:
    """The settings, completed with the defaults.

    Raises:
        TypeError: a setting is unknown.
    """
    completed: dict[str, Any] = {**DEFAULTS, **settings}
    if len(completed) != len(DEFAULTS):
        unknown = next(name for name in settings if name not in DEFAULTS)
        if unknown == "temperature":
            raise TypeError("a loss must be given its scale, got a temperature; pass scale = 1 / temperature")
        raise TypeError(
            f"keyword arguments must be the call's own or one of {', '.join(DEFAULTS)}, got {unknown!r}; "
            "check its spelling, or help() of the call"
        )
    return completed


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compute, with which backend and which options.

    Attributes:
        problem: the loss as data: arrays of the caller's library, the kind of loss, and this rank's placement.
        name: the backend's name.
        library: the caller's array library.
        form: the plan of the gradients without arrays, if an earlier call has made it: see ``split``.
    """

    problem: Problem
    name: str
    options: Options
    library: ArrayLibrary
    form: Plan | None = None

    @property
    def backend(self) -> Backend:
        """The backend, loaded on first use; a compiler that traces never uses it.

        Raises:
            ValueError, BackendUnavailableError, TypeError: see ``registry.load``.
        """
        return load(self.name)

    def with_arrays(self, arrays: Sequence[Any]) -> Plan:
        """The plan with other arrays, in the order of ``Problem.arrays``."""
        return Plan(self.problem.with_arrays(arrays), self.name, self.options, self.library)

    def without_arrays(self) -> Plan:
        """The plan with None for each array: a stored plan then holds no memory."""
        return self.with_arrays([None] * len(self.problem.arrays()))

    def split(self) -> tuple[Plan, tuple[Any, ...]]:
        """The plan of the gradients without its arrays, and these arrays."""
        problem = self.problem.for_gradients()
        form = self.form or replace(self, problem=problem).without_arrays()
        return form, problem.arrays()
