"""The papers' own equations: Inf-CL, DisCo, GradCache and MBS, in NumPy float64, one function each, cited by number.

Each paper has its module and, beside it, one that keeps its mistakes exactly as they are printed (``*_as_printed``).
Nothing else in the package needs them.
"""
