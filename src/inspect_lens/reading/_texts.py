"""Which tokens of a call are read: by position, and by their texts (selections and sentences)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.errors import ArtifactError
from inspect_lens.probe import (
    SENTENCE_POOL,
    TokenText,
    parse_head_pool,
    select_tokens,
    sentence_ends,
)
from inspect_lens.spec import Positions

from ._calls import CallSelection
from ._rows import Rows, Source

if TYPE_CHECKING:
    from ._reader import ScoredTokens

_WHOLE: Final = frozenset({"prompt", "all", "assistant", "user"})
"""Selections that take tokens of the prompt too."""

Read = TypeVar("Read", "Rows", "ScoredTokens")


def positions_for(selection: str) -> Positions:
    """Positions that hold every token of a selection; refuses what is none."""
    select_tokens(TokenText(pieces=(), n_prompt=0), selection)
    return "all" if selection.partition(":")[0] in _WHOLE else "completion"


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


class _Ids(NamedTuple):
    """Token ids of a call."""

    prompt: Sequence[int]
    completion: Sequence[int]


def _ids(rows: Rows | ScoredTokens, what: str) -> _Ids:
    """Those of the call that was read."""
    handle = rows.handle
    if handle is None or not (handle.prompt_token_ids or handle.token_ids):
        raise ArtifactError(
            f"{what}: the call has no token ids to tell its tokens by; read activations that the "
            "vllm-lens provider captured"
        )
    return _Ids(handle.prompt_token_ids, handle.token_ids)


@dataclass(frozen=True, kw_only=True)
class CallReader:
    """Which calls are read, which of their tokens, from where, and how these become one number."""

    positions: Positions
    pool: str
    source: Source
    selection: str = ""
    """Tokens among `positions` that are read, as `select_tokens` takes it; empty means all."""
    tokenizer: str | None = None
    """Tells sentences and selections; None is that of the model."""
    calls: CallSelection = field(default_factory=CallSelection)
    """Which calls of a sample are read."""

    @property
    def _card_model(self) -> str:
        """Whose tokenizer tells sentences where that of the call's model is not known."""
        return ""

    @cached_property
    def _texts(self) -> CallTexts:
        return CallTexts(self.tokenizer, card_model=self._card_model)

    def select(self, rows: Read, model_name: str | None) -> Read | None:
        """Keep the tokens of the selection; None where there is none of them."""
        if not self.selection:
            return rows
        at = self._selected(rows, model_name)
        if not at.size:
            return None
        kept: dict[str, Any] = {
            "positions": tuple(rows.positions[i] for i in at),
            "token_ids": tuple(rows.token_ids[i] for i in at) if rows.token_ids else (),
        }
        if isinstance(rows, Rows):
            return rows._replace(acts=rows.acts[:, at], **kept)
        return rows._replace(scores=rows.scores[at], **kept)

    def _selected(self, rows: Rows | ScoredTokens, model_name: str | None) -> NDArray[np.int64]:
        what = f"selection={self.selection!r}"
        of_call = _ids(rows, what)
        ids = (*of_call.prompt, *of_call.completion[:-1])
        texts = self._texts.of(model_name, what=what)
        tokens = TokenText(
            pieces=tuple(texts.texts(ids)), n_prompt=len(of_call.prompt),
            special=tuple(texts.special(ids)),
        )  # fmt: skip
        return np.flatnonzero(select_tokens(tokens, self.selection)[list(rows.positions)])

    def sentence_ends(
        self, rows: Rows | ScoredTokens, model_name: str | None = None, pool: str | None = None
    ) -> NDArray[np.bool_] | None:
        """With which of the read tokens a sentence ends, where a pool has to know.

        Args:
            rows: that were read.
            model_name: of the model that made the call.
            pool: token aggregation; the reader's by default.

        Returns:
            (tokens,) bool, or None for a pool that does not go by sentences.

        Raises:
            ArtifactError: there is no tokenizer, or the call's token ids are not known.
        """
        if parse_head_pool(pool or self.pool).name != SENTENCE_POOL:
            return None
        what = f"pool={SENTENCE_POOL!r}"
        of_call = _ids(rows, what)
        texts = self._texts.of(model_name, what=what)
        # Of all tokens: where a sentence ends shows at the token behind it.
        ids = (*of_call.prompt, *of_call.completion)
        return sentence_ends(texts.texts(ids))[list(rows.positions)]
