"""What solvers leave in a sample: given texts, contrastive pairs, and the cells of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from inspect_ai.log import EvalLog
from inspect_ai.model import Model, ModelOutput
from inspect_ai.scorer import Score, value_to_float
from inspect_ai.util import Store, StoreModel
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from inspect_lens.errors import ArtifactError, CaptureError, UnsupportedError
from inspect_lens.model import Activations, read_activations
from inspect_lens.model._places import read_log
from inspect_lens.model._read import GIVEN_TOKENS
from inspect_lens.model._recapture import continued_tokens, prompt_tokens

__all__ = ["PairRow", "SteeringCell", "SteeringCells", "given_length", "read_cells", "read_pairs"]


class GivenTokens(NamedTuple):
    """Token ids of a given text, as the server makes them."""

    prompt: list[int]
    rest: list[int]
    """Of the given answer; empty for raw text."""


async def given_tokens(
    model: Model, messages: Sequence[Mapping[str, str]] | str, completion: str | None = None
) -> GivenTokens:
    """Ids of a prompt and of a given answer, with the server's own template."""
    api: Any = model.api
    if not hasattr(api, "post"):
        raise UnsupportedError(
            f"{model}: cannot read given text; allowed are models vllm-lens/… and lens/…; choose "
            "one of these, or a data set whose completions are generated"
        )
    prompt = await prompt_tokens(api, messages)
    if isinstance(messages, str) or completion is None:
        return GivenTokens(prompt, [])
    turns = [*messages, {"role": "assistant", "content": completion}]
    if (rest := await continued_tokens(api, prompt, turns)) is None:
        raise CaptureError(
            "the chat template writes another prompt when a reply follows, so the reply's tokens "
            "cannot be told; allowed are templates that continue their own prompt; turn off "
            "reasoning in the template, or generate the replies"
        )
    return GivenTokens(prompt, rest)


def given_length(output: ModelOutput) -> int | None:
    """Count the tokens of an answer that was read instead of generated.

    A token that the model does not read ends every call. Where an answer was read, another one
    stands in for it: nobody wrote it, and it has to be left out of what is said of the answer.

    Args:
        output: live or out of a log.

    Returns:
        How many of the output's `token_ids` were written, from the first one on; 0 for raw text,
        which is all prompt. None for an answer that was generated: all of them were.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import given_length

        output = read_eval_log("logs/honesty.eval").samples[0].output
        assert given_length(output) is None  # it was generated
        ```
    """
    found = (output.metadata or {}).get(GIVEN_TOKENS)
    return found if isinstance(found, int) else None


class ContrastiveAnswer(BaseModel):
    """One answer of a pair."""

    model_config = ConfigDict(frozen=True)

    label: int
    """1 for the deceptive side, 0 for the honest one: what the instruction asked for."""
    instruction: str
    completion: str
    message_id: str | None = None
    """Of its assistant message; `activations_for` finds what it captured."""


class ContrastiveAnswers(StoreModel):
    """Both sides of each pair of one sample, in its store."""

    answers: list[ContrastiveAnswer] = Field(default_factory=list)


class PairRow(NamedTuple):
    """One answer of a log with its activations."""

    group: str
    """Sample id: pairs of one sample belong together in every split."""
    label: int
    completion: str
    activations: Activations


