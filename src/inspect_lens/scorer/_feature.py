"""`sae_feature`: how active chosen latents of a sparse autoencoder are in a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState

from inspect_lens.errors import SpecError
from inspect_lens.reading import (
    LatentReader,
    OnMissing,
    Over,
    Source,
    read_latents,
)
from inspect_lens.sae import SparseEncoder
from inspect_lens.spec import Positions, Site

from ._metrics import auroc
from ._tokens import keep_tokens, no_tokens

__all__ = ["sae_feature"]


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
