"""From scores to probabilities and thresholds, and how sure they are.

In: scores of a control set. Out: a calibration, a threshold, an interval. Read `_calibrate.py`
first.
"""
