"""Lenses trained on texts: tuned and Jacobian, and how well they predict.

In: a model of transformers and texts. Out: a lens with its card. Read `_lens_model.py` first.
"""
