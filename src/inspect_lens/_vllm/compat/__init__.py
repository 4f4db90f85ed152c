"""Every name of vLLM that we rely on, replaced or only read, and what an engine is.

In: vLLM's modules and configuration. Out: monkeypatches, features that are on or off, and
`EngineFacts`. Read `monkeypatches.py` first.
"""
