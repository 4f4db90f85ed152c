r"""Task `sae_clamp`.

```text
inspect eval inspect_lens/sae_clamp -T sae=<sae> -T latent=<number> -T values=0,20,40 \
    -T data=<prompts.json> -T phrases=bridge --model vllm-lens/<model>
```
"""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai import Task, task
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import (
    Score,
    Scorer,
    Target,
    mean,
    model_graded_qa,
    scorer,
    stderr,
)
from inspect_ai.solver import TaskState

from evals.kit.arguments import required
from evals.sae_clamp.dataset import clamp_dataset
from inspect_lens import judged_arguments
from inspect_lens.scorer import dose_metric, dose_response, sae_feature
from inspect_lens.solver import SaeLatents, steering_sweep
from inspect_lens.spec import LatentMode, Site

__all__ = ["activation_by_value", "behaviour_by_value", "behaviour_seen", "sae_clamp"]

_NAME = "clamped"
"""Of the latent, in metrics."""


@task
@judged_arguments
def sae_clamp(
    sae: str | None = None,
    latent: int | None = None,
    values: Sequence[float] | None = None,
    data: str | None = None,
    phrases: Sequence[str] | None = None,
    criterion: str | None = None,
    mode: LatentMode = "set",
    only_if_active: bool = False,
    controls: int = 3,
    layer: int | None = None,
    site: Site | None = None,
    threshold: float | None = None,
    norm_scale: float | None = None,
    seed: int = 0,
    limit: int | None = None,
    max_tokens: int = 64,
) -> Task:
    """Answer prompts unedited, and with a latent clamped at several values.

    Args:
        sae: folder or file of the sparse autoencoder, of SAELens or Gemma Scope.
        latent: its number.
        values: activations that it is set to; 0 switches it off.
        data: file of the prompts; see the README.
        phrases: the behaviour is an answer with one of these texts, in any case.
        criterion: the behaviour is what a model in the role `grader` finds in the answer by this
            criterion. Without it and without phrases, it is an answer with a target of its row.
        mode: `set`, `add` to add to the activation, or `at_least` to raise it.
        only_if_active: leave tokens alone on which the latent is not active.
        controls: random latents beside it.
        layer: that the autoencoder reads; that of its file by default.
        site: likewise.
        threshold: above which a latent is active, for files without one.
        norm_scale: factor of the activations, for autoencoders that were trained on scaled ones.
        seed: of the draw of control latents.
        limit: prompts at most.
        max_tokens: longest answer.

    Returns:
        The task. `behaviour_by_value` has the share of answers with the behaviour at each value
        and its paired difference from the unedited answers, beside that of the control latents;
        `activation_by_value` has the mean activation of the latent in the same answers.

    Raises:
        ValueError: phrases and a criterion, or none of them and a row without a target.
    """
    sae = required("sae", sae, "the folder or file of a sparse autoencoder")
    latent = required("latent", latent, "the number of a latent")
    chosen = list(required("values", values, "values to set the latent to, such as 0,5"))
    data = required("data", data, "a file of prompts")
    dataset = clamp_dataset(data, limit=limit)
    # A command line splits at commas, and leaves the spaces behind them.
    wanted = None if phrases is None else [text.strip() for text in phrases]
    if wanted is not None and criterion is not None:
        raise ValueError("phrases, criterion: both are given; allowed is one of them")
    if wanted is not None and not all(wanted):
        raise ValueError(f"phrases={wanted}; allowed are texts that not every answer has")
    has_targets = all(s.target and all(s.target) for s in dataset)
    if wanted is None and criterion is None and not has_targets:
        raise ValueError(
            f"{data}: a row has no 'target', or an empty one; allowed are rows with one, or -T "
            "phrases= or -T criterion="
        )
    return Task(
        dataset=dataset,
        solver=steering_sweep(
            SaeLatents(
                sae, {_NAME: latent}, mode=mode, only_if_active=only_if_active, layer=layer,
                site=site, threshold=threshold, norm_scale=norm_scale,
            ),
            chosen, controls=["random"] if controls else [], control_draws=controls or None,
            seed=seed,
        ),
        scorer=[
            behaviour_by_value(wanted, criterion),
            activation_by_value(sae, latent, layer, site, norm_scale),
        ],
        config=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
    )  # fmt: skip


# Of names of their own in this file, where `inspect score` finds them: a log names a scorer inside
# another one without its file.
@scorer(metrics=[dose_metric(by="variant")])
def behaviour_by_value(
    phrases: Sequence[str] | None = None, criterion: str | None = None
) -> Scorer:
    """`dose_response` of the behaviour.

    Args:
        phrases: as for the task.
        criterion: likewise.

    Returns:
        The scorer.
    """
    return dose_response(behaviour_seen(phrases, criterion))


@scorer(metrics=[dose_metric(by="variant")])
def activation_by_value(
    sae: str,
    latent: int,
    layer: int | None = None,
    site: Site | None = None,
    norm_scale: float | None = None,
) -> Scorer:
    """`dose_response` of `sae_feature`: how active the latent is, averaged over each answer.

    Args:
        sae: as for the task.
        latent: likewise.
        layer: likewise.
        site: likewise.
        norm_scale: likewise.

    Returns:
        The scorer.
    """
    feature = sae_feature(
        sae, {_NAME: latent}, layer=layer, site=site, pool="mean", token_scores=False,
        norm_scale=norm_scale,
    )  # fmt: skip
    return dose_response(feature, key=_NAME)


@scorer(metrics=[mean(), stderr()])
def behaviour_seen(phrases: Sequence[str] | None = None, criterion: str | None = None) -> Scorer:
    """1 where the answer has one of the phrases, or of the sample's targets, in any case.

    Args:
        phrases: texts; those of the sample's target by default.
        criterion: by which a model in the role `grader` decides instead.

    Returns:
        The scorer; what the grader says is `C` or `I`, and unscored where it does not say.
    """
    graded = model_graded_qa(model_role="grader") if criterion is not None else None

    async def score(state: TaskState, target: Target) -> Score | None:
        if graded is not None:
            return await graded(state, Target(criterion or ""))
        answer = state.output.completion.casefold()
        texts = list(target if phrases is None else phrases)
        found = next((text for text in texts if text.casefold() in answer), None)
        return Score(value=int(found is not None), answer=found)

    return score
