"""A decoder of transformers as lenses see it: rows behind each block, final norm, unembedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from inspect_lens._base.progress import progress_bar
from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens, LensQuality

_NORMS: Final = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
"""Names of the norm behind the last block, in the module that has the blocks."""

_TOLERANCE: Final = 2e-2
"""Of logits, relative to the largest of them; models may compute in 16 bits."""


class LensModel:
    """Blocks, final norm and unembedding of a decoder of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.blocks, self._norm = _found(model)
        self._head = model.get_output_embeddings()
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else (
            model.config
        )  # fmt: skip
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._factor = float(getattr(config, "logit_scale", None) or 1.0)
        self._factor /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.hidden = int(config.hidden_size)
        self.vocab = int(self._head.weight.shape[0])
        self.n_layers = len(self.blocks)
        self.device = self._head.weight.device
        self._prove()

    def unembed(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of rows of the stream."""
        dtype = self._head.weight.dtype
        logits = self._head(self._norm(rows.to(dtype))).float() * self._factor
        capped: torch.Tensor = (
            logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
        )
        return capped

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the stream behind each block, without gradient."""
        kept: list[torch.Tensor] = []
        with self.watched({i: _keep(kept) for i in range(self.n_layers)}), torch.no_grad():
            self.run(ids)
        return torch.stack(kept)

    def run(self, ids: torch.Tensor) -> Any:
        """What the blocks and the final norm make of tokens; padding behind them is not masked."""
        return self.model.base_model(input_ids=ids.to(self.device), use_cache=False)

    @contextmanager
    def watched(self, watchers: dict[int, Any]) -> Iterator[None]:
        """Have functions see, and replace, what blocks give."""
        handles = [
            self.blocks[layer].register_forward_hook(_hook(watcher))
            for layer, watcher in watchers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let no parameter ask for a gradient."""
        asking = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in asking:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in asking:
                parameter.requires_grad_(True)

    def _prove(self) -> None:
        """Compare with the model's own logits: soft caps and scales have many names."""
        ids = (torch.arange(8) * 7 + 1)[None].remainder(self.vocab).to(self.device)
        with torch.no_grad():
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.unembed(self.rows(ids)[-1])
        error = float((own - ours).abs().max() / own.abs().max())
        if not error <= _TOLERANCE:
            raise SpecError(
                f"model: {type(self.model).__name__} makes other logits of its last layer than its "
                f"final norm and unembedding do (relative error {error:.2g}); a lens of it cannot "
                "be fitted here"
            )


def batches(
    prompts: Sequence[Sequence[int]], size: int, max_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts in order, some at once."""
    for start in range(0, len(prompts), size):
        part = [list(prompt[:max_tokens]) for prompt in prompts[start : start + size]]
        longest = max(map(len, part))
        ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in part])
        lengths = torch.tensor([len(prompt) for prompt in part])
        yield ids, torch.arange(longest)[None] < lengths[:, None]


def check_prompts(prompts: Sequence[Sequence[int]], vocab: int, field: str) -> None:
    """Refuse prompts that are none."""
    if not prompts or any(not len(prompt) for prompt in prompts):
        raise SpecError(f"{field}: {len(prompts)} prompts; give at least one, and none empty")
    for i, prompt in enumerate(prompts):
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise SpecError(f"{field}[{i}]: ids {min(prompt)} to {max(prompt)}; there are {vocab}")


def check_sets(
    prompts: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], vocab: int
) -> None:
    """Refuse prompts that are none, and held-out ones that a lens is fitted on."""
    check_prompts(prompts, vocab, "prompts")
    check_prompts(held_out, vocab, "held_out")
    if common := {tuple(p) for p in prompts} & {tuple(p) for p in held_out}:
        raise SpecError(f"held_out: {len(common)} prompts are also in prompts; leave them out")


def check_layers(layers: Sequence[int] | None, model: LensModel) -> tuple[int, ...]:
    """Layers to translate: by default all but the last, which needs no translation."""
    last = model.n_layers - 1
    chosen = tuple(range(last)) if layers is None else tuple(sorted(set(layers)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= last:
        raise SpecError(
            f"layers: {list(chosen)}; allowed are 0 to {last - 1}, as the last layer needs no "
            "translation"
        )
    return chosen


def _found(model: Any) -> tuple[list[Any], Any]:
    base = getattr(model, "base_model", model)
    for parent in base.modules():
        lists = [c for c in parent.children() if isinstance(c, torch.nn.ModuleList) and len(c)]
        norms = [c for name, c in parent.named_children() if name in _NORMS]
        if len(lists) == 1 and len(norms) == 1:
            return list(lists[0]), norms[0]
    raise SpecError(
        f"model: {type(model).__name__} has no module with one list of blocks and one final norm "
        f"({', '.join(_NORMS)}); a lens of it cannot be fitted here"
    )


def _hook(watcher: Any) -> Any:
    def hook(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (watcher(output[0]), *output[1:])
        return watcher(output)

    return hook


def _keep(kept: list[torch.Tensor]) -> Any:
    def watcher(rows: torch.Tensor) -> torch.Tensor:
        kept.append(rows.detach())
        return rows

    return watcher


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
    """Judge translations of some layers."""
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
    """KL divergence in nats from one prediction to another."""
    return (truth.exp() * (truth - found)).sum(dim=-1)
