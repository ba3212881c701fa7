"""What ``benchmarks/ring.py`` is made of: ranks, paired timing over ranks, float64 checks, stand-ins, parts of a run.

Nothing here is imported by the package. Rank 0 adds to one record, which is written after every measurement.
"""
