"""Fitting a family on a set at a layer: in memory, piece by piece, or carried from another model.

In: an estimator and a set. Out: the estimator, fitted. Read `_fit.py` first.
"""
