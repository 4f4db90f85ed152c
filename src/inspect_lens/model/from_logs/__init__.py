"""From a log, a sample or a message to what was captured, without a server.

In: what a scorer or an analyst has in hand. Out: activations, scores, small files beside the log.
Read `_read.py` first.
"""
