"""What a probe does on sets that decided nothing about it, beside what is simpler than it.

In: a probe, or a family, and sets. Out: evaluations, baselines, the choice of a layer. Read
`_evaluate.py` first.
"""
