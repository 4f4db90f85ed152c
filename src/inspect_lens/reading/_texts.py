"""Texts of a call's tokens, and what is told by them: sentences, and the tokens of a selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.errors import ArtifactError
from inspect_lens.probe import SENTENCE_POOL, TokenText, select_tokens, sentence_ends
from inspect_lens.spec import Positions

if TYPE_CHECKING:
    from ._reading import ScoredTokens
    from ._rows import Rows

__all__ = [
    "CallTexts",
    "Selector",
    "Sentences",
    "positions_for",
    "select_rows",
    "select_scores",
]


class CallTexts:
    """Finds the tokenizer of a call's model, once per model."""

    def __init__(self, tokenizer: str | None = None, *, card_model: str = "") -> None:
        self._card_model = card_model
        self._given = tokenizer
        self._texts: dict[str | None, TokenTexts] = {}

    def of(self, model_name: str | None, *, what: str) -> TokenTexts:
        """The texts of a model's tokens."""
        if model_name not in self._texts:
            self._texts[model_name] = self._find(model_name, what)
        return self._texts[model_name]

    def _find(self, model_name: str | None, what: str) -> TokenTexts:
        if self._given is not None:
            return TokenTexts.of("", tokenizer=self._given)
        names = [(model_name or "").partition(":")[0], self._card_model]
        why: list[str] = []
        for name in filter(None, names):
            try:
                return TokenTexts.of("", tokenizer=name)
            except ArtifactError as error:
                why.append(str(error).partition("; ")[0])
        raise ArtifactError(
            f"{what}: told by the texts of tokens, and no tokenizer of "
            f"{' or '.join(filter(None, names)) or 'the model'} is on this machine "
            f"({'; '.join(why) or 'no model is named'}); allowed is tokenizer= with the folder of "
            "a checkpoint or a name that the hub's cache has"
        )


_WHOLE: Final = frozenset({"prompt", "all", "assistant"})
"""Selections that take tokens of the prompt too."""


def positions_for(selection: str) -> Positions:
    """Positions that hold every token of a selection."""
    select_tokens(TokenText(pieces=(), n_prompt=0), selection)
    return "all" if selection.partition(":")[0] in _WHOLE else "completion"


class Sentences:
    """Finds sentence ends with the tokenizer of the model that wrote the call."""

    def __init__(self, texts: CallTexts) -> None:
        self._texts = texts

    def ends(self, rows: Rows | ScoredTokens, model_name: str | None = None) -> NDArray[np.bool_]:
        """Tell with which of the tokens that were read a sentence ends."""
        handle = rows.handle
        ids = () if handle is None else (*handle.prompt_token_ids, *handle.token_ids)
        if not ids:
            raise ArtifactError(
                f"pool={SENTENCE_POOL!r}: the call has no token ids to tell sentences by; read "
                "activations that the vllm-lens provider captured"
            )
        texts = self._texts.of(model_name, what=f"pool={SENTENCE_POOL!r}")
        # Of all tokens: where a sentence ends shows at the token behind it.
        return sentence_ends(texts.texts(ids))[list(rows.positions)]


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
