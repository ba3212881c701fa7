"""Backends with one defect each, named as ``ill_backends:broken``; among launched ranks only rank 2 has the defect."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from contrastile.backends.numpy import backend as numpy_backend

RANK = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "2")))


def with_gradients(name, change):
    """A backend that changes the gradients of three rows or more."""

    def gradients(block, weights, rows, columns, options):
        numpy_backend.gradients(block, weights, rows, columns, options)
        if RANK == 2 and rows is not None and rows.shape[0] > 2:
            change(rows)

    return replace(numpy_backend, name=name, gradients=gradients)


def add(rows):
    rows[2] += 1.0


broken = with_gradients("broken", add)
raises = with_gradients("raises", lambda rows: {}["rank 2 is ill"])


def with_lse(action, rows=None, width=None):
    """A backend that acts in each log-sum-exp, or only in those of this number of rows and this width."""

    def lse(block, columns, options):
        if all(wanted in (None, size) for wanted, size in zip((rows, width), block.rows.shape, strict=True)):
            action()
        return numpy_backend.lse(block, columns, options)

    return replace(numpy_backend, name="ill", lse=lse, values=False)


def hang():
    Path(os.environ.get("HANGING", os.devnull)).touch()
    time.sleep(1000)


# of the cases only "smoke" has this width
leaves = with_lse(lambda: sys.exit(0), width=32)
ends = with_lse(lambda: os._exit(0), width=32)
dies = with_lse(lambda: os.kill(os.getpid(), signal.SIGSEGV), width=32)
hangs = with_lse(hang, width=32)
prints = with_lse(lambda: print("hello", "there"), width=32)
writes = with_lse(lambda: os.write(1, b"hello there"), width=32)
always = with_lse(lambda: os._exit(0))
stops = with_lse(hang, width=24)
at_a_row = with_lse(lambda: os._exit(3), rows=1)
