"""How well a lens predicts what the model predicts, beside the logit lens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inspect_lens._progress import progress_bar
from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens, LensQuality

from ._lens_model import LensModel, batches, check_prompts

__all__ = ["evaluate_lens", "quality_of"]

_ROWS = 512
"""Rows whose logits are made at once."""

Translate = Callable[[torch.Tensor, int], torch.Tensor]


def evaluate_lens(
    model: Any,
    lens: Lens,
    prompts: Sequence[Sequence[int]],
    *,
    batch: int = 16,
    max_tokens: int = 512,
    skip_first: int = 0,
    show_progress: bool = True,
) -> tuple[LensQuality, ...]:
    """Compare a lens with the model's own predictions, and with the logit lens.

    Args:
        model: a decoder of transformers, on any device.
        lens: of this model.
        prompts: token ids of texts that the lens was not fitted on.
        batch: prompts at once.
        max_tokens: of a prompt; what is behind them is left out.
        skip_first: tokens at the start of each prompt that are not judged.
        show_progress: a bar on a terminal.

    Returns:
        Mean KL divergence and agreement for each layer of the lens.

    Raises:
        SpecError: the lens is of another model, or there is nothing to read.

    Example:
        ```python
        import numpy as np
        from transformers import AutoModelForCausalLM

        from inspect_lens.lens import Lens, LensCard
        from inspect_lens.train import evaluate_lens

        model = AutoModelForCausalLM.from_pretrained("organism/checkpoint")
        card = LensCard(name="none", kind="jacobian", n_layers=6, layers=(4,), hidden=256)
        identity = Lens(matrix=np.eye(256)[None], card=card)  # the logit lens
        (quality,) = evaluate_lens(model, identity, [[0, 7, 8, 9]])
        assert abs(quality.kl - quality.logit_kl) < 1e-4
        ```
    """
    read = LensModel(model)
    card = lens.card
    if (card.n_layers, card.hidden) != (read.n_layers, read.hidden):
        raise SpecError(
            f"lens: fitted to {card.n_layers} layers of width {card.hidden}; the model has "
            f"{read.n_layers} of width {read.hidden}"
        )
    matrix = torch.from_numpy(lens.matrix.astype("float32")).to(read.device)
    bias = None if lens.bias is None else torch.from_numpy(lens.bias.copy()).to(read.device)

    def translate(rows: torch.Tensor, at: int) -> torch.Tensor:
        made = rows @ matrix[at].T
        return made if bias is None else rows + made + bias[at]

    found, _ = quality_of(
        read,
        card.layers,
        translate,
        prompts,
        batch=batch,
        max_tokens=max_tokens,
        skip_first=skip_first,
        show_progress=show_progress,
    )
    return found


def quality_of(
    model: LensModel,
    layers: Sequence[int],
    translate: Translate,
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
    max_tokens: int,
    skip_first: int,
    show_progress: bool,
) -> tuple[tuple[LensQuality, ...], int]:
    """Judge translations of some layers.

    Args:
        model: whose predictions count.
        layers: to judge.
        translate: gets float32 rows and the index of their layer in `layers`.
        prompts: see `evaluate_lens`, as are the others.
        batch: prompts at once.
        max_tokens: of a prompt.
        skip_first: tokens at the start.
        show_progress: a bar on a terminal.

    Returns:
        Of each layer, and rows of each.

    Raises:
        SpecError: there is nothing to read.
    """
    check_prompts(prompts, model.vocab, "prompts")
    sums = torch.zeros(len(layers), 4, dtype=torch.float64, device=model.device)
    n = 0
    total = -(-len(prompts) // batch)
    with progress_bar("judging the lens", total=total, done=0, show=show_progress) as advance:
        for ids, is_token in batches(prompts, batch, max_tokens):
            rows = model.rows(ids)
            wanted = is_token.clone()
            wanted[:, :skip_first] = False
            chosen = rows[:, wanted.to(rows.device)]
            n += chosen.shape[1]
            with torch.no_grad():
                for part in torch.split(chosen, _ROWS, dim=1):
                    truth = model.unembed(part[-1]).log_softmax(dim=-1)
                    best = truth.argmax(dim=-1)
                    for i, layer in enumerate(layers):
                        wide = part[layer].float()
                        for at, read in ((0, translate(wide, i)), (1, wide)):
                            found = model.unembed(read).log_softmax(dim=-1)
                            sums[i, at] += divergence(truth, found).sum()
                            sums[i, 2 + at] += (found.argmax(dim=-1) == best).sum()
            advance()
    if not n:
        raise SpecError(f"prompts: none has more than skip_first={skip_first} tokens")
    mean = (sums / n).tolist()
    quality = tuple(
        LensQuality(layer=layer, kl=kl, logit_kl=logit, agreement=own, logit_agreement=plain)
        for layer, (kl, logit, own, plain) in zip(layers, mean, strict=True)
    )
    return quality, n


def divergence(truth: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL divergence in nats from one prediction to another.

    Args:
        truth: (rows, vocabulary) log-probabilities.
        found: the same of what approximates it.

    Returns:
        (rows,).
    """
    return (truth.exp() * (truth - found)).sum(dim=-1)
