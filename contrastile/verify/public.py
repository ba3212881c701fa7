"""Every public loss by each of its interfaces, with the backend under test: in one process, and over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from contrastile.comm.communicator import Communicator
from contrastile.schedules.placement import SCHEDULES, Shards
from contrastile.verify import calls, statistics
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, wrong
from contrastile.verify.losses import allowed
from contrastile.verify.losses.arguments import FORMS, Arguments
from contrastile.verify.losses.calling import PROPERTIES as PROPERTIES_OF_A_LOSS
from contrastile.verify.losses.cases import BATCHES, CALLS, OPTIONS, Batch, LossCase, build, concerns, formed, moved
from contrastile.verify.losses.ours import OF_ARRAYS, OF_TENSORS, Interface, both, function, interfaces, of_interface
from contrastile.verify.losses.properties import UPSTREAM, LossTrial, compared
from contrastile.verify.losses.subject import Loss, Result, prepare
from contrastile.verify.rearrange import redirected, take
from contrastile.verify.shards import Parts, shares
from contrastile.verify.trained import training
from contrastile.verify.trial import Property, SkipError, Subject, asked
from contrastile.verify.worlds import judged
from contrastile.verify.wrapped import RECORDED

CASE, RANKS_CASE = "public-losses", "front-door"
_CASES = (
    *(name for name, batch in BATCHES.items() if batch.keyword),
    *("nan", "one-pair", "large-logits", "opposite@one", "one-direction"),
)
"""The cases of each keyword, and a few cases of features."""
_OWN_CASES = ("own", "own@alone", "own@queue", "own@threshold", "own@shared")
_ROWS, _WIDTH, _FEW, _MANY = 24, 20, 250, 1000


def _is_refused(name: str, subject: Subject) -> bool:
    """Whether a case has limits, or a guide, that the backend does not take."""
    kind = name.partition("@")[0]
    return (kind == "threshold" and not subject.backend.limits) or (
        kind == "guide" and subject.dtype not in subject.backend.guides
    )


def _repeats(name: str, interface: Interface, subject: Subject) -> bool:
    """Whether another interface or dtype already tests what this case would test."""
    is_option, rows, is_float32 = name in OPTIONS, BATCHES[name].rows, subject.label == "float32"
    if _is_refused(name, subject):
        return True
    if interface.plain and (is_option or name in ("nan", "one-pair")):
        # the interface computes by itself, and passes on no options
        return True
    if interface.block is not None and BATCHES[name].keyword and (interface.any_dtype or not is_float32):
        # arguments are cut into blocks in the same way for every interface and dtype
        return True
    # so many rows would be thousands of blocks
    if rows > _FEW and (not is_float32 or interface.any_dtype or (interface.block is not None and rows > _MANY)):
        return True
    # ids and labels beyond 32 bits, and the handling of options, do not depend on the features' dtype
    return not is_float32 and (name.endswith("@far") or (is_option and interface.make not in (both, function)))


def by_interfaces(objective: str, subject: Subject, case: str) -> Comparisons:
    """Every interface: the value and gradients of every case, and the properties of calls.

    Raises:
        SkipError: the case selects no check.
    """
    nothing_ran = True
    for way, loss, names in interfaces(subject, objective):
        is_plain_call = way.make is function and loss.claims.library == "torch"

        def trial_of(name: str, loss: Loss = loss) -> LossTrial:
            return LossTrial(loss, build(name, subject.dtype, loss.claims, loss.facts), subject.device)

        for name in (CALLS, *_CASES):
            if name != CALLS and (_repeats(name, way, subject) or not concerns(name, "value", None, objective)):
                continue
            if not asked(case, f"{loss.name}, {name}") or (way.apart and ":" not in case):
                continue
            try:
                trial = trial_of(name)
            except ValueError:
                # the interface does not take this argument
                continue
            fields = trial.fields if name != "nan" else ["loss"]
            result = trial.run(upstream=UPSTREAM, again=is_plain_call) if name in OPTIONS else trial.result
            upstream = UPSTREAM if name in OPTIONS and result.by_autograd else 1.0
            nothing_ran = False
            yield f"{loss.name}, {name}", trial.compare(result, fields, upstream)
            if is_plain_call and name != CALLS and BATCHES[name].keyword:
                # again after a call of the same signature with other values: the second call uses a cache
                other = build(name, subject.dtype, loss.claims, loss.facts, 1).arguments
                other = replace(other, options=trial.case.arguments.options)
                prepare(loss, other, subject.dtype, subject.device)()
                yield f"{loss.name}, {name}, known", trial.compare(trial.run(upstream=upstream), fields, upstream)
        for name in names:
            loss_property = PROPERTIES_OF_A_LOSS[name]
            if loss_property.claim(loss.claims) or not asked(case, f"{loss.name}, {name}"):
                continue
            try:
                for label, worst in loss_property.check(trial_of(CALLS)):
                    nothing_ran = False
                    yield f"{loss.name}, {name}: {label}", worst
            except SkipError:
                # the loss does not take the argument, or the dtype has 16 bits
                continue
    if asked(case, "options"):
        yield from options(objective, subject)
    elif nothing_ran:
        raise SkipError(f"it has no {case.partition(':')[2]!r}")


@dataclass(frozen=True)
class Share(Parts):
    """The arguments of a loss, and each rank's part: block 0 are the keys, and each array of negatives is a block."""

    label: str
    case: LossCase
    shards: Shards

    def part(self, rank: int) -> Arguments:
        whole, rows, order = self.case.arguments, self.rows(rank), self.order()
        keywords: dict[str, Any] = {}
        for name, x in whole.keywords.items():
            if name == "column_ids":
                columns = self.own(rank)
                keywords[name] = x[columns[columns < len(x)]]
            else:
                keywords[name] = (redirected(x, order) if name == "positives" else x)[rows]
        features = [x[rows] for x in whole.features[:1]]
        features += [x[self.columns(rank, 0)] for x in whole.features[1:]]
        negatives = [x[self.columns(rank, block)] for block, x in enumerate(whole.negatives, 1)]
        part = replace(whole, labels=take(whole.labels, rows), weights=take(whole.weights, rows), keywords=keywords)
        if part.guide:
            part = replace(part, guide=(part.guide[0][rows], part.guide[1][self.own(rank)]))
        return replace(part, features=tuple(features), negatives=tuple(negatives))


