"""The oracle: the losses in NumPy float64, one equation, one function, cited by number.

``general``, ``sigmoid``, ``pairs`` and ``named`` state the losses on full logits matrices. Every backend is compared
with them. ``papers`` holds the equations of the papers. NaN and infinity follow IEEE 754 throughout: no function raises
or warns because of a value. The oracle imports nothing but NumPy, and keeps the letters of the papers.
"""
