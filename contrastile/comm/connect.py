"""The communicator of a user's group."""

from __future__ import annotations

from typing import Any

from contrastile.backends.registry import require
from contrastile.comm.communicator import Communicator


def connect(group: Any, *, deadline: float | None = None) -> Communicator:
    """The communicator of a group.

    Args:
        group: a Communicator, a torch.distributed ProcessGroup, "world" for torch.distributed's default group, a
            DeviceMesh of one dimension, or an mpi4py communicator. Each group gets one communicator, which is kept. It
            has a channel of its own, so its messages never mix with the program's. All ranks of a group must make the
            first call for it.
        deadline: the seconds after which a rank that waits for another raises; None keeps the current value, which is
            initially that of the environment variable CONTRASTILE_DEADLINE, or 60.

    Raises:
        TypeError: the group is none of these.
        ValueError: the deadline is not a positive number of seconds, or one is given for a Communicator, which has
            its own; or the mesh has several dimensions.
        MismatchError: in the first call for a group, on every rank: some rank's deadline is not a positive number of
            seconds. The group can be connected again.
        ExchangeError: "world" without an initialised default group.
        BackendUnavailableError: "world" without torch.
    """
    package = type(group).__module__.partition(".")[0]
    is_world = isinstance(group, str) and group == "world"
    if is_world:
        require("group='world'", "torch")
    if is_world or package == "torch":
        from contrastile.comm import torch_group

        return torch_group.of(group, deadline)
    if package == "mpi4py":
        from contrastile.comm import mpi

        return mpi.of(group, deadline)
    if isinstance(group, str) or not hasattr(group, "shift"):
        raise TypeError(
            "group must be a torch.distributed group or mesh, 'world', an mpi4py communicator or a contrastile "
            f"Communicator, got {group!r}; pass e.g. group='world', or a group that this rank is in"
        )
    if deadline is not None:
        raise ValueError(f"deadline must be None for a Communicator, got {deadline!r}; it has its own")
    communicator: Communicator = group
    return communicator
