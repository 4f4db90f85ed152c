"""What comes back: fields of a response checked, fetched, stored, and named in the metadata.

In: a response of a lens server. Out: `output.metadata`. Read `_attach.py` first.
"""
