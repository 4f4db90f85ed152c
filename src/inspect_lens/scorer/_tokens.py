"""What scorers of tokens share: token scores beside the log, and samples without a token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio.to_thread
from inspect_ai.scorer import Score

from inspect_lens.reading import (
    LatentReader,
    LatentReading,
    ProbeReader,
    Reading,
    TokenScores,
    save_token_scores,
)

__all__ = ["keep_tokens", "no_tokens"]


async def keep_tokens(
    records: Sequence[TokenScores], readings: Sequence[Reading | LatentReading]
) -> dict[str, Any]:
    """Write token scores beside the log.

    Args:
        records: of one sample.
        readings: of the same sample; a finished log is scored beside their activations.

    Returns:
        `{"token_scores": reference}` for the score's metadata, or nothing where there is no
        place for a file.
    """
    if not records:
        return {}
    handles = [r.rows.handle for r in readings if r.rows.handle is not None]
    beside = next((h for h in handles if h.uri is not None), None)
    if all(record.stands_in is not None for record in records):
        reference = save_token_scores(records, beside=beside)  # nothing is written
    else:
        write = partial(save_token_scores, records, beside=beside)
        reference = await anyio.to_thread.run_sync(write)
    return {} if reference is None else {"token_scores": reference}


def no_tokens(reader: ProbeReader | LatentReader) -> Score:
    """The score of a sample in which there is nothing to read."""
    return Score.unscored(
        reason="no_tokens",
        explanation=(
            f"No token to read: positions={reader.positions!r} selects none of this output (the "
            "last sampled token is never fed to the model), or a limit ended the sample before its "
            "model had written anything."
        ),
    )
