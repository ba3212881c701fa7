"""Schedules: the order in which the blocks of a problem are visited, and which rank holds which.

``problem`` is a whole loss as data; ``local`` walks it in one process, ``ring`` and ``gather`` over the ranks of a
communicator; ``schedule`` picks among them. A schedule knows no loss by name and no backend by name: it merges
log-sum-exps and adds gradients. ``handshake`` is what the ranks agree on first, ``placement`` what they learn by it.
"""
