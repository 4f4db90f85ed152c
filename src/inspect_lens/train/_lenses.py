"""Tuned and Jacobian lenses of a decoder of transformers, and how good they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.progress import progress_bar
from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens, LensCard, LensQuality, LensTraining
from inspect_lens.probe import ModelRef

__all__ = ["evaluate_lens", "fit_jacobian_lens", "fit_tuned_lens"]

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
        dtype = self._head.weight.dtype
        logits = self._head(self._norm(rows.to(dtype))).float() * self._factor
        capped: torch.Tensor = (
            logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
        )
        return capped

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the stream behind each block, without gradient."""
        kept: list[torch.Tensor] = []

        def keep(rows: torch.Tensor) -> torch.Tensor:
            kept.append(rows.detach())
            return rows

        with self.watched(dict.fromkeys(range(self.n_layers), keep)), torch.no_grad():
            self.run(ids)
        return torch.stack(kept)

    def run(self, ids: torch.Tensor) -> Any:
        """What the blocks and the final norm make of tokens; padding behind them is not masked."""
        return self.model.base_model(input_ids=ids.to(self.device), use_cache=False)

    def watched(self, watchers: dict[int, Any]) -> AbstractContextManager[None]:
        """Have functions see, and replace, what blocks give."""
        return hooked((self.blocks[layer], watcher) for layer, watcher in watchers.items())

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
    for start in range(0, len(prompts), size):
        part = [list(prompt[:max_tokens]) for prompt in prompts[start : start + size]]
        longest = max(map(len, part))
        ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in part])
        lengths = torch.tensor([len(prompt) for prompt in part])
        yield ids, torch.arange(longest)[None] < lengths[:, None]


