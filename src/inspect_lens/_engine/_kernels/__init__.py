"""One file per implementation of the tap; `_engine._tap` is the only importer."""
