"""Backends that each have one defect, named as ``ill_backends:broken``; of launched ranks, the third has it."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from contrastile.backends.numpy import backend as sound

RANK = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "2")))


def of_gradients(name, what):
    """A backend that does something to the gradients of three rows or more."""

    def gradients(block, weights, rows, columns, options):
        sound.gradients(block, weights, rows, columns, options)
        if RANK == 2 and rows is not None and rows.shape[0] > 2:
            what(rows)

    return replace(sound, name=name, gradients=gradients)


def add(rows):
    rows[2] += 1.0


broken = of_gradients("broken", add)
raises = of_gradients("raises", lambda rows: {}["rank 2 is ill"])


def called(what, rows=None, width=None):
    """A backend that does something in each of its log-sum-exps, or in those of so many rows of one width."""

    def lse(block, columns, options):
        if all(asked in (None, given) for asked, given in zip((rows, width), block.rows.shape, strict=True)):
            what()
        return sound.lse(block, columns, options)

    return replace(sound, name="ill", lse=lse, values=False)


def hang():
    Path(os.environ.get("HANGING", os.devnull)).touch()
    time.sleep(1000)


# the width of "smoke"; the others' differ
leaves = called(lambda: sys.exit(0), width=32)
ends = called(lambda: os._exit(0), width=32)
dies = called(lambda: os.kill(os.getpid(), signal.SIGSEGV), width=32)
hangs = called(hang, width=32)
prints = called(lambda: print("hello", "there"), width=32)
writes = called(lambda: os.write(1, b"hello there"), width=32)
always = called(lambda: os._exit(0))
stops = called(hang, width=24)
at_a_row = called(lambda: os._exit(3), rows=1)
