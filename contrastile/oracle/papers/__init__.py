"""The papers' own equations: Inf-CL, DisCo, GradCache and MBS, in NumPy float64, one function each, cited by number.

They are as corrected; ``tests/oracle/test_errata.py`` has the mistakes as printed. Nothing else in the package needs
them.
"""
