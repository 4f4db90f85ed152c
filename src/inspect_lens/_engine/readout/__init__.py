"""Readers: rows to few numbers, on the device.

In: captured rows. Out: scores of probes, means, maxima, norms. Read `readers.py` first.
"""