def _shared(objective: str, rows: Sequence[int], subject: Subject) -> Iterator[Share]:
    """Arguments to share among ranks; each rank has its number of ``rows``."""
    (interface, *_) = OF_ARRAYS
    loss = of_interface(interface, objective, subject, subject.backend.arrays.name, "")
    names = {
        "clip_loss": (CALLS, "ids@far", "several", "smoothing", "margin", "threshold", "guide"),
        "sigmoid_loss": (CALLS, "ids@far", "bias", "several", "several@mean"),
        "info_nce": (
            CALLS,
            *("negatives", "positives", "ids", "queue", "own-ids", "threshold", "threshold@positives"),
            *("smoothing@blocks", "guide@queue", "guide@positives", *_OWN_CASES),
        ),
        "nt_xent": (CALLS, "margin"),
        "sup_con": ("labels", "inside@labels"),
    }
    b, world = sum(rows), len(rows)

    def shards(*blocks: Sequence[int]) -> Shards:
        return Shards(tuple(rows), tuple(zip(*blocks, strict=True)))

    def case(batch: Batch) -> LossCase:
        return formed(batch, b, _WIDTH, subject.dtype, loss.claims, loss.facts)

    for name in names[objective]:
        if _is_refused(name, subject):
            continue
        whole = case(replace(BATCHES.get(name, BATCHES["smoke"]), scale=12.5 if name == CALLS else 37.3))
        cuts = [shares(len(x), [(3 * rank + 1) % 4 for rank in range(world)]) for x in whole.arguments.negatives]
        # a block of one negative per row is cut like the rows; a queue is cut at other places
        cuts = [list(rows) if len(x) == b else y for x, y in zip(whole.arguments.negatives, cuts, strict=True)]
        yield Share(name, whole, shards(rows, *cuts))
    if objective == "info_nce":
        moved_case = case(replace(BATCHES["smoke"], make=moved))
        yield Share("keys apart from their queries", moved_case, shards(rows[::-1]))


