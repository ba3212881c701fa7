"""What ``benchmarks/gpu.py`` is made of: peers, paired timing, float64 references, and the parts of a run.

Nothing here is imported by the package. Each part adds to one record, which is written after every measurement.
"""
