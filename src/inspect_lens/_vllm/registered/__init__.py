"""Named probes, vectors and hooks, and what scores of probes mean.

In: what clients register. Out: what requests that name it get. Read `registry.py` first.
"""
