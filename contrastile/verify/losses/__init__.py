"""Checks of any loss: its claims, the way it is called, and a row for each case and property.

``check(loss)`` runs them in this process; ``contrastile verify --loss module:attribute`` in a new one.
"""

from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.selection import check
from contrastile.verify.losses.subject import Loss

__all__ = ["Claims", "Loss", "check"]
