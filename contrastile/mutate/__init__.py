"""Mutation testing of ``verify``: known defects planted one at a time, and whether ``contrastile verify`` sees each.

A *mutant* is a backend, or a copy of this package, with one defect. It is *caught* when verify fails a check on it that
the right code passes, and *missed* otherwise. An *equivalent* mutant computes the same numbers within the same bounds,
and its entry argues why: it is run too, but never counted.
"""
