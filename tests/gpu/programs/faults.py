"""A training loop on GPUs in which the last rank does something else at one step.

``torchrun --nproc-per-node N tests/gpu/programs/faults.py torch FAULT EXCHANGE BACKEND``, or ``mpirun -n N python -m
mpi4py ... mpi ...``. Every rank prints how many of its losses and gradients are those of the whole batch in float64,
how many are NaN, how many are neither, and the error that it ends with.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from capturing import unit_features
from exchange import join
from torch.nn.functional import cross_entropy

import contrastile
from contrastile.comm.communicator import ExchangeError, MismatchError
from contrastile.comm.connect import connect

# the first four calls of a loss are launched, or captured
STEP, STEPS, WIDTH, SCALE = 5, 8, 64, 10.0


def features(step: int, rank: int, rows: int) -> list[torch.Tensor]:
    """A rank's pairs of a step, which every rank can draw."""
    return unit_features(2, rows, WIDTH, "float32", 100 * step + rank)


def judged(steps: list[int], rank: int, rows: list[int], found: list[Any]) -> str:
    """Whether a loss and its gradients are right, of the pairs that each rank gave to the call."""
    parts = [features(step, other, count) for other, (step, count) in enumerate(zip(steps, rows, strict=True))]
    image, text = (torch.cat([x[side] for x in parts]).double().requires_grad_() for side in range(2))
    logits, own = SCALE * image @ text.T, torch.arange(sum(rows), device="cuda")
    loss = (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
    # the gradients of what the ranks share are to be averaged over them
    expected = [x.split(rows)[rank] * len(rows) for x in torch.autograd.grad(loss, (image, text))]
    if any(bool(x.isnan().any()) for x in found):
        return "NaN"
    # of a logit of float32, and of a sum over all pairs; a gradient's probabilities err by twice that, both ways
    error = 2.0**-24 * (SCALE * (WIDTH + 2) + sum(rows))
    sizes = [1 + loss.item(), *[SCALE * len(rows) / sum(rows)] * 2]
    pairs = zip(found, [loss.detach(), *expected], sizes, strict=True)
    return "right" if all(((x - y).abs() <= 4 * error * size).all() for x, y, size in pairs) else "wrong"


def main() -> None:
    engine, fault, exchange, backend = sys.argv[1:]
    group, number, leave = join(engine)
    torch.cuda.set_device(number % torch.cuda.device_count())
    comm = connect(group)
    faulty = comm.rank == comm.size - 1
    rows = [256 + 16 * rank for rank in range(comm.size - 1)] + [0 if fault == "empty rank" else 240]
    counts, waiting, error = dict.fromkeys(("right", "NaN", "wrong"), 0), list[Any](), ""
    try:
        for step in range(STEPS):
            fails = faulty and step == STEP
            if fails and fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fails and fault == "skipped forward":
                continue
            value = SCALE * 1.01 if fails and fault == "other scale" else SCALE
            given = [x.requires_grad_() for x in features(step, comm.rank, rows[comm.rank])]
            scale = torch.tensor(value, device="cuda", requires_grad=True)
            loss = contrastile.clip_loss(*given, scale, backend=backend, group=group, exchange=exchange)
            if fails and fault == "skipped backward":
                continue
            # a rank that skipped a forward is a step ahead of the others in each call that follows
            late = fault == "skipped forward" and step > STEP - (not faulty)
            steps = [step - (late and faulty)] * (comm.size - 1) + [step + (late and not faulty)]
            waiting.append((steps, loss, given))
            # two losses wait, so that their backward passes can change places
            if step % 2:
                for drawn, one, leaves in reversed(waiting) if fails and fault == "swapped backwards" else waiting:
                    counts[judged(drawn, comm.rank, rows, [one.detach(), *torch.autograd.grad(one, leaves)])] += 1
                waiting.clear()
        torch.cuda.synchronize()
    except (ExchangeError, MismatchError) as found:
        error = str(found)
    # in one piece, beside the other ranks' lines
    sys.stdout.write(f"[{comm.rank}] {' '.join(f'{count} {name}' for name, count in counts.items())} {error}\n")
    sys.stdout.flush()
    if error:
        os._exit(1)
    leave()


if __name__ == "__main__":
    main()
