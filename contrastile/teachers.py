"""Losses with a teacher: the loss itself, and for each teacher a part that is linear in the logits.

Yang et al. 2024 (CLIP-KD, Eq. 7) and MobileCLIP (Eq. 2): the target of a row is the softmax of the teacher's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from contrastile import problems, validation
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Array
from contrastile.backends.objectives import TEACHER
from contrastile.comm.buffers import split
from contrastile.problems import LossProblem, Taught
from contrastile.schedules.handshake import ALONE, Handshake
from contrastile.schedules.local import Gradients

_EXCLUDED = (
    *("sum_positives", "label_smoothing", "margin", "threshold", "guide"),
    *("negative_counts", "share_negatives", "in_batch"),
)
"""The options that must have their defaults with a teacher."""
_PARAMETERS = signature(problems.info_nce).parameters


def parts(teacher: Any, share: float) -> Sequence[dict[str, Any]]:
    """The keywords of ``BUILDERS`` for each teacher; ``teacher`` is one, a sequence of them, or None."""
    if teacher is None:
        return ()
    are_several = isinstance(teacher, (tuple, list)) and teacher and isinstance(teacher[0], (tuple, list))
    teachers = teacher if are_several else [teacher]
    return [{"teacher": x, "share": share, "teachers": len(teachers)} for x in teachers]


def agreed(build: Callable[..., LossProblem], count: int, *args: Any, world: Handshake, **kwargs: Any) -> LossProblem:
    """The problem of a loss, whose ranks must have as many teachers."""
    world.settings["teachers"] = count
    return build(*args, world=world, **kwargs)


def _build(
    build: Callable[..., LossProblem],
    query: Array,
    key: Array,
    scale: Any,
    *,
    teacher: Any,
    share: float = 1.0,
    teachers: int = 1,
    negatives: Array | Sequence[Array] | None = None,
    world: Handshake = ALONE,
    **kwargs: Any,
) -> LossProblem:
    """The part of one of several teachers, whose softmax has ``share / teachers`` of the target: ``schedules.teacher``.

    ``build`` builds the loss. It has checked the other arguments, because the loss comes before this part.
    """
    check = world.known or validation
    for name in _EXCLUDED:
        if kwargs.get(name, default := _PARAMETERS[name].default) not in (default,):
            raise ValueError(f"teacher must be None with {name}, got both; leave one out")
    size = len(teacher) if isinstance(teacher, (tuple, list)) else 1
    if size != 3:
        raise TypeError(f"teacher must be (rows, columns, scale), or a list of these, got {size} elements; give three")
    share = validation.option("teacher_share", share, 0.0, 1.0, "1")
    arrays, blocks = library_of(query), [query, key]
    if negatives is not None:
        blocks += negatives if isinstance(negatives, Sequence) else [negatives]
    features: list[Any] = [check.features(False, features=x.reshape((-1, x.shape[-1])))[1][0] for x in blocks]
    sizes = [x.shape[0] for x in features]
    matrices: Any = check.guide(teacher[:2], (sizes[0], sum(sizes[1:])), arrays, features[0], "teacher")
    rows, columns = matrices
    depth = rows.shape[1]
    # autocast would change the dtype of joined arrays, had it not cast the features already
    wide = [
        arrays.module.concatenate([x, values], 1)
        for x, values in zip((rows, *split(columns, sizes[1:])), features, strict=True)
    ]
    if negatives is not None:
        kwargs["negatives"] = wide[2:]
    number = arrays.detached(teacher[2]) if arrays.owns(teacher[2]) else teacher[2]
    taught = Taught(number, int(depth), share, teachers)
    loss = build(*wide[:2], scale, teacher=taught, world=world, **kwargs)
    problem = replace(loss.problem.weighted(-share / teachers), kind=TEACHER, depth=depth, whole=None)

    def pull_back(gradients: Gradients) -> tuple[Array, ...]:
        *wide_gradients, scale_gradient = loss.pull_back(gradients)
        return *(x[:, depth:] for x in wide_gradients), scale_gradient

    return LossProblem(loss.library, problem, pull_back)


BUILDERS = {name: partial(_build, problems.BUILDERS[name]) for name in ("clip_loss", "info_nce")}
"""The function that builds a teacher's part of each loss that takes one, by the loss's name."""
