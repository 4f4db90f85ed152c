"""`lens_rank`: at which layer the stream predicts a token."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations
from inspect_lens.spec import LensTable

__all__ = ["lens_rank"]


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
