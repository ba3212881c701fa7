"""Compares any backend with the float64 oracle, within derived bounds.

A *case* is a problem, a *property* is what a correct backend does with it, and a *ratio* is the largest error / bound:
below 1 passes. ``selection`` makes checks of them, ``runner`` runs these; ``command`` is ``contrastile verify``.
"""
