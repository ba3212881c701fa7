"""The papers' own equations: Inf-CL, DisCo, GradCache and MBS, in NumPy float64, one function each, cited by number.

Each paper has a module, and a second one that holds its mistakes exactly as printed (``*_as_printed``).
Nothing else in the package needs them.
"""
