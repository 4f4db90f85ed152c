"""The probe itself, linear or neural: found by name, and scoring arrays.

In: a name or a folder, rows of a layer. Out: a score per token. Read `_linear.py` first.
"""