def read_pairs(log: EvalLog | str | Path) -> list[PairRow]:
    """Read the pairs that `contrastive_pairs` left in a log.

    Args:
        log: the log or its path.

    Returns:
        The answers in the order of samples, each pair's sides one after the other; their arrays
        are what `inspect_lens.train.ActivationSet` takes.

    Raises:
        ArtifactError: the log has no samples, no pairs, or an answer without activations.

    Example:
        <!-- test: server -->
        ```python
        import numpy as np
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.reading import read_pairs
        from inspect_lens.solver import contrastive_pairs

        task = Task(dataset=organism_dataset("demo")[:2], solver=contrastive_pairs(layers=[4]))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        rows = read_pairs(log)
        means = np.stack([row.activations.numpy()[0].mean(axis=0) for row in rows])
        assert means.shape == (4, 256)
        ```
    """
    log = read_log(log)
    calls = {call.message_id: call.activations for call in read_activations(log)}
    rows = []
    for sample in log.samples or ():
        for answer in ContrastiveAnswers(store=Store(sample.store)).answers:
            handle = calls.get(answer.message_id)
            if handle is None:
                raise ArtifactError(
                    f"sample {sample.id}: an answer has no activations in this log; keep the "
                    ".lens folder beside it, and run contrastive_pairs on a vllm-lens/ model"
                )
            rows.append(PairRow(str(sample.id), answer.label, answer.completion, handle))
    if not rows:
        raise ArtifactError(
            f"{log.location or 'log'}: no pairs; run it with contrastive_pairs(...)"
        )
    return rows


_KEY = "SteeringCells:cells"

CellKind = Literal["vector", "random", "orthogonal", "baseline"]
"""What steered a cell: the vector, a random or orthogonal control, or nothing.
Of edits and latents, `vector` is the one that is meant, and `random` its control."""


class SteeringCell(BaseModel):
    """One answer of a sweep, with the vector, layer and scale that steered it."""

    model_config = ConfigDict(frozen=True)

    vector: str | None = None
    """Name, path or hash of the vector, or name of the edit or latent; a control names the one that
    it stands beside."""
    layer: int | None = None
    """Layer that was steered; None for the baseline, for all layers of the vector at once, and for
    edits."""
    scale: float = 0.0
    """Factor of the vector, with its sign, dose of the edit, or value of the latent; 0 for the
    baseline."""
    kind: CellKind
    completion: str
    """Text of the generation."""
    message_id: str | None = None
    """Of its assistant message; `activations_for` finds what it captured."""


class SteeringCells(StoreModel):
    """The cells of one sample, in its store: `state.store_as(SteeringCells).cells`."""

    cells: list[SteeringCell] = Field(default_factory=list)
    """In the order in which they were generated."""


_CELLS = TypeAdapter(list[SteeringCell])


def read_cells(store: Store) -> list[SteeringCell]:
    """Read the cells of a sample, live or out of a log; an empty list where no sweep ran.

    Args:
        store: `state.store`.

    Raises:
        ArtifactError: what stands in the store does not have the form of cells.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.util import Store

        from evals.organism_deception import organism_dataset
        from inspect_lens.reading import read_cells
        from inspect_lens.solver import steering_sweep

        sweep = steering_sweep("organism/truth", [0.8], controls=[])
        task = Task(organism_dataset("demo")[:1], solver=sweep)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        cells = read_cells(Store(log.samples[0].store))
        assert [(cell.kind, cell.scale) for cell in cells] == [("baseline", 0.0), ("vector", 0.8)]
        ```
    """
    try:
        # SteeringCells and Store.get write their defaults into the store that they read.
        return _CELLS.validate_python(dict(store.items()).get(_KEY, []))
    except ValueError as error:
        raise ArtifactError(
            f"store: SteeringCells of this sample cannot be read ({error}); allowed is what "
            "steering_sweep writes"
        ) from None


def number_of(score: Score | None, key: str | None = None) -> float | None:
    """The finite number that a score is; None where it has none."""
    value: Any = None if score is None else score.value
    if isinstance(value, Mapping):
        if key is None or key not in value:
            raise ArtifactError(
                f"key={key!r}: the scorer gives a dict with {sorted(value)}; pass one of these"
            )
        value = value[key]
    number = math.nan if value is None else float(value_to_float()(value))
    return number if math.isfinite(number) else None


class CellScores(StoreModel):
    """Scores of the cells of a sweep for one sample, in its store."""

    values: list[float | None] = Field(default_factory=list)
    """One per cell, in their order; None where the scorer gave none. Empty without a scorer."""
