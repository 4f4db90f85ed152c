"""Edits: what a request may do to activations while the model runs, one file per family.

In: what a user writes (JSON or Python objects). Out: short programs of `Instruction`s, which the
engine carries out at a tap. Read `_instruction.py` first: it is the definition of a program. An
operation is one class with its `op`, its fields and `_program`, in the `__all__` of its file.
"""
