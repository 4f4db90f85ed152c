"""`log_to_store`: what an eval captured as a store, to train and judge probes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import GenerateConfig

from inspect_lens._base.labels import LABELS, label_of
from inspect_lens.data import ActivationStore, Captured, Message, ProbeDataset, ProbeSample
from inspect_lens.data._sample import check_label_source
from inspect_lens.errors import NotCapturedError, SpecError, did_you_mean
from inspect_lens.model import activations, know_log
from inspect_lens.model._places import read_log
from inspect_lens.probe import CaptureFacts
from inspect_lens.reading import CallSelection, OnMissing, Over, Turn
from inspect_lens.reading._rows import select_positions
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.spec import Positions, parse_positions

from ._collect import (
    Request,
    claimed,
    finish,
    plan_of,
    record_of,
    refuse_other_weights,
    rows_at,
    write_shard,
)

__all__ = ["log_to_store"]

logger = logging.getLogger(__name__)

_SCORE = "score:"
_SHARD = 64
_MOST_OF_A_COLUMN = 256
"""Characters."""

Label = str | Callable[[EvalSample], bool | int | None]


@shared_parameters
def log_to_store(
    log: EvalLog | str | Path,
    out: str | Path,
    label: Label = "label",
    *,
    group: str | None = None,
    positions: Positions | list[int] = "completion",
    over: Over = "last",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
) -> ActivationStore:
    """Make a store of what the calls of a log captured, with a label for each sample.

    Where labels come from is what all samples' metadata says as `label_source`. What else their
    metadata says in a text of at most 256 characters, a number, true or false becomes a column,
    such as `condition`; a `truth` only if it is a text, which an answer can name.
    The store is tied to the log's model, by the fingerprint of its weights where they are on this
    machine. `ActivationSet.from_store` and `inspect-lens probe train` read it as one of `collect`.

    Args:
        log: with its samples, or its path.
        out: folder of the store, local or an fsspec URL.
        label: key of the sample metadata that holds 1 or true for positives; `score:NAME` for a
            score of the log, which has to be 0 or 1, or `C` and `I`; or a function from a sample
            to its label. A sample whose label is None is left out.
        group: key of the sample metadata that says what must not straddle a split, such as the
            scenario; by default each sample with its epochs is a group.
        positions: tokens to keep of those that were captured: `completion`, `prompt`, `all`,
            `last_prompt` or numbers.

    Raises:
        ArtifactError: a call captured nothing, or not these tokens.
        SpecError: a label that is none, no sample with one, a `label_source` that no card has a
            word for, calls of several models, or a folder that holds another store.

    Example:
        ```python
        from inspect_lens.collect import log_to_store
        from inspect_lens.train import ActivationSet

        store = log_to_store("logs/honesty.eval", "acts/honesty", group="group")
        data = ActivationSet.from_store(store)
        assert len(data.labels) == 8
        ```
    """
    read = read_log(log)
    if read.location:
        know_log(read.location)
    selection = CallSelection.of(over=over, roles=roles, on_missing=on_missing)
    wanted = parse_positions(positions, field="positions")
    kept: list[tuple[ProbeSample, Turn]] = []
    labelled: list[EvalSample] = []
    if read.samples is None:
        raise SpecError("log: it was read without its samples; read it with header_only=False")
    n_unmarked = 0
    for sample in read.samples:
        mark = _label(sample, label)
        if mark is None:
            n_unmarked += 1
            continue
        labelled.append(sample)
        for turn in selection.of_sample(sample, read.eval.model).turns:
            kept.append((_sample(sample, turn, mark, group), turn))
    if not labelled and not callable(label):
        keys = sorted({key for one in read.samples for key in one.metadata or {}})
        names = sorted({f"{_SCORE}{name}" for one in read.samples for name in one.scores or {}})
        there = keys + names
        hint = did_you_mean(label, there) if there else "there is nothing that could be one"
        hint = "it is None or unscored in each" if label in there else hint
        raise SpecError(f"log: 0 labelled calls, since no sample has label={label!r}; {hint}")
    models = sorted({turn.model for _, turn in kept})
    if len(models) != 1:
        raise SpecError(
            f"log: {len(kept)} labelled calls of the models {models}; allowed are calls of one "
            "model, at least one; name its role with roles=, or the labels with label="
        )
    done = [c for c in (_captured(*one, wanted, on_missing) for one in kept) if c is not None]
    known = {captured.record.id for captured in done}
    if n_unmarked or len(done) < len(kept):
        logger.warning(
            "Left out: %d of %d samples, which have no label, and %d of %d calls, of which no "
            "requested row was captured",
            *(n_unmarked, len(read.samples), len(kept) - len(done), len(kept)),
        )
    name = read.eval.task.rpartition("/")[2]
    dataset = ProbeDataset(
        name=name, split="log", source="path", licence="unknown", on_policy=True,
        label_meaning=label if isinstance(label, str) else getattr(label, "__name__", "label"),
        label_source=_label_source(labelled),
        text_overlap_group=name, samples=tuple(s for s, _ in kept if s.id in known),
    )  # fmt: skip
    made_by = {turn.message_id for _, turn in kept}
    config = _sampled_with(labelled, made_by) or read.eval.model_generate_config
    how = Request(
        layers="all", positions=wanted, max_tokens=config.max_tokens or 0,
        temperature=config.temperature or 0.0, seed=config.seed or 0,
    )  # fmt: skip
    facts = _computed_with([turn for sample, turn in kept if sample.id in known])
    plan = plan_of(models[0], dataset, how, _SHARD)
    uri = str(out).rstrip("/")
    with claimed(uri, plan):
        for k, start in enumerate(range(0, len(done), _SHARD)):
            numbered = [
                replace(one, record=replace(one.record, index=start + i))
                for i, one in enumerate(done[start : start + _SHARD])
            ]
            write_shard(uri, k, plan, numbered, facts)
        return finish(uri, plan)


def _sampled_with(
    samples: Sequence[EvalSample], message_ids: set[str | None]
) -> GenerateConfig | None:
    """What the first of some calls was sampled with: task, role and solver have their say in it."""
    events = (event for sample in samples for event in sample.events)
    calls = (event for event in events if isinstance(event, ModelEvent) and event.output.choices)
    found = (call.config for call in calls if call.output.message.id in message_ids)
    return next(found, None)


def _label_source(samples: Sequence[EvalSample]) -> str:
    """What all samples say of where their labels come from; empty where they do not agree."""
    told = {str((sample.metadata or {}).get("label_source") or "") for sample in samples}
    for word in sorted(told):
        check_label_source("log", word)
    return told.pop() if len(told) == 1 else ""


def _computed_with(turns: Sequence[Turn]) -> CaptureFacts:
    """What the eval's server computed with, where all calls say the same."""
    handles = [activations(turn.output) for turn in turns]
    told = {handle.numerics for handle in handles if handle is not None}
    way = "pass a label= that is None for the samples of all servers but one"
    refuse_other_weights("log: its calls", filter(None, told), way)
    only = told.pop() if len(told) == 1 else None
    return CaptureFacts() if only is None else CaptureFacts.known(only.model_dump())


