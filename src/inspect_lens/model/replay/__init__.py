"""Known tokens fed to a model again: to capture what was not, or to ask how likely they are.

In: a log or a conversation. Out: activations, or log probabilities. Read `_recapture.py` first.
"""
