"""What the benchmarks share.

``ranks`` are one process, or those of torchrun; ``timing`` takes samples in turns, beside the ceiling; ``peers`` are
other people's losses, ``caches`` gradient caches; ``record`` has the machine's facts, and writes JSON.
"""
