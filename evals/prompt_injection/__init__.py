"""Does an instruction inside the data draw a model away from its own?"""

from evals.prompt_injection.dataset import CONDITIONS, injection_dataset
from evals.prompt_injection.task import (
    auroc_padded,
    injected_heads,
    injection_followed,
    prompt_injection,
)

__all__ = [
    "CONDITIONS",
    "auroc_padded",
    "injected_heads",
    "injection_dataset",
    "injection_followed",
    "prompt_injection",
]
