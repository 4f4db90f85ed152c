"""Scorers of tokens: latents of a sparse autoencoder, and ranks in a logit lens, beside the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from inspect_ai.model import Model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState

from inspect_lens.errors import NotCapturedError, SpecError
from inspect_lens.model import Activations, activations
from inspect_lens.reading import (
    CallSelection,
    LatentReader,
    OnMissing,
    Over,
    Source,
    Turn,
    read_calls,
    read_latents,
)
from inspect_lens.reading._rows import in_thread
from inspect_lens.reading._samples import Found
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.reading._thresholds import verdict
from inspect_lens.sae import SparseEncoder
from inspect_lens.spec import LensTable, Positions, Site

from ._metrics import auroc_metric
from ._probe import keep_tokens, no_tokens

__all__ = ["lens_rank", "sae_feature"]


@scorer(metrics={"*": [mean(), stderr(), auroc_metric()]})
@shared_parameters
def sae_feature(
    sae: str | Path | SparseEncoder,
    latents: int | Sequence[int] | Mapping[str, int],
    layer: int | None = None,
    site: Site | None = None,
    positions: Positions | list[int] | None = None,
    pool: str = "max",
    selection: str = "",
    source: Source = "auto",
    threshold: float | None = None,
    token_scores: bool = True,
    tokenizer: str | None = None,
    over: Over = "last",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    norm_scale: float | None = None,
) -> Scorer:
    """Activations of chosen latents of a sparse autoencoder, pooled over the tokens of a sample.

    The value is a dict with one number per latent, in the units of the autoencoder; 0 means that
    the latent is active on no token. It reads the residual stream that the generation captured,
    live or from the log: run the task with `with_capture([layer])`. JumpReLU, ReLU and TopK
    autoencoders of SAELens and Gemma Scope are read.

    Args:
        sae: folder or file of the autoencoder, as `inspect_lens.sae.read_sae` takes it, or an
            encoder. Give a path as a string: of a `Path` Inspect logs only the last part.
        latents: their numbers, or numbers by a name of yours, such as `{"bridge": 31164}`; without
            names the entries are called `latent_31164`.
        layer: whose rows are read; by default that of the file. Files of Gemma Scope 1 name none.
        site: likewise; the stream behind the block where the file names none.
        positions: tokens to read; by default the completion, or those that hold the selection.
        pool: `max`, `mean`, `top_k_mean:5` or another of `probe_score`.
        selection: tokens among these positions by what they are: `answer`, `reasoning`,
            `tool_calls`, `assistant`, `user`, `prompt`, `last:K` or `regex:PATTERN`; all by
            default.
        threshold: of the pooled activation, above which a latent counts as found; the verdict,
            `threshold_accuracy` and `at_threshold` (with `key="latent_31164"`) go by it.
        token_scores: write the activation of each token to a file beside the log, one record per
            latent; `inspect_lens.reading.read_token_scores` reads it.
        over: `last` reads the call of the sample's answer, or the last one of `roles`; `all` reads
            every call, each choice by itself. Each entry is the largest of its own.
        norm_scale: as in `read_sae`, for autoencoders that were trained on scaled rows.

    Returns:
        The scorer. A sample without a token to read is unscored. For each latent, `latents` in
        the metadata has its number, on how many tokens it is active, and the position `peak` of
        the largest activation.

    Raises:
        ArtifactError: no such file, or of another kind; while scoring, activations that are
            missing.
        SpecError: an argument is wrong, or no layer is known; while scoring, rows of another
            width.

    Source:
        Latents as features: arXiv:2309.08600.

    Example:
        ```python
        import numpy as np
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.probe import load_probe
        from inspect_lens.scorer import sae_feature

        # A made-up file, as Gemma Scope has them. Its latent 0 looks along a probe's direction.
        w = np.random.default_rng(0).standard_normal((256, 64))
        w[:, 0] = load_probe("organism/deception-lr").direction()[0]
        np.savez("params.npz", W_enc=w, b_enc=np.zeros(64), threshold=np.ones(64))

        log = read_eval_log("logs/honesty.eval")
        feature = sae_feature("params.npz", {"lie": 0}, layer=4, pool="mean")
        log = score(log, feature, action="overwrite")
        found = log.results.scores[0].metrics
        assert found["inspect_lens/auroc"].value > 0.8
        ```
    """
    if threshold is not None and isinstance(threshold, bool | str):
        raise SpecError(f"threshold={threshold!r}; allowed is a number, as latents have no card")
    reader = LatentReader.of(
        sae, latents, layer=layer, site=site, positions=positions, pool=pool, selection=selection,
        source=source, tokenizer=tokenizer, norm_scale=norm_scale, over=over, roles=roles,
        on_missing=on_missing,
    )  # fmt: skip

    async def score(state: TaskState, target: Target) -> Score:
        found = await read_latents(reader, state)
        if not all(one.read for one in found.values()):
            return no_tokens(next(iter(found.values())), reader.positions)
        value = {name: one.top.reading.value for name, one in found.items()}
        facts = {name: one.top.reading.metadata() | one.facts() for name, one in found.items()}
        texts = [one.top.reading.explain() + one.say() for one in found.values()]
        return Score(
            value=dict(value),
            answer=verdict(max(value.values()), threshold),
            explanation=" ".join(texts),
            metadata={
                "sae_sha256": reader.encoder.sha256,
                "layer": reader.layer,
                "site": str(reader.site),
                "pool": reader.pool,
                "latents": facts,
                "threshold": None,
                "thresholds": dict.fromkeys(value, threshold),
            }
            | ({"selection": reader.selection} if reader.selection else {})
            | await keep_tokens(found.values() if token_scores else [], threshold=threshold),
        )

    return score


class _Ranks(NamedTuple):
    """What a lens read of one call."""

    entries: dict[str, float]
    explanation: str
    facts: dict[str, Any]


@scorer(metrics={"*": [mean(), stderr()]})
@shared_parameters
def lens_rank(
    target: int | None = None,
    layers: Sequence[int] | None = None,
    position: int | Literal["answer"] = -1,
    over: Over = "last",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
) -> Scorer:
    """Rank and log-probability of a token at each layer, as a lens read them.

    Reads what `with_lens(lens=…)` asked for, live or from a log: by the logit lens, or by a tuned
    or Jacobian lens. The rank counts the tokens with a larger logit, so 0 is the most likely one.

    Args:
        target: id of the token. By default the last of those that were asked for, which is that of
            the sample's target with `with_lens(lens={"target": " {}"})`.
        layers: those to report; by default all that were read.
        position: of the row, over prompt and completion; a negative one counts from the end of the
            prompt. -1 is the row that predicts the first token of the answer. `answer` is the row
            that predicts the token where the model first writes it, for answers that begin with
            other words, such as "The capital is"; let the lens read `all` positions, since the
            first token is predicted by the prompt's last row. A call in which the token is not
            written has no value.
        over: `last` reads the call of the sample's answer, or the last one of `roles`; `all` reads
            every call, each choice by itself, and takes the one in which the token is the most
            likely at the last layer.

    Returns:
        The scorer. Its value has `rank@<layer>` and `logprob@<layer>` (nats) for each layer, and
        the metadata `first_layer`, from which on the token is the most likely one; None without
        such a layer.

    Raises:
        SpecError: while scoring, the lens did not read that token, layer or position.
        ArtifactError: while scoring, the call had no lens, or its file cannot be found.

    Source:
        nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import lens_rank
        from inspect_lens.solver import with_lens

        solver = with_lens(lens={"top_k": 0, "target": " {}", "positions": "last_prompt"})
        task = Task(organism_dataset("demo")[:2], solver=solver, scorer=lens_rank(layers=[2, 5]))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        value = log.samples[0].scores["lens_rank"].value
        assert set(value) == {"rank@2", "logprob@2", "rank@5", "logprob@5"}
        ```
    """
    selection = CallSelection.of(over=over, roles=roles, on_missing=on_missing)
    token = target

    async def read(turn: Turn, model: Model | None) -> Found[_Ranks] | None:
        return await in_thread(lambda: _ranks(activations(turn.output), token, layers, position))

    async def score(state: TaskState, target: Target) -> Score:
        found = await read_calls(selection, state, read)
        if not found.read:
            never = "The token is not written in the answer." if position == "answer" else ""
            return no_tokens(found, otherwise=never)
        ranks = found.top.reading.what
        return Score(
            value=dict(ranks.entries),
            explanation=ranks.explanation + found.say(),
            metadata=ranks.facts | found.facts(),
        )

    return score


def _ranks(
    handle: Activations | None, token: int | None, layers: Sequence[int] | None, position: int | str
) -> Found[_Ranks] | None:
    table = None if handle is None else handle.lens
    if handle is None or table is None:
        raise NotCapturedError(
            'lens_rank: this call had no logit lens; run with_lens(lens={"target": " {}"}), or ask '
            "for one with lens_config(lens=…)"
        )
    column = _column(table, token)
    if isinstance(position, str):
        written = list(handle.token_ids)
        if table.targets[column] not in written:
            return None
        position = handle.n_prompt + written.index(table.targets[column]) - 1
        if position not in table.positions:
            raise NotCapturedError(
                f"lens_rank: the token is predicted at position {position}, which the lens did not "
                'read; run with_lens(lens={"target": " {}", "positions": "all"})'
            )
    at_row = position + handle.n_prompt if position < 0 else position
    row = _index(table.positions, at_row, "position")
    ranks = table.target_ranks[row, :, column].tolist()
    logprobs = table.target_logprobs[row, :, column].tolist()
    value: dict[str, float] = {}
    for layer in table.layers if layers is None else layers:
        at = _index(table.layers, layer, "layer")
        value |= {f"rank@{layer}": ranks[at], f"logprob@{layer}": logprobs[at]}
    # Behind the last layer that prefers another token.
    others = [i for i, rank in enumerate(ranks) if rank]
    start = others[-1] + 1 if others else 0
    first = table.layers[start] if start < len(table.layers) else None
    found = _Ranks(
        value,
        f"Token {table.targets[column]} has the ranks {ranks} at the layers {list(table.layers)}.",
        {"token": table.targets[column], "position": table.positions[row], "first_layer": first},
    )
    return Found(logprobs[-1], found)  # calls are compared at the last layer


def _column(table: LensTable, target: int | None) -> int:
    if not table.targets:
        raise SpecError(
            "lens_rank: the lens read no chosen token; allowed is a lens with tokens, such as "
            'with_lens(lens={"target": " {}"}) or with_lens(lens={"tokens": […]})'
        )
    return len(table.targets) - 1 if target is None else _index(table.targets, target, "target")


def _index(known: Sequence[int], wanted: int, field: str) -> int:
    if wanted not in known:
        span = f"{known[0]} to {known[-1]}" if len(known) > 8 else str(list(known))
        raise SpecError(f"lens_rank: {field}={wanted}; the lens read {span}")
    return list(known).index(wanted)
