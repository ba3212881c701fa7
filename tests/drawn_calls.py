"""Calls of the public losses drawn at random: their bits in two versions of the package.

A seed decides everything: the loss, the interface, the arguments, dtype and settings, and the ranks. The calls are
those of ``contrastile verify``, which says whether they are right; here sizes, settings and parts are drawn.

    python tests/drawn_calls.py --bits before.json                       # with the version before
    python tests/drawn_calls.py --bits after.json --against before.json  # exit code 1 if a bit differs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules.placement import Shards
from contrastile.verify.losses.cases import BATCHES, LossCase, concerns, formed
from contrastile.verify.losses.claims import OBJECTIVES
from contrastile.verify.losses.ours import OF_TENSORS, cached_ranking, interfaces, of_interface, ranking
from contrastile.verify.losses.subject import Call, Loss, prepare
from contrastile.verify.public import Share
from contrastile.verify.shards import shares
from contrastile.verify.trial import Subject

SIZES, WIDTHS = (2, 3, 5, 8, 16, 23, 32, 33, 47, 64, 100, 129, 257), (2, 3, 7, 8, 16, 31, 40, 64, 65)
SETTINGS: dict[str, Sequence[Any]] = {
    "tile": (None, None, 1, 7, 16, (16, 32), (64, 64), 33),
    "workspace": (None, None, 0, 1, 64),
    "keep": (None, None, 0, 1, 64),
}


def takes(loss: Loss, case: LossCase) -> bool:
    """Whether the loss has the arguments of a case."""
    given, claims = case.arguments, loss.claims
    ids = {"ids", "row_ids"} & given.keywords.keys()
    options = given.options or given.weights is not None
    return not (
        (ids and not claims.ids)
        or ("positives" in given.keywords and not claims.positives)
        or (given.negatives and not claims.negatives)
        or (options and not claims.options)
    )


def called(seed: int, backend: str, device: str = "cpu") -> list[Call]:
    """The call of a seed through a backend, made by each rank; no calls where the loss does not take it."""
    draw = np.random.default_rng(seed)

    def pick(table: Sequence[Any]) -> Any:
        return table[int(draw.integers(len(table)))]

    record, objective, rows, width = load(backend), pick(OBJECTIVES), pick(SIZES), pick(WIDTHS)
    subject = Subject(backend, record, pick(sorted(record.dtypes)), device)
    more = {name: value for name, values in SETTINGS.items() if (value := pick(values)) is not None}
    batch = BATCHES[pick([name for name in BATCHES if concerns(name, "value", None, objective)])]
    weights = draw.integers(0, 4, pick((1, 2, 3, 5)))
    # the ranks of one process would share the one thread of autograd that a GPU has
    shared = device == "cpu" and record.arrays.name == "torch" and pick((True, False, False))
    how = {"exchange": pick(("ring", "gather", "replicate")), "parameter_reduction": pick(("mean", "sum"))}
    # at their first call those import a library, for seconds
    found = [each for each in interfaces(subject, objective) if each[0].make not in (ranking, cached_ranking)]
    interface, loss, _ = pick(found)
    interface, library = (OF_TENSORS[0], "torch") if shared else (interface, loss.claims.library)
    loss = of_interface(interface, objective, subject, library, loss.name, **more)
    named = replace(batch, name=f"{batch.name} {seed}")
    case = formed(named, rows, width, subject.dtype, loss.claims, loss.facts)
    if not takes(loss, case):
        return []
    if not shared:
        call = prepare(loss, case.arguments, subject.dtype, device)
        call.finish(call())
        return [call]
    parts = [shares(rows, weights), *(shares(len(x), weights) for x in case.arguments.negatives)]
    parts.insert(1, shares(len(case.arguments.features[-1]), weights) if objective == "info_nce" else parts[0])
    share = Share(batch.name, case, Shards(tuple(parts[0]), tuple(zip(*parts[1:], strict=True))))

    def program(comm: InProcess) -> Call:
        own = of_interface(interface, objective, subject, library, loss.name, **more, **how, group=comm)
        call = prepare(own, share.part(comm.rank), subject.dtype, device)
        call.finish(call())
        return call

    return InProcessGroup[Call](len(weights)).run(program)


def bits(seed: int, backend: str, device: str) -> str | None:
    """A hash of all that the ranks' calls give; None where there is none."""
    calls = called(seed, backend, device)
    return hashlib.sha256(b"".join(x for call in calls for x in call.bits())).hexdigest() if calls else None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--count", type=int, default=2000)
    add("--first", type=int, default=0)
    add("--bits", type=Path, required=True, metavar="FILE", help="where the hash of every call's results goes")
    add("--against", type=Path, metavar="FILE", help="an earlier such file")
    add("--backend", nargs="+", default=["numpy", "torch"], help="(%(default)s)")
    add("--device", default="cpu", help="(%(default)s)")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    seeds = [(x, seed) for x in asked.backend for seed in range(asked.first, asked.first + asked.count)]
    hashes = {f"{x} seed {seed}": bits(seed, x, asked.device) for x, seed in seeds}
    asked.bits.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    before = json.loads(asked.against.read_text(encoding="utf-8")) if asked.against else hashes
    differing = [name for name in hashes.keys() | before.keys() if hashes.get(name) != before.get(name)]
    print(*sorted(differing), f"{len(differing)} of {sum(map(bool, hashes.values()))} differ", sep="\n")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
