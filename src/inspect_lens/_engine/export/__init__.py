"""Off the device, to a receiver: ring buffer, send queue, copies, transport.

In: rows that a step wrote to the ring buffer. Out: blocks in shared memory, and messages that tell
of them. Read `transport.py` first.
"""
