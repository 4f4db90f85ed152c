"""One typed request, read from every spelling and written in one.

In: the body of a call, or `extra_args`. Out: a `LensRequest`, and back. Read `_request.py` first.
"""
