"""Functions that requests bring: run in eager steps, where the operator allows it.

In: pickled functions, read in one place (`unpickle.py`). Out: edited rows, and what the functions
saved. Read `runner.py` first.
"""
