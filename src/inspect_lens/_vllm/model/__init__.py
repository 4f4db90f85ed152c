"""What a model is made of: its layers, their parts, and how they carry the residual stream.

In: a loaded model. Out: where taps go. Read `find_layers.py` first.
"""
