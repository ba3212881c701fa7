"""The papers' own equations: Inf-CL, DisCo, GradCache and MBS, in NumPy float64, one function each, cited by number.

The equations are corrected; ``tests/oracle/test_errata.py`` has the mistakes as printed. No other part of the package
needs them.
"""
