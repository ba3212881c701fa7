"""Anybody's loss through the cases: what it claims, how it is called, and a row for each case and property.

``check(loss)`` runs them here; ``contrastile verify --loss module:attribute`` in a process of their own.
"""

from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.selection import check
from contrastile.verify.losses.subject import Loss

__all__ = ["Claims", "Loss", "check"]
