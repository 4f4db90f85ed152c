"""Every name of vLLM that we lean on, wrapped or only read, and what an engine is.

In: vLLM's modules and configuration. Out: `Seam`s, features that are on or off, `EngineFacts`. Read
`seam_table.py` first.
"""
