"""Tokens that are read by what they are: the reasoning, the answer, the calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError
from inspect_lens.probe import TokenText, select_tokens
from inspect_lens.spec import Positions

from ._call_texts import CallTexts
from ._reading import ScoredTokens
from ._rows import Rows

__all__ = ["Selector", "positions_for", "select_rows", "select_scores"]

_WHOLE: Final = frozenset({"prompt", "all", "assistant"})
"""Selections that take tokens of the prompt too."""


def positions_for(selection: str) -> Positions:
    """Positions that hold every token of a selection."""
    select_tokens(TokenText(pieces=(), n_prompt=0), selection)
    return "all" if selection.partition(":")[0] in _WHOLE else "completion"


class Selector:
    """Tells which tokens of a call a selection keeps."""

    def __init__(self, selection: str, texts: CallTexts) -> None:
        self.selection = selection
        self._texts = texts

    def keeps(
        self,
        positions: Sequence[int],
        *,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        model_name: str | None = None,
    ) -> NDArray[np.bool_]:
        """Tell which of some tokens are kept."""
        ids = (*prompt_token_ids, *token_ids[:-1])
        what = f"selection={self.selection!r}"
        if not ids:
            raise ArtifactError(
                f"{what}: the call has no token ids to tell its tokens by; read activations that "
                "the vllm-lens provider captured"
            )
        texts = self._texts.of(model_name, what=what)
        tokens = TokenText(
            pieces=tuple(texts.texts(ids)),
            n_prompt=len(prompt_token_ids),
            special=tuple(texts.special(ids)),
        )
        return select_tokens(tokens, self.selection)[list(positions)]


def select_rows(rows: Rows, selector: Selector, model_name: str | None = None) -> Rows | None:
    """Keep the rows of a selection."""
    at = _kept(rows, selector, model_name)
    if not at.size:
        return None
    positions, ids = _at(rows, at)
    return rows._replace(acts=rows.acts[:, at], positions=positions, token_ids=ids)


def select_scores(
    rows: ScoredTokens, selector: Selector, model_name: str | None = None
) -> ScoredTokens | None:
    """Keep the engine's scores of a selection."""
    at = _kept(rows, selector, model_name)
    if not at.size:
        return None
    positions, ids = _at(rows, at)
    return rows._replace(scores=rows.scores[at], positions=positions, token_ids=ids)


def _kept(
    rows: Rows | ScoredTokens, selector: Selector, model_name: str | None
) -> NDArray[np.int64]:
    """Which of the tokens that were read are of a selection."""
    handle = rows.handle
    kept = selector.keeps(
        rows.positions,
        prompt_token_ids=() if handle is None else handle.prompt_token_ids,
        token_ids=() if handle is None else handle.token_ids,
        model_name=model_name,
    )
    return np.flatnonzero(kept)


def _at(
    rows: Rows | ScoredTokens, at: NDArray[np.int64]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions and ids of some of the tokens; no ids where they are not known."""
    ids = tuple(rows.token_ids[i] for i in at) if rows.token_ids else ()
    return tuple(rows.positions[i] for i in at), ids
