"""The tuned lens: an affine map per layer, trained to predict what the model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from inspect_lens._base.progress import progress_bar
from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens, LensCard, LensTraining
from inspect_lens.probe import ModelRef

from ._lens_model import LensModel, batches, check_layers, check_sets, divergence, quality_of

_SOURCE = "arXiv:2303.08112"


def fit_tuned_lens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    held_out: Sequence[Sequence[int]],
    name: str = "tuned",
    layers: Sequence[int] | None = None,
    steps: int = 250,
    batch: int = 16,
    max_tokens: int = 512,
    skip_first: int = 0,
    lr: float = 1e-3,
    weight_decay: float = 1e-3,
    random_state: int = 0,
    dataset: str = "",
    model_ref: ModelRef | None = None,
    command: str = "",
    show_progress: bool = True,
) -> Lens:
    """Fit a tuned lens to a model.

    The row `h` of a layer becomes `h + A h + b`, and `A` and `b` start at zero, which is the logit
    lens. Minimised is the KL divergence from the model's own next-token distribution to that of the
    translated row. Adam, whose rate falls to zero linearly; gradients of each layer are cut to
    norm 1. Rows are made as they are needed: memory is that of one batch, the maps, and logits of
    one layer.

    Args:
        model: a decoder of transformers, on any device; it is not changed.
        prompts: token ids of texts like those that will be read.
        held_out: others; the card gets the lens's quality on them.
        name: of the card, such as `organism/tuned`.
        layers: to translate; by default all but the last.
        steps: batches; prompts are drawn anew when all have been used.
        batch: prompts at once.
        max_tokens: of a prompt; what is behind them is left out.
        skip_first: tokens at the start of each prompt that are not read.
        lr: learning rate at the start.
        weight_decay: of AdamW, towards the logit lens.
        random_state: of the order of prompts.
        dataset: what the prompts are, for the card.
        model_ref: which model it is, for the card.
        command: that makes the lens, for the card.
        show_progress: a bar on a terminal.

    Returns:
        The lens, float32.

    Raises:
        SpecError: a layer that the model does not have, no prompt, a prompt that is in both sets,
            or a model whose final norm is not known.

    Source:
        Belrose et al. 2023, "Eliciting latent predictions from transformers with the tuned lens",
        arXiv:2303.08112. There the optimiser is SGD with momentum.

    Example:
        ```python
        from transformers import AutoModelForCausalLM

        from inspect_lens.train import fit_tuned_lens

        model = AutoModelForCausalLM.from_pretrained("organism/checkpoint")
        texts, others = [[0, 7, 8, 9], [0, 9, 8, 7]], [[0, 8, 7, 9]]
        lens = fit_tuned_lens(model, texts, held_out=others, layers=[2, 4], steps=2)
        assert [quality.layer for quality in lens.card.quality] == [2, 4]
        ```
    """
    read = LensModel(model)
    chosen = check_layers(layers, read)
    check_sets(prompts, held_out, read.vocab)
    if min(steps, batch) < 1:
        raise SpecError(f"steps={steps}, batch={batch}; both have to be 1 or more")
    width = read.hidden
    maps = [torch.zeros(width, width + 1, device=read.device, requires_grad=True) for _ in chosen]
    optimiser = torch.optim.AdamW(maps, lr=lr, weight_decay=weight_decay)
    fall = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    n_tokens = 0
    draw = _Draw(prompts, random_state)
    with read.frozen(), progress_bar(
        "fitting a tuned lens", total=steps, done=0, show=show_progress
    ) as advance:  # fmt: skip
        for _ in range(steps):
            ids, is_token = next(iter(batches(draw(batch), batch, max_tokens)))
            is_token[:, :skip_first] = False
            rows = read.rows(ids)[:, is_token.to(read.device)].float()
            advance()
            if not rows.shape[1]:
                continue
            n_tokens += rows.shape[1]
            with torch.no_grad():
                truth = read.unembed(rows[-1]).log_softmax(dim=-1)
            optimiser.zero_grad()
            for affine, layer in zip(maps, chosen, strict=True):
                found = read.unembed(_translated(rows[layer], affine)).log_softmax(dim=-1)
                loss = divergence(truth, found).mean()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_([affine], 1.0)
            optimiser.step()
            fall.step()
    if not n_tokens:
        raise SpecError(f"prompts: none has more than skip_first={skip_first} tokens")
    done = torch.stack([affine.detach() for affine in maps])
    quality, n_held_out = quality_of(
        read,
        chosen,
        lambda rows, at: _translated(rows, done[at]),
        held_out,
        batch=batch,
        max_tokens=max_tokens,
        skip_first=skip_first,
        show_progress=show_progress,
    )
    settings = {"steps": steps, "batch": batch, "max_tokens": max_tokens, "lr": lr}
    settings |= {"skip_first": skip_first, "weight_decay": weight_decay, "seed": random_state}
    card = LensCard(
        name=name,
        kind="tuned",
        n_layers=read.n_layers,
        layers=chosen,
        hidden=width,
        source=_SOURCE,
        model=model_ref,
        training=LensTraining(
            method="KL divergence to the model's own prediction, AdamW",
            dataset=dataset,
            n_prompts=len(prompts),
            n_tokens=n_tokens,
            settings=settings,
        ),
        quality=quality,
        n_held_out=n_held_out,
        command=command,
    )
    both = done.cpu().numpy()
    return Lens(matrix=both[:, :, :width], bias=both[:, :, width], card=card)


def _translated(rows: torch.Tensor, affine: torch.Tensor) -> torch.Tensor:
    return rows + torch.addmm(affine[:, -1], rows, affine[:, :-1].T)


class _Draw:
    """Gives prompts at random, each once before any comes again."""

    def __init__(self, prompts: Sequence[Sequence[int]], seed: int) -> None:
        self._prompts, self._rng = prompts, np.random.default_rng(seed)
        self._left: list[int] = []

    def __call__(self, size: int) -> list[Sequence[int]]:
        while len(self._left) < size:
            self._left.extend(self._rng.permutation(len(self._prompts)).tolist())
        taken, self._left = self._left[:size], self._left[size:]
        return [self._prompts[i] for i in taken]
