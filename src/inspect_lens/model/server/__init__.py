"""The server of a provider: started or attached to, and told of adapters, probes and lenses.

In: arguments of a model. Out: a base URL, and names that the server knows. Read `_server.py` first.
"""
