"""In the API server: bodies are read, routes are added, results are attached to responses.

In: HTTP bodies. Out: HTTP responses and frames of the binary transport. Read `bodies.py` first.
"""
