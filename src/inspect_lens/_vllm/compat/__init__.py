"""Every name of vLLM that we used on, wrapped or only read, and what an engine is.

In: vLLM's modules and configuration. Out: `Monkeypatch`s, features that are on or off, `EngineFacts`. Read
`monkeypatches.py` first.
"""
