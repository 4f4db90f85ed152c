"""Whether an engine can do what is asked.

In: a request and the facts of an engine. Out: nothing, or an error that names the field. Read
`_check.py` first.
"""
