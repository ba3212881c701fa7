"""Every public loss by each of its interfaces, with the backend under test: alone, and over ranks."""

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
from contrastile.verify.losses.calling import PROPERTIES as OF_A_LOSS
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
    *(name for name, each in BATCHES.items() if each.keyword),
    *("nan", "one-pair", "large-logits", "opposite@one", "one-direction"),
)
"""Those of a keyword, whose arguments differ, and a few of features."""
_OWN = ("own", "own@alone", "own@queue", "own@threshold", "own@shared")
_ROWS, _WIDTH, _FEW, _MANY = 24, 20, 250, 1000


def _refused(name: str, subject: Subject) -> bool:
    """Whether a case is of limits, or of a guide, which the backend does not take."""
    kind = name.partition("@")[0]
    return (kind == "threshold" and not subject.backend.limits) or (
        kind == "guide" and subject.dtype not in subject.backend.guides
    )


def _elsewhere(name: str, each: Interface, subject: Subject) -> bool:
    """Whether a case says of an interface and a dtype what it says of another."""
    option, rows, whole = name in OPTIONS, BATCHES[name].rows, subject.label == "float32"
    if _refused(name, subject):
        return True
    if each.plain and (option or name in ("nan", "one-pair")):
        # it has an arithmetic of its own, and sees no options
        return True
    if each.block is not None and BATCHES[name].keyword and (each.any_dtype or not whole):
        # blocks of arguments are cut alike for each way to ask, and in each dtype
        return True
    # in blocks these rows would be thousands of blocks
    if rows > _FEW and (not whole or each.any_dtype or (each.block is not None and rows > _MANY)):
        return True
    # ids and labels beyond 32 bits, and what is made of options, are nothing to do with the features' dtype
    return not whole and (name.endswith("@far") or (option and each.make not in (both, function)))


def alone(objective: str, subject: Subject, case: str) -> Comparisons:
    """Every interface: the value and each gradient of the arguments that vary, and the properties of calls.

    Raises:
        SkipError: none is asked for.
    """
    none = True
    for each, loss, names in interfaces(subject, objective):

        def trial(name: str, loss: Loss = loss) -> LossTrial:
            return LossTrial(loss, build(name, subject.dtype, loss.claims, loss.facts), subject.device)

        for name in (CALLS, *_CASES):
            if name != CALLS and (_elsewhere(name, each, subject) or not concerns(name, "value", None, objective)):
                continue
            if not asked(case, f"{loss.name}, {name}") or (each.apart and ":" not in case):
                continue
            try:
                here = trial(name)
            except ValueError:
                # an interface without this argument
                continue
            fields = here.fields if name != "nan" else ["loss"]
            found = here.run(upstream=UPSTREAM) if name in OPTIONS else here.result
            times = UPSTREAM if name in OPTIONS and found.by_autograd else 1.0
            none = False
            yield f"{loss.name}, {name}", here.compare(found, fields, times)
            if each.make is function and loss.claims.library == "torch" and name != CALLS and BATCHES[name].keyword:
                # once more after other values of this signature, which is known from its second call on
                other = build(name, subject.dtype, loss.claims, loss.facts, 1).arguments
                other = replace(other, options=here.case.arguments.options)
                prepare(loss, other, subject.dtype, subject.device)()
                yield f"{loss.name}, {name}, known", here.compare(here.run(upstream=times), fields, times)
        for name in names:
            held = OF_A_LOSS[name]
            if held.claim(loss.claims) or not asked(case, f"{loss.name}, {name}"):
                continue
            try:
                for what, worst in held.check(trial(CALLS)):
                    none = False
                    yield f"{loss.name}, {name}: {what}", worst
            except SkipError:
                # of arguments that this loss has not, or a dtype of 16 bits
                continue
    if asked(case, "options"):
        yield from options(objective, subject)
    elif none:
        raise SkipError(f"it has no {case.partition(':')[2]!r}")


