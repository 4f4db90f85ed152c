"""The glue to vLLM: a folder per program.

`plugin.py` is the entry point. `frontend`, `registered` and `results` run in every front-end,
`http` in the API server, `engine_core` in the scheduler's process, `worker` and `model` in the
workers; `compat` has every name of vLLM.
"""
