"""What a probe is trained and judged on: activations, labels and groups, in memory or on disk.

In: stores, arrays, caches of other packages. Out: an `ActivationSet`, split so that no group
straddles. Read `_dataset.py` first.
"""
