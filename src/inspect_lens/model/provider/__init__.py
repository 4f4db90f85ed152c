"""The Inspect provider: the hook before a call, the call itself, and scopes around it.

In: a `GenerateConfig` and messages. Out: a `ModelOutput` with handles. Read `_provider.py` first.
"""
