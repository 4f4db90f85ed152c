"""Rows times weights on a GPU; `readout/readers.py` is the only importer."""
