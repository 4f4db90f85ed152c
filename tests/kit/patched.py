"""What patching asks of an engine, answered by Hugging Face forward passes with hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inspect_lens._patching.runs import Rows, Run
from inspect_lens.patch import Prompt
from inspect_lens.spec import Replace, Site

from .reference import HuggingFace

__all__ = ["SlowRuns"]


class SlowRuns:
    """The slow twin of an engine; it understands edits of `Replace` at listed positions.

    Args:
        folder: of the checkpoint.
        model: the same, loaded before.
    """

    def __init__(self, folder: Path, model: HuggingFace | None = None) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model = model or HuggingFace(folder)
        self.ran = 0

    def tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if not isinstance(prompt[0], dict):
            return list(prompt)  # type: ignore[arg-type]
        goes_on = prompt[-1]["role"] == "assistant"  # type: ignore[index]
        text = self.tokenizer.apply_chat_template(
            list(prompt), tokenize=False, add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )  # fmt: skip
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([i]) for i in ids]

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        values = self.model.sites(ids, sites=[site])[site]
        at = tuple(range(len(values))) if layers is None else tuple(layers)
        return Rows(at, values[list(at)].numpy())

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        for i, run in enumerate(runs):
            yield i, tuple(self.after(run)[list(tokens)].tolist())

    def after(self, run: Run) -> torch.Tensor:
        """Log-probabilities of all tokens after a run, (vocabulary,) float32."""
        self.ran += 1
        edits: dict[tuple[str, int], Any] = {}
        for edit in run.edits:
            assert isinstance(edit, Replace)
            for k, layer in enumerate(edit.layers):
                edits[edit.site, layer] = _blend(edit, k, edits.get((edit.site, layer)))
        logits: list[torch.Tensor] = []
        head = self.model.model.get_output_embeddings()
        keep = head.register_forward_hook(lambda _m, _a, out: logits.append(out[0, -1]))
        try:
            self.model.sites(run.ids, edits, sites=["resid_post"])
        finally:
            keep.remove()
        return logits[0].log_softmax(-1)


def _blend(edit: Replace, k: int, before: Any) -> Any:
    rows = torch.from_numpy(np.array(edit.rows.to_float32()[k]))
    assert isinstance(edit.positions, tuple)
    at = [int(p) for p in edit.positions]

    def apply(stream: torch.Tensor) -> torch.Tensor:
        made = stream.clone() if before is None else before(stream)
        made[at] = (1 - edit.alpha) * made[at] + edit.alpha * rows
        return made

    return apply
