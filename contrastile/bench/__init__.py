"""Measures the losses beside a plain loss: time, share of the matrix-product rate and peak memory.

``command`` is ``contrastile bench``; ``sweep`` takes the measurements, ``peers`` are the implementations and the
sizes, and ``agreement`` requires each implementation to agree with the oracle before it is timed.
"""

import os

# Silence torch's profiler, which counts the bytes. The variable must be set before torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
