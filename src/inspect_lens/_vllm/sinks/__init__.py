"""Where results go beside the response: stores and functions that the operator names.

In: the joined rows of a finished choice. Out: shards, calls of a function, and what became of the
rows. Read `sink.py` first, then `recorder.py`.
"""
