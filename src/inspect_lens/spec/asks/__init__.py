"""What can be asked, one file for each: capture, probes, lenses, hooks, sinks.

In: the value of one key. Out: a typed part of a request. Read `_capture.py` first.
"""
