"""Schedules: how the blocks of a problem are walked, and who holds which.

``problem`` is a whole loss as data; ``local`` walks it in one process. A schedule knows no loss by name and no
backend by name: it merges log-sum-exps and adds gradients.
"""
