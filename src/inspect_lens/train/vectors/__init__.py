"""Steering vectors and conditions from activations, and what they tell of other samples.

In: sets of contrasting samples. Out: vectors with cards. Read `_vectors.py` first.
"""
