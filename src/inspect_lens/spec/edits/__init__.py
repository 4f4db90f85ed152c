"""Edits: what a request may do to activations while the model runs, one file per family.

In: what a user writes (JSON or Python objects). Out: short programs of `Instruction`s, which the
engine carries out at a tap. Read `_instruction.py` first: it is the definition of a program.
"""

from ._base import EDIT_REFERENCE, EditBase
from ._choice import (
    CHOICES,
    Choice,
    Chosen,
    check_token_ids,
    choice_sites,
    chosen_numbers,
    sampled_match,
    token_gate,
    token_gate_key,
)
from ._directions import Ablate, Add, Clamp, Scale, Set
from ._gate import TENSOR_REFERENCE, Gate
from ._instruction import (
    MOST_INSTRUCTIONS,
    N_LATCHES,
    N_REGISTERS,
    NEXT_TOKEN,
    SAME_TOKEN,
    Instruction,
    Kind,
    run_program,
)
from ._latents import MOST_LATENTS, Latent, LatentMode, Latents, Reconstruct
from ._subspaces import Insert, LowRank, ProjectOut, Renormalise, Replace, Rotate, Swap, Zero
from ._union import EDITS, Edit, EditsUse, EngineEdits, parse_edits

__all__ = [
    "CHOICES",
    "EDITS",
    "EDIT_REFERENCE",
    "MOST_INSTRUCTIONS",
    "MOST_LATENTS",
    "NEXT_TOKEN",
    "N_LATCHES",
    "N_REGISTERS",
    "SAME_TOKEN",
    "TENSOR_REFERENCE",
    "Ablate",
    "Add",
    "Choice",
    "Chosen",
    "Clamp",
    "Edit",
    "EditBase",
    "EditsUse",
    "EngineEdits",
    "Gate",
    "Insert",
    "Instruction",
    "Kind",
    "Latent",
    "LatentMode",
    "Latents",
    "LowRank",
    "ProjectOut",
    "Reconstruct",
    "Renormalise",
    "Replace",
    "Rotate",
    "Scale",
    "Set",
    "Swap",
    "Zero",
    "check_token_ids",
    "choice_sites",
    "chosen_numbers",
    "parse_edits",
    "run_program",
    "sampled_match",
    "token_gate",
    "token_gate_key",
]
