"""Mutation testing of ``verify``: known defects are planted one at a time, and ``contrastile verify`` must catch each.

A *mutant* is a copy of this package with one defect. It is *caught* when verify fails a check on it that the correct
code passes, and *missed* otherwise. An *equivalent* mutant computes the same numbers within the same bounds. Its entry
says why; it runs, but is not counted.
"""
