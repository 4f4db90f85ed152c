"""The receiver's side: rows of all workers put together for each request.

In: messages and blocks of shared memory. Out: the tensors of a request, once all have come. Read
`collector.py` first.
"""
