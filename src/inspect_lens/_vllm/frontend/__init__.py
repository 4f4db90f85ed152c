"""In every front-end: a request is judged, sealed for the workers and expected.

In: vLLM's parameters and prompts. Out: requests with an envelope. Read `wrappers.py` first.
"""
