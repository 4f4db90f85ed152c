"""Inspect tasks that use inspect_lens as any user would, through its public face."""
