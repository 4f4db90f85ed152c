"""What probes in the engine said of a call, as a reader takes it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, UnsupportedError
from inspect_lens.model import ProbeScores
from inspect_lens.probe import AnyProbe
from inspect_lens.spec import Positions

from ._rows import select_positions

__all__ = ["Forms", "ScoredTokens", "forms_of", "pick_scores"]


class Forms(NamedTuple):
    """Hashes of the forms in which the engine runs a probe."""

    tokens: str
    text: str | None
    """Of the one whose score is that of the text up to a token; None where tokens are enough."""


class ScoredTokens(NamedTuple):
    """Scores of the selected tokens of one output, in the place of their activations.

    What `Rows` says of activations, this says of scores; neither has the other's array.
    """

    scores: NDArray[np.float64]
    """(tokens,) what the probe's `score_tokens` says of them."""
    layers: tuple[int, ...]
    positions: range | tuple[int, ...]
    """Absolute positions over prompt and completion, in the order of the tokens."""
    source: Literal["engine"]
    n_prompt: int
    """Prompt tokens of the call."""
    token_ids: tuple[int, ...]
    """Id of the token at each position."""
    handle: ProbeScores
    """What the scores were taken from."""
    text: float | None
    """Score of all these tokens, of a pool that is no rule over token scores."""


def forms_of(probe: AnyProbe) -> Forms | None:
    """The engine's forms of a probe; None where it has none."""
    try:
        tokens, text = probe.engine_forms()
    except UnsupportedError:
        return None
    return Forms(tokens.sha256, None if text is None else text.sha256)


def pick_scores(
    handle: ProbeScores, forms: Forms, positions: Positions, layers: tuple[int, ...]
) -> ScoredTokens | None:
    """Take the scores of a probe out of what the engine said of a call; may read a file.

    Args:
        handle: of the call.
        forms: of the probe.
        positions: that it reads.
        layers: that it reads.

    Returns:
        The scores, or None when no such token exists in this output.

    Raises:
        ArtifactError: the probe did not score these tokens, or the file is missing.
    """
    wanted = select_positions(positions, handle.n_prompt, handle.n_completion)
    if wanted is None:
        return None
    found = {column.by.engine_sha256: column for column in handle.columns}
    column = found.get(forms.tokens)
    if column is None:
        raise ArtifactError(f"the engine ran {', '.join(handle.probes)}, and not this probe")
    at = _places(column.positions, wanted)
    text = None
    if forms.text is not None:
        running = found.get(forms.text)
        first = tuple(running.positions[: len(wanted)]) if running is not None else ()
        if running is None or first != tuple(wanted):
            raise ArtifactError("the engine's attention was over other tokens")
        text = float(running.scores[len(wanted) - 1])
    ids = (*handle.prompt_token_ids, *handle.token_ids)
    chosen = ids[wanted.start : wanted.stop] if isinstance(wanted, range) else [
        ids[p] for p in wanted
    ]  # fmt: skip
    scores = column.scores[at].astype(np.float64)
    return ScoredTokens(
        scores, layers, wanted, "engine", handle.n_prompt, tuple(chosen), handle, text
    )


def _places(have: range | tuple[int, ...], wanted: range | tuple[int, ...]) -> slice | list[int]:
    runs = isinstance(have, range) and isinstance(wanted, range)
    if runs and len(have) and wanted[0] >= have[0] and wanted[-1] <= have[-1]:
        return slice(wanted[0] - have[0], wanted[-1] + 1 - have[0])
    at = {position: i for i, position in enumerate(have)}
    absent = [position for position in wanted if position not in at]
    if absent:
        raise ArtifactError(f"token position {absent[0]} was not scored by the engine")
    return [at[position] for position in wanted]
