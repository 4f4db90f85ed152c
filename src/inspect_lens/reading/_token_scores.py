"""Token scores in a file beside the log: what a score's metadata refers to, and reading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.scorer import Score
from numpy.typing import NDArray
from pydantic_core import to_json

from inspect_lens._base.untrusted import parse_json
from inspect_lens.errors import ArtifactError
from inspect_lens.model import Activations, ProbeScores, read_activations
from inspect_lens.model._places import read_log
from inspect_lens.model._read import read_sidecar, write_sidecar
from inspect_lens.model._scores import (
    SCORES_REFERENCE,
    as_array,
    as_positions,
    decoded_scores,
    encode_scores,
)

from ._rows import places

__all__ = ["TokenScores", "read_token_scores"]

REFERENCE = SCORES_REFERENCE
"""`$lens` of the reference in `Score.metadata["token_scores"]`. With `records` it is one into the
file that the provider wrote, and these are what a reader made of the scores there: as JSON text,
which Inspect takes for one value where it copies, walks and summarises all values of a score."""

KEY = "token_scores"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """Scores that one probe gave to the tokens of one model call."""

    probe: str
    """Key of a dict score, else the probe's name."""
    probe_sha256: str
    layers: tuple[int, ...]
    """Layers that were read."""
    site: str
    pool: str
    """How the token scores became `value`."""
    threshold: float | None
    """Of the pooled value; None where none was set for these settings."""
    value: float
    """The pooled score of this call."""
    message_id: str | None
    """Assistant message of the call."""
    turn: int
    """0-based number of the call among those of the sample that were scored."""
    source: str
    """`engine`, `rows` or `recomputed`."""
    n_prompt: int
    """Prompt tokens of the call; positions from here on are completion."""
    positions: NDArray[np.int64]
    """(tokens,) absolute position over prompt and completion."""
    token_ids: NDArray[np.int64]
    """(tokens,) id of the token at each position; (0,) where ids are not known."""
    scores: NDArray[np.float64]
    """(tokens,) in the unit of `value`."""
    sample_id: str | int | None = field(default=None)
    """Filled in when read from a sample or a log, as are the next two."""
    epoch: int | None = field(default=None)
    scorer: str | None = field(default=None)
    stands_in: ProbeScores | None = field(default=None)
    """The file of the engine's scores in which these stand already, while that is known."""


_ARRAYS = ("positions", "token_ids", "scores")
_FACTS = (
    "probe", "probe_sha256", "layers", "site", "pool", "threshold", "value", "message_id", "turn",
    "source", "n_prompt",
)  # fmt: skip
_OF_FILE = ("layers", "site", "source", "n_prompt")
"""Facts that the provider's file has, too."""


def save_token_scores(
    records: Sequence[TokenScores], *, beside: Activations | ProbeScores | None = None
) -> dict[str, Any] | None:
    """Write token scores of one sample beside the log, unless the provider has."""
    if not records:
        return None
    files = [record.stands_in for record in records]
    first = files[0]
    if first is not None and first.uri is not None and all(f is first for f in files):
        return _reference_to(first, records)
    arrays = {f"{i}.{name}": getattr(r, name) for i, r in enumerate(records) for name in _ARRAYS}
    facts = [{name: getattr(record, name) for name in _FACTS} for record in records]
    data = encode_scores(facts, arrays)
    return write_sidecar(data, kind=REFERENCE, name="scores", beside=beside)


def read_token_scores(
    source: EvalLog | EvalSample | Score | Mapping[str, Any] | str | Path,
) -> list[TokenScores]:
    """Read the token scores that scorers wrote beside a log.

    Args:
        source: a log, its path, one of its samples, one score, the metadata of a score, or the
            reference in it.

    Returns:
        One record per sample, scorer, call and probe, in that order; empty where no score has
        token scores.

    Raises:
        ArtifactError: a file is missing or damaged, or the log was read without its samples.

    Example:
        ```python
        from inspect_lens.reading import read_token_scores

        record = read_token_scores("logs/honesty.eval")[0]
        assert record.scorer == "deception_probe"
        assert len(record.scores) == len(record.positions) == len(record.token_ids)
        ```
    """
    if isinstance(source, str | Path):
        source = read_log(source)
    if isinstance(source, EvalLog):
        read_activations(source)  # says where its files are, and refuses a log without samples
        return [record for sample in source.samples or [] for record in read_token_scores(sample)]
    if isinstance(source, EvalSample):
        return [
            replace(record, sample_id=source.id, epoch=source.epoch, scorer=name)
            for name, score in (source.scores or {}).items()
            for record in read_token_scores(score)
        ]
    found: Any = source.metadata if isinstance(source, Score) else source
    if isinstance(found, Mapping) and "$lens" not in found:
        found = found.get(KEY)
    if found is None:
        return []
    is_in_engine = found.get("$lens") == REFERENCE and "records" in found
    return _read_in_engine(found) if is_in_engine else _read(found)


