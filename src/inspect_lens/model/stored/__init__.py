"""Where captured activations lie: in memory with a limit, or in a file beside the log.

In: tensors of a call. Out: a handle that reads them, and is a reference in the log. Read
`_handle.py` first.
"""
