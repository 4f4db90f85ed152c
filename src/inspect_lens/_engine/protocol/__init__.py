"""What programs tell each other: envelopes, messages, shared memory.

In: a judged request, or rows of a step. Out: bytes for another process. Read `messages.py` first.
"""
