"""Schedules: in which order the blocks of a problem are computed, and on which rank.

``problem`` is a whole loss as data; ``local`` walks it in one process, ``ring`` and ``gather`` over the ranks of a
communicator; ``compute._schedule`` picks among them. A schedule knows no loss by name and no backend by name: it merges
log-sum-exps and adds gradients. ``handshake`` makes the ranks agree first, and its result is each rank's ``placement``.
"""
