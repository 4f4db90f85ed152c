"""Activation patching without an engine: prompts and rows in, events and arrays out.

`inspect_lens.patch` runs it on an engine of this process or a server's, and a server on its own.
Read `sweep.py` first; `runs.py` says what it asks an engine for.
"""
