"""From rows to a response: what a request expects, and its receipt.

In: a request's rows, once they have come. Out: tensors and a receipt on vLLM's output. Read
`attach.py` first.
"""
