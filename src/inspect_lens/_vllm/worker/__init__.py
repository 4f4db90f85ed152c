"""In the worker: taps are put into the model, and both model runners tell of their steps.

In: vLLM's worker and runner. Out: calls of the engine's `Stepper`. Read `worker.py` first.
"""
