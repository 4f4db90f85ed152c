"""One step of a worker: which requests are there, what is planned, what is sent.

In: a batch as vLLM scheduled it. Out: maps for the taps before the forward pass, and results behind
it. Read `stepper.py` first.
"""
