"""What scorers of tokens share: token scores beside the log, and samples without a token."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import anyio.to_thread
from inspect_ai.scorer import Score

from inspect_lens.reading import (
    LatentReader,
    LatentReading,
    ProbeReader,
    Reading,
    SampleReading,
    save_token_scores,
)

__all__ = ["keep_tokens", "no_tokens"]

AnySample = SampleReading[Reading] | SampleReading[LatentReading]


async def keep_tokens(
    samples: Iterable[AnySample], *, labels: Iterable[str] = (), threshold: float | None = None
) -> dict[str, Any]:
    """Write token scores beside the log.

    Args:
        samples: readings of one sample, of each probe.
        labels: keys of a dict score, in that order; by default the names of what was read.
        threshold: of latents, which have no card.

    Returns:
        `{"token_scores": reference}` for the score's metadata, or nothing where there is no
        place for a file.
    """
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