def over_ranks(objective: str, subject: Subject, case: str) -> Comparisons:
    """Each rank calls the public loss with its part, over every exchange, by each interface and reduction."""
    world = subject.ranks
    one_row = [1] + [0] * (world.size - 2) + [_ROWS - 1] * (world.size > 1)
    cuts = {"uneven": [(2 * r + 3) % 5 for r in range(world.size)]}
    # the edge cases do not depend on the dtype
    if subject.dtype == "float32" or "float32" not in subject.backend.dtypes:
        cuts |= {"one row": one_row, "even": [1] * world.size}
    for turn, (cut, weights) in enumerate(cuts.items()):
        for share in _shared(objective, shares(_ROWS, weights), subject):
            # equal parts are for weights, which are divided by a sum over ranks; a single row needs no options
            if {"even": share.case.arguments.weights is None, "one row": share.label in OPTIONS}.get(cut):
                continue
            for index, exchange in enumerate(SCHEDULES):
                ways = list(enumerate(_interfaces(subject, share)))
                # exchanges and arguments do not depend on the interface: the interfaces take turns
                takes_every = (cut, share.label) == ("uneven", CALLS)
                for place, interface in ways if takes_every else [ways[(turn + index) % len(ways)]]:
                    reduction = ("mean", "sum")[(turn + place) % 2]
                    label = ", ".join((share.label, exchange, cut, interface.name, reduction))
                    if asked(case, label):
                        yield label, _of_ranks(share, subject, interface, exchange, reduction)


def _interfaces(subject: Subject, share: Share) -> list[Interface]:
    returning, *_ = OF_ARRAYS
    world = subject.ranks
    waits = subject.device == "cuda" and world.can_be_late and world.size > 1
    if subject.backend.arrays.name != "torch" or waits:
        # autograd has one thread per GPU, in which ranks that are threads of one process would wait for each other
        return [returning]
    objective, arguments = share.case.claims.objective, share.case.arguments
    keywords, names = arguments.keywords, ["autograd", "nn"]
    # torch.func.grad takes no gradients of keywords
    names += ["torch.func.grad"] * (not arguments.negatives) + ["a teacher"] * (share.label == CALLS)
    chosen = [way for way in OF_TENSORS if way.name in names]
    return [returning, *(x for x in chosen if x.objectives is None or (objective in x.objectives and not keywords))]


