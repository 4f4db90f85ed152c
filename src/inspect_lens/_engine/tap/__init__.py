"""What the model runs: the custom operator, its buffers, and the table of edits.

In: a step's plan and a request's edits. Out: edited rows of the stream, and captured ones in the
ring buffer. Read `op.py` first: it is the definition.
"""
