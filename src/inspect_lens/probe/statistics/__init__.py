"""Numbers that judge scores: metrics, intervals, tests, and how many independent groups there are.

In: scores, labels, groups. Out: numbers with intervals. Read `_metrics.py` first.
"""
