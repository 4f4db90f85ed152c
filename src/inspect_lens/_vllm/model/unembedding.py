"""The model's final norm and unembedding, found so that rows of any layer can go through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from inspect_lens.errors import UnsupportedError

from .parameters import Ranks

_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
"""Names of the norm behind the last layer, in the module that has the layers."""

_BEHIND = ("project_out", "proj_out", "output_projection")
"""Of what some models have between that norm and the unembedding."""


class VocabHead:
    """Applies final norm and unembedding to rows, with soft cap and scale as the model does."""

    def __init__(self, model: Any, layers: list[nn.Module | None]) -> None:
        self._norm = final_norm(model, layers)
        self._processor = logits_processor(model)
        # With LoRA another module stands around it, which adds what adapters make of a step's rows.
        around = [m for m in model.modules() if getattr(m, "base_layer", None) is self._processor]
        self._wrapper: Any = around[0] if around else None
        self._compute = model.compute_logits
        self._ranks = Ranks.here()
        self.vocab = int(self._processor.org_vocab_size)
        self.n_ranks = self._ranks.n

    def say(self, text: str) -> list[str]:
        return self._ranks.say(text)

    def logits(self, rows: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            with self._own_part():
                if self.n_ranks == 1:
                    whole: torch.Tensor = self._compute(self._norm(rows()))
                    return whole[:, : self.vocab]
                parts = self._ranks.gather(lambda: [self._compute(self._norm(rows()))])[0]
            # (ranks, rows, part): padding of the vocabulary is at its end.
            return parts.transpose(0, 1).flatten(1)[:, : self.vocab]

    @contextmanager
    def _own_part(self) -> Iterator[None]:
        """Have the model compute this rank's part, without adapters.

        What may fail comes before the ranks meet.
        """
        self._processor._gather_logits = lambda logits: logits
        if self._wrapper is not None:
            self._wrapper._get_logits = self._without_adapter
        try:
            yield
        finally:
            del self._processor._gather_logits
            if self._wrapper is not None:
                del self._wrapper._get_logits

    def _without_adapter(self, hidden: torch.Tensor, head: Any, *rest: Any) -> Any:
        """What the wrapped module makes of rows."""
        return self._processor._get_logits(hidden, getattr(head, "base_layer", head), *rest)


def final_norm(model: nn.Module, layers: list[nn.Module | None]) -> nn.Module:
    """The norm between the last decoder layer and the unembedding.

    It is the one child with a known name of the module that has the list of layers.
    """
    for parent in model.modules():
        lists = [c for c in parent.children() if isinstance(c, nn.ModuleList) and len(c)]
        if not any(layers[-1] is one[-1] for one in lists):
            continue
        found = {n: c for n, c in parent.named_children() if n in _NORMS}
        behind = [n for n in _BEHIND if isinstance(getattr(parent, n, None), nn.Module)]
        if len(found) == 1 and not behind:
            return next(iter(found.values()))
        raise UnsupportedError(
            f"the final norm of {type(model).__name__} is not known: {type(parent).__name__} has "
            f"{', '.join([*found, *behind]) or 'none'} behind its layers, and known is one of "
            f"{', '.join(_NORMS)}; capture the rows instead"
        )
    raise UnsupportedError(
        f"the final norm of {type(model).__name__} is not known: no module has its decoder layers "
        "as a list; capture the rows instead"
    )


def logits_processor(model: nn.Module) -> Any:
    """What makes logits of the unembedding's results: soft cap, scale, and the ranks' parts."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(found) != 1 or not hasattr(model, "compute_logits"):
        raise UnsupportedError(
            f"the unembedding of {type(model).__name__} is not known: {len(found)} logits "
            "processors, and one is needed; capture the rows instead"
        )
    return found[0]
