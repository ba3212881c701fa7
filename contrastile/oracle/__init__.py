"""The oracle: the papers' equations in NumPy float64, one function each, cited by number.

`general`, `blocks`, `sigmoid` and `named` state the losses on full logits matrices; `tiled` states them on tiles.
Each paper has its own module and, beside it, one that keeps its mistakes exactly as they are printed.
NaN and infinity follow IEEE 754 to the end: nothing here raises or warns because of a value.
Nothing but NumPy is imported, and letters are those of the papers.
"""
