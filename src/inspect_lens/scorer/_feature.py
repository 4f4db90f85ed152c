"""Scorers of tokens: latents of a sparse autoencoder, and ranks in a logit lens, beside the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations
from inspect_lens.reading import (
    LatentReader,
    LatentReading,
    OnMissing,
    Over,
    ProbeReader,
    Reading,
    SampleReading,
    Source,
    read_latents,
    save_token_scores,
)
from inspect_lens.sae import SparseEncoder
from inspect_lens.spec import LensTable, Positions, Site

from ._metrics import auroc

__all__ = [
    "keep_tokens",
    "lens_rank",
    "no_tokens",
    "sae_feature",
]

AnySample = SampleReading[Reading] | SampleReading[LatentReading]


async def keep_tokens(
    samples: Iterable[AnySample], *, labels: Iterable[str] = (), threshold: float | None = None
) -> dict[str, Any]:
    """Write token scores beside the log."""
    names = dict(enumerate(labels))
    records, handles = [], []
    for i, sample in enumerate(samples):
        for one in sample.read:
            at: dict[str, Any] = {"message_id": one.turn.message_id, "turn": one.turn.number}
            more = {"label": names.get(i)} if isinstance(one.reading, Reading) else {
                "threshold": threshold
            }  # fmt: skip
            records.append(one.reading.record(**at, **more))
            handles.append(one.reading.rows.handle)
    if not records:
        return {}
    # A finished log is scored beside its activations.
    beside = next((h for h in handles if h is not None and h.uri is not None), None)
    if all(record.stands_in is not None for record in records):
        reference = save_token_scores(records, beside=beside)  # nothing is written
    else:
        write = partial(save_token_scores, records, beside=beside)
        reference = await anyio.to_thread.run_sync(write)
    return {} if reference is None else {"token_scores": reference}


def no_tokens(reader: ProbeReader | LatentReader, n_missing: int = 0) -> Score:
    """The score of a sample in which there is nothing to read."""
    missing = f" {n_missing} calls captured nothing that could be read." if n_missing else ""
    return Score.unscored(
        reason="no_tokens",
        explanation=(
            f"No token to read: positions={reader.positions!r} selects none of this output (the "
            "last sampled token is never fed to the model), or a limit ended the sample before its "
            f"model had written anything.{missing}"
        ),
    )


@scorer(metrics={"*": [mean(), stderr(), auroc()]})
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
            `tool_calls`, `assistant`, `prompt`, `last:K` or `regex:PATTERN`; all by
            default.
        source: `captured` reads what the generation captured, also from the file beside a finished
            log; `recompute` feeds the same token ids to the model again; `auto` does the first
            where it can.
        threshold: of the pooled activation, above which a latent counts as found; the verdict,
            `threshold_accuracy` and `at_threshold` (with `key="latent_31164"`) go by it.
        token_scores: write the activation of each token to a file beside the log, one record per
            latent; `inspect_lens.reading.read_token_scores` reads it.
        tokenizer: folder or name of the tokenizer that tells sentences and selections; by default
            that of the model that is read, else that of the card's model, where it is on this
            machine.
        over: `last` reads the call of the sample's answer, or the last one of `roles`; `all` reads
            every call, each choice by itself. Each entry is the largest of its own.
        roles: model roles whose calls are read instead of those of the eval's model. By default
            these are found where the calls of one role alone have a lens.
        on_missing: `error` fails the sample where the activations of a call are not there; `skip`
            treats such a call as one without a token to read.
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
            return no_tokens(reader, next(iter(found.values())).n_missing)
        value = {name: one.top.reading.value for name, one in found.items()}
        facts = {name: one.top.reading.metadata() | one.facts() for name, one in found.items()}
        texts = [one.top.reading.explain() + one.say() for one in found.values()]
        return Score(
            value=dict(value),
            answer=_verdict(value, threshold),
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


def _verdict(value: Mapping[str, float], threshold: float | None) -> str | None:
    """Whether any of the latents is above the threshold; None without one."""
    if threshold is None:
        return None
    return "above threshold" if max(value.values()) > threshold else "below threshold"


@scorer(metrics={"*": [mean(), stderr()]})
def lens_rank(
    target: int | None = None,
    layers: Sequence[int] | None = None,
    position: int = -1,
) -> Scorer:
    """Rank and log-probability of a token at each layer, as a lens read them.

    Reads what the solver `logit_lens` asked for, live or from a log: by the logit lens, or by a
    tuned or Jacobian lens. The rank counts the tokens
    with a larger logit, so 0 is the most likely one.

    Args:
        target: id of the token. By default the last of those that the solver asked for, which is
            that of the sample's target with `logit_lens(target=" {}")`.
        layers: those to report; by default all that were read.
        position: of the row, over prompt and completion; a negative one counts from the end of the
            prompt. -1 is the row that predicts the first token of the answer.

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
        from inspect_lens.solver import logit_lens

        task = Task(
            dataset=organism_dataset("demo")[:2],
            solver=logit_lens(top_k=0, target=" {}", positions="last_prompt"),
            scorer=lens_rank(layers=[2, 5]),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        value = log.samples[0].scores["lens_rank"].value
        assert set(value) == {"rank@2", "logprob@2", "rank@5", "logprob@5"}
        ```
    """
    chosen = target

    async def score(state: TaskState, target: Target) -> Score:
        if not state.output.choices:
            return Score.unscored(
                reason="no_tokens",
                explanation="A limit ended the sample before the model answered.",
            )
        handle = activations(state.output)
        table = None if handle is None else handle.lens
        if handle is None or table is None:
            raise ArtifactError(
                'lens_rank: this call had no logit lens; run the solver logit_lens(target=" {}"), '
                "or ask for one with lens_config(lens=…)"
            )
        column = _column(table, chosen)
        row = _index(
            table.positions, position + handle.n_prompt if position < 0 else position, "position"
        )
        ranks = table.target_ranks[row, :, column].tolist()
        logprobs = table.target_logprobs[row, :, column].tolist()
        shown = table.layers if layers is None else tuple(layers)
        value: dict[str, float] = {}
        for layer in shown:
            at = _index(table.layers, layer, "layer")
            value |= {f"rank@{layer}": ranks[at], f"logprob@{layer}": logprobs[at]}
        # Behind the last layer that prefers another token.
        others = [i for i, rank in enumerate(ranks) if rank]
        start = others[-1] + 1 if others else 0
        first = table.layers[start] if start < len(table.layers) else None
        return Score(
            value=value,
            explanation=f"Token {table.targets[column]} has the ranks {ranks} at the layers "
            f"{list(table.layers)}.",
            metadata={
                "token": table.targets[column],
                "position": table.positions[row],
                "first_layer": first,
            },
        )

    return score


def _column(table: LensTable, target: int | None) -> int:
    if not table.targets:
        raise SpecError(
            "lens_rank: the lens read no chosen token; allowed is a lens with tokens; run "
            'logit_lens(target=" {}") or logit_lens(tokens=[…])'
        )
    return len(table.targets) - 1 if target is None else _index(table.targets, target, "target")


def _index(known: Sequence[int], wanted: int, field: str) -> int:
    if wanted not in known:
        span = f"{known[0]} to {known[-1]}" if len(known) > 8 else str(list(known))
        raise SpecError(f"lens_rank: {field}={wanted}; the lens read {span}")
    return list(known).index(wanted)
