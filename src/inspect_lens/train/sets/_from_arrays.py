"""Activations that somebody already has, as activation sets: arrays, tensors and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError

from ._dataset import ActivationSet, numbered

__all__ = ["from_arrays", "from_hf", "from_nnsight", "from_transformer_lens"]

Floats = NDArray[np.float32]


@judged_arguments
def from_arrays(
    acts: Any,
    labels: ArrayLike,
    *,
    layers: Sequence[int],
    mask: Any = None,
    groups: Sequence[str] | None = None,
    name: str = "arrays",
    model: str = "",
    **facts: Any,
) -> ActivationSet:
    """Make an activation set of arrays or tensors.

    Args:
        acts: numpy arrays or torch tensors of any float type, bfloat16 too, on any device:
            (samples, layers, hidden) pooled rows, one token each; (samples, layers, tokens,
            hidden) with `mask`; or one per sample, each (layers, tokens, hidden) or
            (layers, hidden).
        labels: (samples,) of 0 and 1.
        layers: layer of each entry of the layer axis: the block, counted from 0, whose output the
            rows are.
        mask: (samples, tokens), 1 for the tokens to read; those before the first and behind the
            last are padding and are dropped.
        groups: (samples,) what a split must not divide; by default each sample is its own.
        name: of the set; samples without `ids` have names of it, so give each set its own.
        model: name or path of the model.
        **facts: more fields of `ActivationSet`, such as `ids` and `columns`.

    Raises:
        SpecError: shapes disagree, a value is NaN, or a sample has no token.

    Example:
        ```python
        import torch

        from inspect_lens.train import from_arrays

        pooled = torch.randn(20, 2, 64, dtype=torch.bfloat16)  # (samples, layers, hidden)
        data = from_arrays(pooled, [0, 1] * 10, layers=[10, 12], model="my-model")
        assert data.layers == (10, 12)
        assert data.acts[0].shape == (2, 1, 64)
        ```
    """
    rows, keep = _split(acts, mask, n_layers=len(layers))
    return ActivationSet(
        name=name,
        model=model,
        layers=tuple(layers),
        acts=tuple(rows),
        labels=np.asarray(labels),
        groups=numbered(name, len(rows)) if groups is None else tuple(groups),
        mask=tuple(keep),
        **facts,
    )


def from_hf(
    hidden_states: Sequence[Any],
    labels: ArrayLike,
    *,
    mask: Any = None,
    layers: Sequence[int] | None = None,
    **facts: Any,
) -> ActivationSet:
    """Make an activation set of `hidden_states` as transformers gives them.

    Their index is not that of a layer: entry 0 is the embedding, and entry k + 1 the output of
    block k. The last entry has passed the final norm, so it is no residual stream, and the last
    block cannot be had from it; capture that block with a forward hook.

    Args:
        hidden_states: `model(**inputs, output_hidden_states=True).hidden_states`: one more than
            the model has blocks, each (samples, tokens, hidden); or those of `generate`, a
            tuple of them for each step.
        labels: (samples,) of 0 and 1.
        mask: (samples, tokens), such as the tokenizer's `attention_mask`; 1 for tokens to read.
        layers: blocks to keep, counted from 0; all but the last by default.
        **facts: as in `from_arrays`.

    Raises:
        SpecError: the last block is asked for, or as `from_arrays`.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from inspect_lens.train import from_hf

        tokenizer = AutoTokenizer.from_pretrained("organism/checkpoint")
        model = AutoModelForCausalLM.from_pretrained("organism/checkpoint")
        inputs = tokenizer(["who is it ?", "no ."], return_tensors="pt", padding=True)
        with torch.no_grad():
            output = model(**inputs, output_hidden_states=True)
        data = from_hf(output.hidden_states, [1, 0], mask=inputs["attention_mask"], layers=[2, 4])
        assert data.layers == (2, 4)
        ```
    """
    states = list(hidden_states)
    if states and isinstance(states[0], tuple | list):
        # generate: the first step has the prompt, each later one the token that it fed.
        states = [
            torch.cat([_tensor(s) for s in step], dim=1) for step in zip(*states, strict=True)
        ]
    if len(states) < 2:
        raise SpecError(
            f"hidden_states: {len(states)} entries; allowed are those of all blocks and the "
            "embedding before them; pass the tuple of the output, whole"
        )
    n_blocks = len(states) - 1
    chosen = tuple(range(n_blocks - 1)) if layers is None else tuple(layers)
    wrong = [layer for layer in chosen if not 0 <= layer < n_blocks - 1]
    if wrong or not chosen:
        raise SpecError(
            f"layers={list(chosen)}: hidden_states of {n_blocks} blocks give the output of blocks "
            f"0 to {n_blocks - 2}; that of the last one is given behind the final norm only; "
            "take others, or capture the last block with a hook and pass it to from_arrays"
        )
    return from_arrays(
        _stack([states[layer + 1] for layer in chosen]), labels, layers=chosen, mask=mask, **facts
    )


def from_nnsight(
    saved: Mapping[int, Any], labels: ArrayLike, *, mask: Any = None, **facts: Any
) -> ActivationSet:
    """Make an activation set of what an nnsight trace saved of the blocks' outputs.

    Args:
        saved: by block, counted from 0: `model.model.layers[n].output[0].save()` or
            `.output.save()`, each (samples, tokens, hidden); a tuple's first entry is taken.
        labels: (samples,) of 0 and 1.
        mask: (samples, tokens), 1 for tokens to read.
        **facts: as in `from_arrays`.

    Raises:
        SpecError: as `from_arrays`.

    Example:
        ```python
        import torch

        from inspect_lens.train import from_nnsight

        saved = {4: torch.randn(2, 7, 32), 2: torch.randn(2, 7, 32)}  # of a trace
        data = from_nnsight(saved, [0, 1])
        assert data.layers == (2, 4)
        ```
    """
    layers = sorted(saved)
    values = []
    for layer in layers:
        value = saved[layer]
        value = getattr(value, "value", value)  # a proxy of releases that have them
        values.append(value[0] if isinstance(value, tuple | list) else value)
    return from_arrays(_stack(values), labels, layers=layers, mask=mask, **facts)


@judged_arguments
def from_transformer_lens(
    cache: Any,
    labels: ArrayLike,
    *,
    mask: Any = None,
    layers: Sequence[int] | None = None,
    **facts: Any,
) -> ActivationSet:
    """Make an activation set of a TransformerLens cache.

    Layer n is `blocks.n.hook_resid_post`, or, where that is not in the cache, the same stream
    under its other name, `blocks.{n+1}.hook_resid_pre`. Load the model with
    `from_pretrained_no_processing`: the weights that `from_pretrained` centres and folds make
    another residual stream than the one that is served.

    Args:
        cache: an `ActivationCache`, or a mapping from hook names to (samples, tokens, hidden).
        labels: (samples,) of 0 and 1.
        mask: (samples, tokens), 1 for tokens to read.
        layers: blocks, counted from 0; by default all whose output is in the cache.
        **facts: as in `from_arrays`.

    Raises:
        SpecError: a layer is not in the cache, or as `from_arrays`.

    Example:
        ```python
        import torch

        from inspect_lens.train import from_transformer_lens

        cache = {f"blocks.{n}.hook_resid_post": torch.randn(2, 7, 32) for n in range(3)}
        data = from_transformer_lens(cache, [0, 1], layers=[1])
        assert data.layers == (1,)
        ```
    """
    known: Mapping[str, Any] = getattr(cache, "cache_dict", cache)
    found: dict[int, Any] = {}
    for key, value in known.items():
        block, _, hook = str(key).removeprefix("blocks.").partition(".")
        if block.isdecimal() and hook in ("hook_resid_post", "hook_resid_pre"):
            layer = int(block) - (hook == "hook_resid_pre")
            if layer >= 0 and (hook == "hook_resid_post" or layer not in found):
                found[layer] = value
    chosen = sorted(found if layers is None else layers)
    missing = [layer for layer in chosen if layer not in found]
    if missing or not chosen:
        raise SpecError(
            f"layers={chosen}: the cache holds the output of blocks {sorted(found)}; allowed are "
            "these; run with names_filter that keeps hook_resid_post of the others"
        )
    return from_arrays(
        _stack([found[layer] for layer in chosen]), labels, layers=chosen, mask=mask, **facts
    )


def _tensor(value: Any) -> torch.Tensor:
    made = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))
    return made.detach()


def _float32(value: Any) -> Floats:
    return np.asarray(_tensor(value).to("cpu", torch.float32).numpy())


def _stack(values: Sequence[Any]) -> list[Floats]:
    """Arrays (samples, tokens, hidden) of several layers as one (layers, tokens, hidden) each."""
    wide = [_float32(value) for value in values]
    shapes = {array.shape for array in wide}
    if len(shapes) != 1 or wide[0].ndim != 3:
        raise SpecError(
            f"activations: shapes {sorted(map(str, shapes))}; allowed is one shape (samples, "
            "tokens, hidden) for all layers"
        )
    return [np.stack([array[i] for array in wide]) for i in range(len(wide[0]))]


def _split(acts: Any, mask: Any, *, n_layers: int) -> tuple[list[Floats], list[NDArray[np.bool_]]]:
    """Rows (layers, tokens, hidden) and bools (tokens,) of each sample, without padding."""
    if isinstance(acts, torch.Tensor | np.ndarray) and acts.ndim not in (3, 4):
        raise SpecError(
            f"acts: shape {tuple(acts.shape)}; allowed are (samples, layers, hidden) and (samples, "
            "layers, tokens, hidden); add the axis that is missing"
        )
    samples = [_float32(sample) for sample in acts]
    keep = None if mask is None else np.asarray(_float32(mask)) > 0
    if keep is not None and (keep.ndim != 2 or len(keep) != len(samples)):
        raise SpecError(
            f"mask: shape {keep.shape} for {len(samples)} samples; allowed is (samples, tokens)"
        )
    rows, masks = [], []
    for i, sample in enumerate(samples):
        full = sample[:, None] if sample.ndim == 2 else sample
        if full.ndim != 3 or full.shape[0] != n_layers:
            raise SpecError(
                f"acts[{i}]: shape {sample.shape}; allowed is ({n_layers}, hidden) or ({n_layers}, "
                f"tokens, hidden) for {n_layers} layers; put the layers on the first axis"
            )
        read = np.ones(full.shape[1], dtype=bool) if keep is None else keep[i]
        if read.shape != (full.shape[1],) or not read.any():
            raise SpecError(
                f"mask[{i}]: {int(read.sum())} of {read.size} tokens for {full.shape[1]} tokens of "
                "activations; allowed is one value for each, one of them 1"
            )
        first, last = np.flatnonzero(read)[[0, -1]]
        rows.append(np.ascontiguousarray(full[:, first : last + 1]))
        masks.append(read[first : last + 1])
    return rows, masks
