"""Taps, plans, buffers and export: a torch library that does not know vLLM.

Owns what happens inside the worker between "a step is scheduled" and "rows left the process",
and the collector that puts the rows together again in the front-end.
May import torch, numpy, pyzmq, msgspec and `spec`; keeps out vLLM, Inspect and `probe`.
"""