_WORDS: Final[dict[str, int | None]] = {
    **dict.fromkeys(("c", "yes", "true", "1"), 1), **dict.fromkeys(("i", "no", "false", "0"), 0),
    "n": None,
}  # fmt: skip
"""Values of scores that say a label; no answer is none."""


def _label(sample: EvalSample, label: Label) -> bool | None:
    if callable(label):
        found: Any = label(sample)
    elif label.startswith(_SCORE):
        score = (sample.scores or {}).get(label.removeprefix(_SCORE))
        found = None if score is None else score.value
        if isinstance(found, str):
            found = _WORDS.get(found.lower(), found)
        elif isinstance(found, float) and math.isnan(found):
            found = None  # unscored
    else:
        found = (sample.metadata or {}).get(label)
    if found is None:
        return None
    if (mark := label_of(found)) is None:
        raise SpecError(
            f"label={label!r}: sample {sample.id} has {found!r} there; allowed are {LABELS}, and "
            "None for a sample that is left out; pass a function that says which it is"
        )
    return mark


def _sample(sample: EvalSample, turn: Turn, mark: bool, group: str | None) -> ProbeSample:
    facts = sample.metadata or {}
    if group is not None and group not in facts:
        raise SpecError(
            f"group={group!r}: sample {sample.id} has no such metadata; allowed is a key that "
            f"every sample has, such as {sorted(facts)}"
        )
    return ProbeSample(
        id=f"{sample.id}/{sample.epoch}/{turn.number}.{turn.choice}",
        messages=tuple(Message(m.role, m.text) for m in turn.prompt(sample.messages)),
        label=mark,
        group=str(sample.id if group is None else facts[group]),
        completion=turn.output.completion,
        columns=_columns(facts),
    )


def _columns(facts: Mapping[str, Any]) -> dict[str, str]:
    """What sets can be split by; a document would be stored again with each call."""
    made = {key: str(fact) for key, fact in facts.items() if isinstance(fact, str | int | float)}
    if not isinstance(facts.get("truth"), str):
        made.pop("truth", None)  # whether an answer names a mark is nothing that it says
    return {key: text for key, text in made.items() if len(text) <= _MOST_OF_A_COLUMN}


def _captured(
    sample: ProbeSample, turn: Turn, wanted: Positions, on_missing: OnMissing
) -> Captured | None:
    """What a call captured of these tokens; None where it has none of them."""
    handle = activations(turn.output)
    try:
        if handle is None:
            raise NotCapturedError(
                f"sample {sample.id}: its call captured nothing; run the eval with -M capture=…, "
                'or leave such calls out with on_missing="skip"'
            )
        positions = select_positions(wanted, handle.n_prompt, handle.n_completion)
        if positions is None:
            return None
        acts = rows_at(handle, positions)
    except NotCapturedError:
        if on_missing == "error":
            raise
        return None
    record = record_of(
        0, sample, n_rows=len(positions), n_prompt=handle.n_prompt,
        completion=sample.completion or "",
    )  # fmt: skip
    ids = (*handle.prompt_token_ids, *handle.token_ids)
    return Captured(
        record=record, acts=acts, layers=handle.layers, positions=tuple(positions), token_ids=ids
    )