def check_prompts(vocab: int, **sets: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that are none, and those that are in all of several sets."""
    for field, prompts in sets.items():
        if not prompts or any(not len(prompt) for prompt in prompts):
            raise SpecError(f"{field}: {len(prompts)} prompts; give at least one, and none empty")
        for i, prompt in enumerate(prompts):
            low, high = min(prompt), max(prompt)
            if low < 0 or high >= vocab:
                raise SpecError(f"{field}[{i}]: ids {low} to {high}; there are {vocab}")
    held_out = sets.get("held_out", ())
    if common := {tuple(p) for p in sets["prompts"]} & {tuple(p) for p in held_out}:
        raise SpecError(
            f"held_out: {len(common)} of {len(held_out)} are also among the prompts that are "
            "fitted; leave them out"
        )


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


@contextmanager
def hooked(watchers: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Have functions see, and replace, the rows that modules put out."""

    def hook(watcher: Any, module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (watcher(output[0]), *output[1:])
        return watcher(output)

    with ExitStack() as stack:
        for module, watcher in watchers:
            stack.callback(module.register_forward_hook(partial(hook, watcher)).remove)
        yield


_ROWS = 512
"""Rows whose logits are made at once."""

Translate = Callable[[torch.Tensor, int], torch.Tensor]


@judged_arguments
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
    """Compare each layer of a lens with the model's own predictions, and with the logit lens.

    Args:
        model: a decoder of transformers, on any device.
        lens: of this model.
        prompts: token ids of texts that the lens was not fitted on.
        batch: prompts at once.
        max_tokens: of a prompt; what is behind them is left out.
        skip_first: tokens at the start of each prompt that are not judged.
        show_progress: a bar on a terminal.

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
        read, card.layers, translate, prompts, batch=batch, max_tokens=max_tokens,
        skip_first=skip_first, show_progress=show_progress,
    )  # fmt: skip
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
    check_prompts(model.vocab, prompts=prompts)
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


def _judged(
    read: LensModel, layers: tuple[int, ...], translate: Translate,
    held_out: Sequence[Sequence[int]], *, batch: int, max_tokens: int, skip_first: int,
    show_progress: bool, **about: Any,
) -> LensCard:  # fmt: skip
    """The card of a new lens, with its quality on held-out prompts."""
    quality, n_held_out = quality_of(
        read, layers, translate, held_out, batch=batch, max_tokens=max_tokens,
        skip_first=skip_first, show_progress=show_progress,
    )  # fmt: skip
    return LensCard(
        n_layers=read.n_layers, layers=layers, hidden=read.hidden, quality=quality,
        n_held_out=n_held_out, **about,
    )  # fmt: skip


def divergence(truth: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL divergence in nats from one prediction to another."""
    return (truth.exp() * (truth - found)).sum(dim=-1)


_SOURCE = "arXiv:2303.08112"


@judged_arguments
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
    """Fit a tuned lens, float32, to a model.

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
    check_prompts(read.vocab, prompts=prompts, held_out=held_out)
    if min(steps, batch) < 1:
        raise SpecError(f"steps={steps}, batch={batch}; both have to be 1 or more")
    width = read.hidden
    maps = [torch.zeros(width, width + 1, device=read.device, requires_grad=True) for _ in chosen]
    optimiser = torch.optim.AdamW(maps, lr=lr, weight_decay=weight_decay)
    fall = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    n_tokens = 0
    drawn = _drawn(prompts, random_state)
    with read.frozen(), progress_bar(
        "fitting a tuned lens", total=steps, done=0, show=show_progress
    ) as advance:  # fmt: skip
        for _ in range(steps):
            now = list(islice(drawn, batch))
            ids, is_token = next(batches(now, batch, max_tokens))
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
    settings = {"steps": steps, "batch": batch, "max_tokens": max_tokens, "lr": lr}
    settings |= {"skip_first": skip_first, "weight_decay": weight_decay, "seed": random_state}
    training = LensTraining(
        method="KL divergence to the model's own prediction, AdamW", dataset=dataset,
        n_prompts=len(prompts), n_tokens=n_tokens, settings=settings,
    )  # fmt: skip
    card = _judged(
        read, chosen, lambda rows, at: _translated(rows, done[at]), held_out, batch=batch,
        max_tokens=max_tokens, skip_first=skip_first, show_progress=show_progress, name=name,
        kind="tuned", source=_SOURCE, model=model_ref, training=training, command=command,
    )  # fmt: skip
    both = done.cpu().numpy()
    return Lens(matrix=both[:, :, :width], bias=both[:, :, width], card=card)


def _translated(rows: torch.Tensor, affine: torch.Tensor) -> torch.Tensor:
    return rows + torch.addmm(affine[:, -1], rows, affine[:, :-1].T)


def _drawn(prompts: Sequence[Sequence[int]], seed: int) -> Iterator[Sequence[int]]:
    """Prompts at random without end, each once before any comes again."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (prompts[i] for i in rng.permutation(len(prompts)))


@judged_arguments
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
    check_prompts(read.vocab, prompts=prompts, held_out=held_out)
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
    settings = {"max_tokens": max_tokens, "skip_first": skip_first, "skip_last": skip_last}
    training = LensTraining(
        method="mean Jacobian from the layer to the last one", dataset=dataset,
        n_prompts=len(prompts), n_tokens=n_tokens, settings=settings,
    )  # fmt: skip
    card = _judged(
        read, chosen, lambda rows, at: rows @ matrix[at].T, held_out, batch=8,
        max_tokens=max_tokens, skip_first=0, show_progress=show_progress, name=name,
        kind="jacobian", source="transformer-circuits.pub/2026/workspace", model=model_ref,
        training=training, command=command,
    )  # fmt: skip
    return Lens(matrix=stored, card=card)


def _jacobian(
    model: LensModel, layers: tuple[int, ...], ids: torch.Tensor, valid: slice, block: int
) -> torch.Tensor:
    """The Jacobian of one prompt, (layers, width, width) float32."""
    # Copies of the prompt run side by side. The gradient of one number of the last rows, summed
    # over the tokens that count, is one row of the Jacobian, and each copy is asked for another
    # number.
    width = model.hidden
    block = min(block, width)
    kept: dict[int, torch.Tensor] = {}

    def note(layer: int, rows: torch.Tensor) -> torch.Tensor:
        kept[layer] = rows.detach().requires_grad_() if layer == layers[0] else rows
        return kept[layer]

    last = model.n_layers - 1
    watchers = {layer: partial(note, layer) for layer in (*layers, last)}
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
