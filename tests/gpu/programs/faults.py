"""A training loop on GPUs in which the last rank has a fault at one step.

``torchrun --nproc-per-node N tests/gpu/programs/faults.py torch FAULT EXCHANGE BACKEND``, or ``mpirun -n N python -m
mpi4py ... mpi ...``. Every rank prints how many of its losses with their gradients equal those of the whole batch in
float64, how many are NaN, how many are neither, and the error that it ends with.
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
    """The pairs of a rank at a step; every rank can draw them."""
    return unit_features(2, rows, WIDTH, "float32", 100 * step + rank)


def judge(steps: list[int], rank: int, rows: list[int], results: list[Any]) -> str:
    """Compare a loss and its gradients with those of the batch that the ranks passed: "right", "NaN" or "wrong"."""
    pairs_of_ranks = [features(step, other, count) for other, (step, count) in enumerate(zip(steps, rows, strict=True))]
    image, text = (torch.cat([x[side] for x in pairs_of_ranks]).double().requires_grad_() for side in range(2))
    logits, targets = SCALE * image @ text.T, torch.arange(sum(rows), device="cuda")
    loss = (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2
    # data-parallel training averages gradients over the ranks, so those of a shard have a factor of their number
    expected = [x.split(rows)[rank] * len(rows) for x in torch.autograd.grad(loss, (image, text))]
    if any(bool(x.isnan().any()) for x in results):
        return "NaN"
    # the float32 error of a logit and of a sum over all pairs; probabilities have twice that error in each direction
    error = 2.0**-24 * (SCALE * (WIDTH + 2) + sum(rows))
    magnitudes = [1 + loss.item(), *[SCALE * len(rows) / sum(rows)] * 2]
    pairs = zip(results, [loss.detach(), *expected], magnitudes, strict=True)
    return "right" if all(((x - y).abs() <= 4 * error * magnitude).all() for x, y, magnitude in pairs) else "wrong"


def main() -> None:
    engine, fault, exchange, backend = sys.argv[1:]
    group, local_rank, close_group = join(engine)
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    comm = connect(group)
    faulty = comm.rank == comm.size - 1
    rows = [256 + 16 * rank for rank in range(comm.size - 1)] + [0 if fault == "empty rank" else 240]
    counts, pending, error = dict.fromkeys(("right", "NaN", "wrong"), 0), list[Any](), ""
    try:
        for step in range(STEPS):
            fails = faulty and step == STEP
            if fails and fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fails and fault == "skipped forward":
                continue
            value = SCALE * 1.01 if fails and fault == "other scale" else SCALE
            leaves = [x.requires_grad_() for x in features(step, comm.rank, rows[comm.rank])]
            scale = torch.tensor(value, device="cuda", requires_grad=True)
            loss = contrastile.clip_loss(*leaves, scale, backend=backend, group=group, exchange=exchange)
            if fails and fault == "skipped backward":
                continue
            # after a skipped forward the faulty rank is one step ahead of the others in each call
            is_ahead = fault == "skipped forward" and step > STEP - (not faulty)
            steps = [step - (is_ahead and faulty)] * (comm.size - 1) + [step + (is_ahead and not faulty)]
            pending.append((steps, loss, leaves))
            # two losses are pending, so that their backward passes can be swapped
            if step % 2:
                for steps, loss, leaves in reversed(pending) if fails and fault == "swapped backwards" else pending:
                    counts[judge(steps, comm.rank, rows, [loss.detach(), *torch.autograd.grad(loss, leaves)])] += 1
                pending.clear()
        torch.cuda.synchronize()
    except (ExchangeError, MismatchError) as failure:
        error = str(failure)
    # one write per line, so that lines of other ranks cannot break it
    sys.stdout.write(f"[{comm.rank}] {' '.join(f'{count} {name}' for name, count in counts.items())} {error}\n")
    sys.stdout.flush()
    if error:
        os._exit(1)
    close_group()


if __name__ == "__main__":
    main()
