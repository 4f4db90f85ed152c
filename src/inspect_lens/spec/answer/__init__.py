"""What comes back: the receipt of a request, and what its hooks saved.

In: what the engine did. Out: JSON, and typed again. Read `_receipt.py` first.
"""
