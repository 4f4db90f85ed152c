"""The glue to vLLM: one file per process it runs in; `_compat` owns every private name.

Owns where vLLM is wrapped and what is read from it.
May import vllm, `_engine` and `spec`; keeps out Inspect and the client rooms.
"""
