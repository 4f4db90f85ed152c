"""Plain values of a request: tensors, names and words, read strictly and encoded in one way.

In: JSON, arrays. Out: values that are what they say. Read `_strict.py` first.
"""
