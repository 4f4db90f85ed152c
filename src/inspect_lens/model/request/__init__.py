"""What a call asks of the lens: the configuration as a user writes it, made one typed request.

In: `extra_body`, vectors, scopes around a call. Out: `vllm_xargs`. Read `_body.py` first.
"""
