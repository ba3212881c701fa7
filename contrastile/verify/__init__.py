"""Holds every backend, ours or anybody's, to the float64 oracle within derived bounds.

A *case* is a problem, a *property* is something a right backend does with it, and a *ratio* is the largest error in
units of its bound: below 1 passes. `runner.rows` runs them; `command` is ``contrastile verify``.
"""