def engine_records(
    handle: ProbeScores, *, message_id: str | None = None, turn: int = 0
) -> list[TokenScores]:
    """Token scores of a call that no scorer has read, with their mean for a value."""
    ids = np.asarray((*handle.prompt_token_ids, *handle.token_ids), dtype=np.int64)
    made = []
    for column in handle.columns:
        by, read = column.by, np.asarray(column.positions, dtype=np.int64)
        if by.role != "tokens" or not by.probe_sha256 or not len(read):
            continue
        scores = column.scores.astype(np.float64)
        made.append(
            TokenScores(
                probe=by.probe, probe_sha256=by.probe_sha256, layers=by.layers, site=str(by.site),
                pool="mean", threshold=None, value=float(scores.mean()), message_id=message_id,
                turn=turn, source="engine", n_prompt=handle.n_prompt, positions=read,
                token_ids=ids[read], scores=scores, stands_in=handle,
            )
        )  # fmt: skip
    return made


def _reference_to(handle: ProbeScores, records: Sequence[TokenScores]) -> dict[str, Any]:
    """What stands in the log of scores that are in a file already."""
    made = []
    for record in records:
        read = as_positions(record.positions)
        is_run = isinstance(read, range)
        span = {"range": [read[0], read[-1] + 1]} if is_run else {"positions": read}
        facts = {name: getattr(record, name) for name in _FACTS if name not in _OF_FILE}
        made.append({**facts, **span})
    file = {"uri": handle.uri, "root": handle.root, "sha256": handle.sha256}
    return {"$lens": REFERENCE, **file, "records": to_json(made).decode()}


def _read_in_engine(reference: Mapping[str, Any]) -> list[TokenScores]:
    fields = {name: reference.get(name) for name in ("uri", "root", "sha256")}
    handle = ProbeScores(probes=(), n_prompt=0, n_completion=0, **fields)
    columns, made = handle.columns, []
    ids = np.asarray((*handle.prompt_token_ids, *handle.token_ids), dtype=np.int64)
    try:
        for facts in parse_json(reference["records"]):
            own = (c for c in columns if c.by.probe_sha256 == facts["probe_sha256"])
            column = next(c for c in own if c.by.role == "tokens")
            read = _span(*facts["range"]) if "range" in facts else tuple(facts["positions"])
            at = places(column.positions, read)
            known = {name: facts[name] for name in _FACTS if name not in _OF_FILE}
            made.append(
                TokenScores(
                    **known,
                    layers=column.by.layers,
                    site=str(column.by.site),
                    source="engine",
                    n_prompt=len(handle.prompt_token_ids),
                    positions=as_array(read),
                    token_ids=ids[as_array(read)],
                    scores=column.scores[at].astype(np.float64),
                )
            )
    except (KeyError, TypeError, ValueError, StopIteration, IndexError) as error:
        raise ArtifactError(
            f"{reference.get('uri')}: does not hold the scores that the log refers to "
            f"({type(error).__name__}: {error}); restore the file that was written with this log"
        ) from None
    return made


def _span(first: int, end: int) -> range:
    """A range without steps, which a file of ours never has."""
    return range(first, end)


def _read(reference: Mapping[str, Any]) -> list[TokenScores]:
    data = read_sidecar(reference, kind=REFERENCE)
    with decoded_scores(data, where=str(reference.get("uri"))) as (facts, arrays):
        return list(_records(facts["records"], arrays))


def _records(
    facts: Iterable[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]
) -> Iterable[TokenScores]:
    for i, fact in enumerate(facts):
        known: dict[str, Any] = {name: fact[name] for name in _FACTS}
        known |= {"layers": tuple(fact["layers"])}
        known |= {name: arrays[f"{i}.{name}"] for name in _ARRAYS}
        yield TokenScores(**known)
