"""The oracle: the losses in NumPy float64, one equation, one function, cited by number.

``general``, ``sigmoid``, ``pairs`` and ``named`` state the losses on full logits matrices, with which every backend is
compared. ``papers`` holds the equations of the papers as they are written. NaN and infinity follow IEEE 754 to the end:
nothing here raises or warns because of a value. Nothing but NumPy is imported, and letters are those of the papers.
"""