@dataclass(frozen=True)
class Share(Parts):
    """The arguments of a loss, and what each rank has of them: beside the keys, a block for each array of negatives."""

    label: str
    case: LossCase
    shards: Shards

    def part(self, rank: int) -> Arguments:
        given, own, order = self.case.arguments, self.rows(rank), self.order()
        keywords: dict[str, Any] = {}
        for name, x in given.keywords.items():
            if name == "column_ids":
                mine = self.own(rank)
                keywords[name] = x[mine[mine < len(x)]]
            else:
                keywords[name] = (redirected(x, order) if name == "positives" else x)[own]
        features = [x[own] for x in given.features[:1]]
        features += [x[self.columns(rank, 0)] for x in given.features[1:]]
        negatives = [x[self.columns(rank, block)] for block, x in enumerate(given.negatives, 1)]
        given = replace(given, labels=take(given.labels, own), weights=take(given.weights, own), keywords=keywords)
        if given.guide:
            given = replace(given, guide=(given.guide[0][own], given.guide[1][self.own(rank)]))
        return replace(given, features=tuple(features), negatives=tuple(negatives))


def _shared(objective: str, rows: Sequence[int], subject: Subject) -> Iterator[Share]:
    """The arguments that ranks share, in parts of these rows."""
    (interface, *_) = OF_ARRAYS
    loss = of_interface(interface, objective, subject, subject.backend.arrays.name, "")
    names = {
        "clip_loss": (CALLS, "ids@far", "several", "smoothing", "margin", "threshold", "guide"),
        "sigmoid_loss": (CALLS, "ids@far", "bias", "several", "several@mean"),
        "info_nce": (
            CALLS,
            *("negatives", "positives", "ids", "queue", "own-ids", "threshold", "threshold@positives"),
            *("smoothing@blocks", "guide@queue", "guide@positives", *_OWN),
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
        if _refused(name, subject):
            continue
        here = case(replace(BATCHES.get(name, BATCHES["smoke"]), scale=12.5 if name == CALLS else 37.3))
        more = [shares(len(x), [(3 * rank + 1) % 4 for rank in range(world)]) for x in here.arguments.negatives]
        # of negatives some lie beside their rows, and a queue's parts match no rank's rows
        more = [list(rows) if len(x) == b else y for x, y in zip(here.arguments.negatives, more, strict=True)]
        yield Share(name, here, shards(rows, *more))
    if objective == "info_nce":
        elsewhere = case(replace(BATCHES["smoke"], make=moved))
        yield Share("keys apart from their queries", elsewhere, shards(rows[::-1]))


def over_ranks(objective: str, subject: Subject, case: str) -> Comparisons:
    """Each rank calls the public loss with its part, over every exchange, by each interface and reduction."""
    world = subject.ranks
    few = [1] + [0] * (world.size - 2) + [_ROWS - 1] * (world.size > 1)
    cuts = {"uneven": [(2 * r + 3) % 5 for r in range(world.size)]}
    # no edge is one of a dtype
    if subject.dtype == "float32" or "float32" not in subject.backend.dtypes:
        cuts |= {"one row": few, "even": [1] * world.size}
    for turn, (how, weights) in enumerate(cuts.items()):
        for share in _shared(objective, shares(_ROWS, weights), subject):
            # only what is divided by a sum over ranks can be taken for each rank's own; no option is one of edges
            if {"even": share.case.arguments.weights is None, "one row": share.label in OPTIONS}.get(how):
                continue
            for at, exchange in enumerate(SCHEDULES):
                ways = list(enumerate(_interfaces(subject, share)))
                # edges are the exchange's, and arguments the problem's: each interface is asked for some
                every = (how, share.label) == ("uneven", CALLS)
                for place, interface in ways if every else [ways[(turn + at) % len(ways)]]:
                    reduction = ("mean", "sum")[(turn + place) % 2]
                    label = ", ".join((share.label, exchange, how, interface.name, reduction))
                    if asked(case, label):
                        yield label, _of_ranks(share, subject, interface, exchange, reduction)


def _interfaces(subject: Subject, share: Share) -> list[Interface]:
    returning, *_ = OF_ARRAYS
    world = subject.ranks
    late = subject.device == "cuda" and world.can_be_late and world.size > 1
    if subject.backend.arrays.name != "torch" or late:
        # autograd runs one thread per GPU, in which ranks that are threads of one process would wait for each other
        return [returning]
    objective, given = share.case.claims.objective, share.case.arguments
    keywords, names = given.keywords, ["autograd", "nn"]
    # a transform takes no gradients of keywords
    names += ["torch.func.grad"] * (not given.negatives) + ["DistillClipLoss"] * (share.label == CALLS)
    chosen = [each for each in OF_TENSORS if each.name in names]
    return [returning, *(x for x in chosen if x.objectives is None or (objective in x.objectives and not keywords))]


def _of_ranks(share: Share, subject: Subject, interface: Interface, exchange: str, reduction: str) -> Worst:
    upstream = None if ("returns_gradients", True) in interface.claims else UPSTREAM
    # the scale, beside a bias that learns; the keys, beside negatives that learn
    frozen = {"bias": 2, "negatives": 1}.get(share.label)

    def program(communicator: Communicator) -> Result:
        # "mean" is the default
        told = {} if reduction == "mean" else {"parameter_reduction": reduction}
        how = {"group": communicator, "exchange": exchange, **told}
        objective = share.case.claims.objective
        loss = of_interface(interface, objective, subject, subject.backend.arrays.name, interface.name, **how)
        own = share.part(communicator.rank)
        train = None if frozen is None else [at != frozen for at in range(4)]
        call = prepare(loss, own, subject.dtype, subject.device, train=train)
        if communicator.rank == 0:
            # equal arrays are one object here, and two on the others
            one: dict[Any, Any] = {}
            found = [np.array(loss.arrays.to_numpy(x)) for x in call.keywords.values()]
            equal = [(x.dtype, x.tobytes()) for x in found]
            call.keywords = {k: one.setdefault(y, x) for (k, x), y in zip(call.keywords.items(), equal, strict=True)}
        value = call()
        if upstream is None:
            return call.finish(value)
        # another forward pass of these sizes, and a backward pass of this one, come before
        prepare(loss, replace(own, features=tuple(-x for x in own.features)), subject.dtype, subject.device)()
        call.finish(value, retain=True)
        call.forget()
        return call.finish(value, upstream, retain=True)

    world = subject.ranks
    parts = world.run(program)

    def judge() -> Worst:
        if len({(part.loss.tobytes(), np.array(part.scale).tobytes()) for part in parts}) > 1:
            return wrong("the ranks have different losses, or gradients of the scale")
        case, times = share.case, upstream or 1.0
        spread = share.spread(exchange, world.hosts, 2 if case.claims.objective == "nt_xent" else 1)
        exact, bound = allowed.expected(case, times), allowed.allowed(case, times, spread)
        fields = ("loss", "rows", "columns", *(() if frozen == 2 else ("scale",)), "bias")
        found = share.joined(parts, world.size if reduction == "mean" else 1.0)
        if frozen == 1 and found.by_autograd:
            found = replace(found, columns=(exact.columns[0], *found.columns[1:]))
        return compared(case, found, exact, bound, fields)

    return judged(world, judge)


def options(objective: str, subject: Subject) -> Comparisons:
    """What is asked for reaches the backend that was asked for."""
    settings: dict[str, Any] = {"precision": subject.precision, "tile": (7, 5), "workspace": 3, "keep": 1}
    if subject.backend.arrays.name == "torch":
        settings["block"] = 9
    (interface, *_) = OF_ARRAYS
    recorded = replace(subject, name=f"contrastile.verify.wrapped:recorded@{subject.name}")
    # another call first: nothing of it is asked for again
    plain = of_interface(interface, objective, recorded, subject.backend.arrays.name, "")
    given = build(CALLS, subject.dtype, plain.claims, plain.facts)
    LossTrial(plain, given, subject.device).call()()
    most = settings.get("block", math.inf)
    for precision in (subject.precision, "auto"):
        settings["precision"] = precision
        loss = of_interface(interface, objective, recorded, subject.backend.arrays.name, "", **settings)
        RECORDED.clear()
        LossTrial(loss, given, subject.device).call()()
        told = {name: x for name, x in settings.items() if name != "block" and x != "auto"}
        asked_for = all(getattr(how, name) == x for _, how in RECORDED for name, x in told.items())
        cut = all(max(block.rows.shape[0], block.columns.shape[0]) <= most for block, _ in RECORDED)
        yield "options", NOTHING if RECORDED and asked_for and cut else wrong("the backend was not told of them")


PROPERTIES = (
    *(
        Property(
            f"public-{name.replace('_', '-')}",
            partial(alone, name),
            CASE,
            f"The public {name} is right by each interface, however it is called, and its results are the caller's.",
        )
        for name in FORMS
    ),
    Property("public-training", training, CASE),
    Property("public-calls", calls.known, CASE),
)
"""One property per loss, and one of what only training has."""

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
"""The same of ranks."""
