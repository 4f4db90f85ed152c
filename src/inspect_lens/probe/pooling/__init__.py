"""From the tokens of a text to one score: which are read, and how their scores become one.

In: rows or scores per token. Out: one number per text, or one so far. Read `_pool.py` first.
"""
