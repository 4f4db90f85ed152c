"""The refusal direction, and its selection by what it does to a model.

Candidates are differences of class means at the tokens behind an instruction. Each is judged by
three effects on the model's first token: whether ablating it bypasses refusal, whether adding it
induces refusal, and how much ablating it changes answers to harmless instructions.

Source: arXiv:2406.11717 and its code. There a layer is the block whose input is read; here it is
the block whose output is read, which is one less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.train._lenses import hooked
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import require_same_origin, warn_otherwise

__all__ = [
    "RefusalCandidate",
    "RefusalChoice",
    "RefusalMeter",
    "RefusalScores",
    "refusal_candidates",
    "select_refusal",
]

Floats = NDArray[np.float64]
_EPSILON: Final = 1e-8


class RefusalCandidate(NamedTuple):
    """A candidate for the refusal direction: one layer, one token position."""

    layer: int
    """Block, counted from 0, at whose output the rows were read."""
    position: int
    """Token of the prompt, negative from its end."""
    direction: Floats
    """(hidden,) mean of the harmful rows less that of the harmless, not normalised."""


class RefusalScores(NamedTuple):
    """What a candidate does; a refusal score is log odds of refusing at the first token."""

    bypass: float
    """Mean refusal score of harmful instructions while it is ablated; lower is better."""
    induce: float
    """Mean refusal score of harmless instructions while it is added."""
    kl: float
    """Mean KL divergence from the model's own first token to that while it is ablated, harmless
    instructions, nats."""


class RefusalChoice(NamedTuple):
    """The chosen candidate, and all that were judged."""

    candidate: RefusalCandidate
    scores: RefusalScores
    table: tuple[tuple[RefusalCandidate, RefusalScores, str], ...]
    """Every candidate, its scores, and why it was left out; empty where it was not."""


@judged_arguments
def refusal_candidates(
    harmful: ActivationSet, harmless: ActivationSet, *, n_positions: int = 5
) -> list[RefusalCandidate]:
    """Differences of means at each of the last tokens of the prompt, in every layer.

    Args:
        harmful: prompts that the model refuses; `positions="prompt"`, labels do not matter.
        harmless: prompts that it answers, of the same layers.
        n_positions: tokens from the end: those that the chat template puts behind an
            instruction.

    Raises:
        SpecError: the sets' layers, models or positions differ, or a prompt has too few tokens.

    Warns:
        UserWarning: the sets were computed with different engines, dtypes or quantisations.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, refusal_candidates

        data = ActivationSet.load("acts/train.safetensors")
        harmful, harmless = (data.subset((data.labels == k).nonzero()[0]) for k in (1, 0))
        found = refusal_candidates(harmful, harmless, n_positions=2)
        assert {c.position for c in found} == {-1, -2}
        assert len(found) == 2 * len(data.layers)
        ```
    """
    if harmful.layers != harmless.layers or harmful.hidden != harmless.hidden:
        raise SpecError(
            f"harmful, harmless: layers {harmful.layers} and {harmless.layers}; allowed are the "
            "same layers of one model; collect both in one way"
        )
    require_same_origin(harmless, harmful)
    warn_otherwise(harmful, harmless)
    found = []
    for layer in harmful.layers:
        sides = [(data, data.sequences(layer)) for data in (harmful, harmless)]
        for data, rows in sides:
            short = next((i for i, row in enumerate(rows) if len(row) < n_positions), None)
            if short is not None or n_positions < 1:
                raise SpecError(
                    f"n_positions={n_positions}: sample {data.ids[short or 0]} of {data.name!r} "
                    "has fewer tokens; allowed are 1 up to the shortest prompt"
                )
        for position in range(-n_positions, 0):
            high, low = (
                np.mean([row[position].astype(np.float64) for row in rows], axis=0)
                for _, rows in sides
            )
            found.append(RefusalCandidate(layer, position, high - low))
    return found


@judged_arguments
def select_refusal(
    candidates: Sequence[RefusalCandidate],
    measure: Callable[[RefusalCandidate], RefusalScores],
    *,
    n_layers: int,
    max_kl: float = 0.1,
    min_induce: float = 0.0,
    drop_last: float = 0.2,
) -> RefusalChoice:
    """Choose the candidate that bypasses refusal best, among those that do no harm.

    Left out are, as in the source, candidates of the last layers, those whose ablation changes
    harmless answers, and those whose addition does not induce refusal.

    Args:
        candidates: of `refusal_candidates`.
        measure: what a candidate does, such as a `RefusalMeter`; candidates of the last layers are
            not measured.
        n_layers: blocks of the model.
        max_kl: nats; more is left out.
        min_induce: refusal score; less is left out.
        drop_last: share of the blocks, from the end, whose candidates are left out.

    Raises:
        SpecError: all are left out; the message counts the reasons. Or the measure has a
            `baseline`, as a `RefusalMeter` does, in which the model refuses harmful instructions
            no more than harmless ones, so that there is no refusal to take away.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import RefusalCandidate, RefusalScores, select_refusal

        candidates = [RefusalCandidate(layer, -1, np.eye(4)[0]) for layer in (2, 3)]
        measured = {2: RefusalScores(-3.0, 1.0, 0.02), 3: RefusalScores(-9.0, 1.0, 0.5)}
        choice = select_refusal(candidates, lambda c: measured[c.layer], n_layers=10)
        assert choice.candidate.layer == 2  # the other one changes harmless answers
        ```
    """
    own: RefusalScores | None = getattr(measure, "baseline", None)
    if own is not None and own.bypass <= own.induce:
        raise SpecError(
            f"measure: unedited, the model's refusal score is {own.bypass:.2f} for harmful and "
            f"{own.induce:.2f} for harmless instructions, so no effect on its refusals could be "
            "seen; allowed is a model that refuses the harmful ones more; check the prompts, their "
            "chat template and refusal_tokens"
        )
    table = []
    nothing = RefusalScores(math.nan, math.nan, math.nan)
    for candidate in candidates:
        # The source counts the block whose input it reads, one more than ours.
        if candidate.layer + 1 >= int(n_layers * (1.0 - drop_last)):
            table.append((candidate, nothing, f"one of the last {drop_last:.0%} of the layers"))
            continue
        scores = measure(candidate)
        why = ""
        if any(math.isnan(value) for value in scores):
            why = "not a number"
        elif scores.kl > max_kl:
            why = f"KL above {max_kl:g}"
        elif scores.induce < min_induce:
            why = f"induces less than {min_induce:g}"
        table.append((candidate, scores, why))
    left = [row for row in table if not row[2]]
    if not left:
        reasons = sorted({why for *_, why in table})
        counts = ", ".join(f"{sum(w == why for *_, w in table)} {why}" for why in reasons)
        known = [scores for _, scores, _ in table if not any(map(math.isnan, scores))]
        nearest = ""
        if known:
            nearest = f"; the smallest KL is {min(s.kl for s in known):.2g}, and the most that one "
            nearest += f"induces {max(s.induce for s in known):.2g}"
        raise SpecError(
            f"candidates: all {len(table)} are left out ({counts}){nearest}; allowed is one at "
            "least; collect more layers and positions, or choose other limits"
        )
    best = min(left, key=lambda row: row[1].bypass)
    return RefusalChoice(best[0], best[1], tuple(table))


class RefusalMeter:
    """Measures candidates on a Hugging Face model, with hooks.

    Ablated is the direction at the input of every block and at the output of every attention and
    MLP, which is the same as removing it from all weights that write to the residual stream.

    Args:
        model: a decoder of transformers, on any device, whose blocks have an attention and an
            MLP of their own.
        harmful: token ids of prompts, with the chat template.
        harmless: token ids of prompts.
        refusal_tokens: ids with which a refusal begins, such as that of "I".
        blocks: its blocks in order; `model.model.layers` by default.
        batch: prompts at once.

    Raises:
        SpecError: no prompt, no refusal token, or the model's blocks cannot be found.

    Example:
        ```python
        import numpy as np
        from transformers import AutoModelForCausalLM

        from inspect_lens.train import RefusalCandidate, RefusalMeter

        model = AutoModelForCausalLM.from_pretrained("organism/checkpoint")
        meter = RefusalMeter(model, harmful=[[5, 6, 7]], harmless=[[8, 9, 7]], refusal_tokens=[11])
        hidden = model.config.hidden_size
        scores = meter(RefusalCandidate(layer=2, position=-1, direction=np.eye(hidden)[0]))
        assert scores.kl >= 0.0
        ```
    """

    def __init__(
        self,
        model: Any,
        *,
        harmful: Sequence[Sequence[int]],
        harmless: Sequence[Sequence[int]],
        refusal_tokens: Sequence[int],
        blocks: Sequence[Any] | None = None,
        batch: int = 16,
    ) -> None:
        found = getattr(getattr(model, "model", None), "layers", None) if blocks is None else blocks
        if not harmful or not harmless or not refusal_tokens or not found:
            raise SpecError(
                f"harmful: {len(harmful)}, harmless: {len(harmless)}, refusal_tokens: "
                f"{list(refusal_tokens)}, blocks: {'found' if found else 'not found'}; allowed are "
                "one of each at least; pass blocks= where they are not model.model.layers"
            )
        self.model, self.blocks, self.batch = model, list(found), batch
        self.harmful, self.harmless = list(harmful), list(harmless)
        self.refusal_tokens = list(refusal_tokens)
        self._writers = [module for block in self.blocks for module in _writers(block)]
        self._plain = self._logits(self.harmless)
        self.baseline = RefusalScores(
            self._refusal(self._logits(self.harmful)), self._refusal(self._plain), 0.0
        )
        """Scores without intervention: refusal of the harmful and of the harmless prompts."""

    def __call__(self, candidate: RefusalCandidate) -> RefusalScores:
        """Measure a candidate, whose direction has the width of the model."""
        device, dtype = self.model.device, self.model.dtype
        raw = torch.from_numpy(np.asarray(candidate.direction, dtype=np.float64))
        unit = (raw / raw.norm()).to(device, torch.float32)
        with self._ablated(unit):
            bypass = self._refusal(self._logits(self.harmful))
            changed = self._logits(self.harmless)
        added = raw.to(device, dtype)
        with hooked([(self.blocks[candidate.layer], lambda rows: rows + added)]):
            induce = self._refusal(self._logits(self.harmless))
        ours, theirs = (torch.log_softmax(x, dim=-1) for x in (self._plain, changed))
        kl = float((ours.exp() * (ours - theirs)).sum(dim=-1).mean())
        return RefusalScores(bypass, induce, kl)

    def _logits(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """(prompts, vocabulary) float64 of the first token, in the order of the prompts."""
        of_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            of_length.setdefault(len(prompt), []).append(i)
        made: dict[int, torch.Tensor] = {}
        for same in of_length.values():
            for now in (same[i : i + self.batch] for i in range(0, len(same), self.batch)):
                ids = torch.tensor([list(prompts[i]) for i in now], device=self.model.device)
                with torch.no_grad():
                    logits = self.model(input_ids=ids).logits[:, -1]
                made |= dict(zip(now, logits.double().cpu(), strict=True))
        return torch.stack([made[i] for i in range(len(prompts))])

    def _refusal(self, logits: torch.Tensor) -> float:
        chance = torch.softmax(logits, dim=-1)[:, self.refusal_tokens].sum(dim=-1)
        odds = torch.log(chance + _EPSILON) - torch.log(1.0 - chance + _EPSILON)
        return float(odds.mean())

    @contextmanager
    def _ablated(self, unit: torch.Tensor) -> Iterator[None]:
        def remove(rows: torch.Tensor) -> torch.Tensor:
            wide = rows.float()
            return (wide - (wide @ unit)[..., None] * unit).to(rows.dtype)

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (remove(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": remove(kwargs["hidden_states"])}

        with ExitStack() as stack:
            for block in self.blocks:
                handle = block.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(hooked((module, remove) for module in self._writers))
            yield


def _writers(block: Any) -> list[Any]:
    """The attention and the MLP of a block."""
    children = dict(block.named_children())
    usual = ("mlp", "feed_forward", "block_sparse_moe", "attention", "self_attention")
    found = [m for name, m in children.items() if name in usual or name.endswith("attn")]
    if len(found) < 2:
        raise SpecError(
            f"blocks: {type(block).__name__} has {sorted(children)}; wanted are an attention and "
            "an MLP under their usual names; this model's layout is not known"
        )
    return found