def _of_ranks(share: Share, subject: Subject, interface: Interface, exchange: str, reduction: str) -> Worst:
    upstream = None if ("returns_gradients", True) in interface.claims else UPSTREAM
    # the frozen argument's place: the scale where the bias learns, the keys where the negatives learn
    frozen = {"bias": 2, "negatives": 1}.get(share.label)

    def program(communicator: Communicator) -> Result:
        # "mean" is the default
        keyword = {} if reduction == "mean" else {"parameter_reduction": reduction}
        settings = {"group": communicator, "exchange": exchange, **keyword}
        objective = share.case.claims.objective
        loss = of_interface(interface, objective, subject, subject.backend.arrays.name, interface.name, **settings)
        part = share.part(communicator.rank)
        train = None if frozen is None else [place != frozen for place in range(4)]
        call = prepare(loss, part, subject.dtype, subject.device, train=train)
        if communicator.rank == 0:
            # on rank 0 equal arrays are one object, on other ranks two: the ranks must still agree
            objects: dict[Any, Any] = {}
            values = [np.array(loss.arrays.to_numpy(x)) for x in call.keywords.values()]
            keys = [(x.dtype, x.tobytes()) for x in values]
            call.keywords = {k: objects.setdefault(y, x) for (k, x), y in zip(call.keywords.items(), keys, strict=True)}
        value = call()
        if upstream is None:
            return call.finish(value)
        # the checked backward pass comes after another forward pass of these sizes, and a first backward pass
        prepare(loss, replace(part, features=tuple(-x for x in part.features)), subject.dtype, subject.device)()
        call.finish(value, retain=True)
        call.forget()
        return call.finish(value, upstream, retain=True)

    world = subject.ranks
    parts = world.run(program)

    def judge() -> Worst:
        if len({(part.loss.tobytes(), np.array(part.scale).tobytes()) for part in parts}) > 1:
            return wrong("the ranks have different losses, or gradients of the scale")
        case, factor = share.case, upstream or 1.0
        spread = share.spread(exchange, world.hosts, 2 if case.claims.objective == "nt_xent" else 1)
        expected, bound = allowed.expected(case, factor), allowed.allowed(case, factor, spread)
        fields = ("loss", "rows", "columns", *(() if frozen == 2 else ("scale",)), "bias")
        joined = share.joined(parts, world.size if reduction == "mean" else 1.0)
        if frozen == 1 and joined.by_autograd:
            joined = replace(joined, columns=(expected.columns[0], *joined.columns[1:]))
        return compared(case, joined, expected, bound, fields)

    return judged(world, judge)


def options(objective: str, subject: Subject) -> Comparisons:
    """The requested options reach the requested backend."""
    settings: dict[str, Any] = {"precision": subject.precision, "tile": (7, 5), "workspace": 3, "keep": 1}
    if subject.backend.arrays.name == "torch":
        settings["block"] = 9
    (interface, *_) = OF_ARRAYS
    recording = replace(subject, name=f"contrastile.verify.wrapped:recorded@{subject.name}")
    # a call with default options first: no later call may reuse its options
    defaults = of_interface(interface, objective, recording, subject.backend.arrays.name, "")
    case = build(CALLS, subject.dtype, defaults.claims, defaults.facts)
    LossTrial(defaults, case, subject.device).call()()
    largest = settings.get("block", math.inf)
    for precision in (subject.precision, "auto"):
        settings["precision"] = precision
        loss = of_interface(interface, objective, recording, subject.backend.arrays.name, "", **settings)
        RECORDED.clear()
        LossTrial(loss, case, subject.device).call()()
        expected = {name: x for name, x in settings.items() if name != "block" and x != "auto"}
        are_passed = all(getattr(used, name) == x for _, used in RECORDED for name, x in expected.items())
        are_cut = all(max(block.rows.shape[0], block.columns.shape[0]) <= largest for block, _ in RECORDED)
        yield "options", NOTHING if RECORDED and are_passed and are_cut else wrong("the backend was not told of them")


PROPERTIES = (
    *(
        Property(
            f"public-{name.replace('_', '-')}",
            partial(by_interfaces, name),
            CASE,
            f"The public {name} is right by each interface, however it is called, and its results are the caller's.",
        )
        for name in FORMS
    ),
    Property("public-training", training, CASE),
    Property("public-calls", calls.known, CASE),
)
"""One property per loss, one of training, and one of the calls of ``calls.txt``."""

OVER_RANKS = (
    *(
        Property(
            name.replace("_", "-"),
            partial(over_ranks, name),
            RANKS_CASE,
            f"The public {name} with a group gives the loss and gradients of the joined batch.",
        )
        for name in FORMS
    ),
    Property("statistics", statistics.over_ranks, RANKS_CASE),
)
"""The properties of public losses over ranks."""
