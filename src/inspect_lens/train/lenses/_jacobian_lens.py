"""The Jacobian lens: the mean effect of a layer's row on the rows behind the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._base.progress import progress_bar
from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens, LensCard, LensTraining
from inspect_lens.probe import ModelRef

from ._lens_model import LensModel, check_layers, check_sets, quality_of


def fit_jacobian_lens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    held_out: Sequence[Sequence[int]],
    name: str = "jacobian",
    layers: Sequence[int] | None = None,
    max_tokens: int = 128,
    skip_first: int = 16,
    skip_last: int = 1,
    block: int = 32,
    dtype: Literal["float32", "float16"] = "float32",
    dataset: str = "",
    model_ref: ModelRef | None = None,
    command: str = "",
    show_progress: bool = True,
) -> Lens:
    """Fit a Jacobian lens to a model.

    `J_l` is the mean over prompts of `(1/|V|) sum over t in V, t' in V, t' >= t` of the derivative
    of the row behind the last layer at `t'` by that of layer `l` at `t`, where `V` are the tokens
    that are not skipped. It is exact: the width of the model is the number of products of a row
    with the Jacobian that each prompt needs, `block` of them at once, and one forward pass serves
    them all. Hundreds of prompts are usual.

    Memory: `layers · width² · 4` bytes for the sum, and the activations of `block` copies of one
    prompt.

    Args:
        model: a decoder of transformers, on any device; it is not changed.
        prompts: token ids of texts like those that will be read.
        held_out: others; the card gets the lens's quality on them.
        name: of the card, such as `organism/jacobian`.
        layers: to translate; by default all but the last.
        max_tokens: of a prompt; what is behind them is left out.
        skip_first: tokens at the start of each prompt that are left out of `V`.
        skip_last: tokens at the end that are.
        block: rows of the Jacobian at once.
        dtype: in what the lens is stored; float16 is half as large.
        dataset: what the prompts are, for the card.
        model_ref: which model it is, for the card.
        command: that makes the lens, for the card.
        show_progress: a bar on a terminal.

    Returns:
        The lens.

    Raises:
        SpecError: a layer that the model does not have, a prompt in which all tokens are skipped,
            one that is in both sets, or a model whose final norm is not known.

    Source:
        "Verbalizable Representations Form a Global Workspace in Language Models" (Anthropic 2026),
        transformer-circuits.pub/2026/workspace.

    Example:
        ```python
        from transformers import AutoModelForCausalLM

        from inspect_lens.train import fit_jacobian_lens

        model = AutoModelForCausalLM.from_pretrained("organism/checkpoint")
        texts, others = [[0, 7, 8, 9]], [[0, 8, 7, 9]]
        lens = fit_jacobian_lens(model, texts, held_out=others, layers=[4], skip_first=0, block=256)
        assert lens.matrix.shape == (1, 256, 256)
        ```
    """
    read = LensModel(model)
    chosen = check_layers(layers, read)
    check_sets(prompts, held_out, read.vocab)
    if min(skip_first, skip_last) < 0 or block < 1:
        raise SpecError(f"skip_first={skip_first}, skip_last={skip_last}, block={block}")
    least = skip_first + skip_last + 1
    if short := [i for i, p in enumerate(prompts) if len(p[:max_tokens]) < least]:
        raise SpecError(
            f"prompts: {len(short)} of {len(prompts)} have fewer than {least} tokens, the first is "
            f"prompts[{short[0]}]; leave them out, or lower skip_first={skip_first}"
        )
    mean = torch.zeros(len(chosen), read.hidden, read.hidden, device=read.device)
    n_tokens = 0
    with read.frozen(), progress_bar(
        "fitting a Jacobian lens", total=len(prompts), done=0, show=show_progress
    ) as advance:  # fmt: skip
        for done, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt[:max_tokens])])
            valid = slice(skip_first, ids.shape[1] - skip_last)
            own = _jacobian(read, chosen, ids, valid, block)
            mean += (own - mean) / (done + 1)
            n_tokens += valid.stop - valid.start
            advance()
    if not torch.isfinite(mean).all():
        raise SpecError("model: its gradients are not finite; load it in float32")
    stored = _stored(mean, dtype)
    matrix = torch.from_numpy(stored.astype(np.float32)).to(read.device)
    quality, n_held_out = quality_of(
        read,
        chosen,
        lambda rows, at: rows @ matrix[at].T,
        held_out,
        batch=8,
        max_tokens=max_tokens,
        skip_first=0,
        show_progress=show_progress,
    )
    card = LensCard(
        name=name,
        kind="jacobian",
        n_layers=read.n_layers,
        layers=chosen,
        hidden=read.hidden,
        source="transformer-circuits.pub/2026/workspace",
        model=model_ref,
        training=LensTraining(
            method="mean Jacobian from the layer to the last one",
            dataset=dataset,
            n_prompts=len(prompts),
            n_tokens=n_tokens,
            settings={
                "max_tokens": max_tokens,
                "skip_first": skip_first,
                "skip_last": skip_last,
            },
        ),
        quality=quality,
        n_held_out=n_held_out,
        command=command,
    )
    return Lens(matrix=stored, card=card)


def _jacobian(
    model: LensModel, layers: tuple[int, ...], ids: torch.Tensor, valid: slice, block: int
) -> torch.Tensor:
    """The Jacobian of one prompt, (layers, width, width) float32.

    Copies of the prompt run side by side. The gradient of one number of the last rows, summed over
    the tokens that count, is one row of the Jacobian, and each copy is asked for another number.
    """
    width = model.hidden
    block = min(block, width)
    kept: dict[int, torch.Tensor] = {}

    def begin(rows: torch.Tensor) -> torch.Tensor:
        kept[layers[0]] = rows = rows.detach().requires_grad_()
        return rows

    def note(layer: int) -> Any:
        def watcher(rows: torch.Tensor) -> torch.Tensor:
            kept[layer] = rows
            return rows

        return watcher

    last = model.n_layers - 1
    watchers = {layer: note(layer) for layer in (*layers[1:], last)} | {layers[0]: begin}
    with model.watched(watchers), torch.enable_grad():
        model.run(ids.expand(block, -1))
    out = torch.empty(len(layers), width, width, device=model.device)
    sources = [kept[layer] for layer in layers]
    for start in range(0, width, block):
        n = min(block, width - start)
        asked = torch.zeros_like(kept[last])
        copies = torch.arange(n, device=model.device)
        asked[copies, valid, start + copies] = 1
        gradients = torch.autograd.grad(kept[last], sources, asked, retain_graph=start + n < width)
        for i, gradient in enumerate(gradients):
            out[i, start : start + n] = gradient[:n, valid].float().mean(dim=1)
    return out


def _stored(mean: torch.Tensor, dtype: str) -> NDArray[np.float32] | NDArray[np.float16]:
    """As numpy; a number that float16 lacks is an error."""
    values: NDArray[np.float32] = mean.cpu().numpy()
    if dtype == "float32":
        return values
    if np.abs(values).max() > np.finfo(np.float16).max:
        raise SpecError("dtype='float16': the Jacobian has larger numbers; use float32")
    return values.astype(np.float16)
