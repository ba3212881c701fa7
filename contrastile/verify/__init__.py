"""Compares any backend with the float64 oracle, within derived bounds.

A *case* is a problem, a *property* is what a correct backend does with it, and a *ratio* is the largest error / bound:
below 1 passes. ``runner.Run`` runs them; ``command`` is ``contrastile verify``.
"""
