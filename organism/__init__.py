"""The offline model organism: a tiny transformer that knows a closed world and may be told to lie.

Owns its world, its corpus, its evaluation splits and its trainer. May import torch and transformers
(in `train`, `evaluate` and the files only they use); keeps out inspect_lens, vllm and inspect_ai.
"""
