"""One file per implementation of the tap; `tap/op.py` is the only importer."""
