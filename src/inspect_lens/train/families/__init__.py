"""Every family of probes: an estimator in scikit-learn's manner, with the settings of its source.

In: rows or sequences with labels. Out: a frozen probe. Read `_families.py` first.
"""
