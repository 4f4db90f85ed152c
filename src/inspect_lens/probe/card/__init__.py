"""The card of a probe: where it comes from, what it was measured to do, and its files.

In: facts of a training and an evaluation. Out: a folder of a probe, and a page for people. Read
`_card.py` first.
"""
