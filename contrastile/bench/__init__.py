"""Measures what the losses cost: time, share of the matrix-product rate and peak memory, against a plain loss.

``command`` is ``contrastile bench``; ``sweep`` takes the measurements, ``memory`` counts the bytes, ``peers`` are the
implementations, and ``agreement`` lets none of them be timed before it has agreed with the oracle.
"""

from contrastile.bench.command import add_arguments, main

__all__ = ["add_arguments", "main"]
