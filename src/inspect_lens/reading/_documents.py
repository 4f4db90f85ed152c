"""`DocumentReader`: how relevant documents of a prompt are to its query, by attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from inspect_ai.model import ChatMessage, ContentText, ModelOutput
from numpy.typing import NDArray

from inspect_lens.attention import AttentionHeads, Span, document_scores, load_heads
from inspect_lens.errors import ArtifactError, SpecError

from ._queries_keys import (
    check_model_of,
    find_texts,
    messages_before,
    prompt_pieces,
    read_queries_keys,
    require_span,
    tokens_of,
)

__all__ = ["DocumentReader", "DocumentReading"]


@dataclass(frozen=True)
class DocumentReading:
    """Relevance of the documents of one prompt, by attention."""

    scores: NDArray[np.float64]
    """(documents,) of `document_scores`: larger is more relevant."""
    documents: tuple[Span, ...]
    """Token range of each document, the same in both prompts."""
    query: Span
    """Token range of the query."""
    empty_query: Span
    """Token range of what stands in its place in the other prompt."""

    @property
    def ranking(self) -> tuple[int, ...]:
        """Documents by their number from 0, the most relevant first."""
        return tuple(int(i) for i in np.argsort(-self.scores, kind="stable"))


@dataclass(frozen=True)
class DocumentReader:
    """Reads how relevant documents are from two calls: with the query, and with an empty one.

    Make one with `DocumentReader.of`, which checks everything before any sample runs.

    Example:
        ```python
        from inspect_ai.model import ChatMessageUser

        from inspect_lens.attention import AttentionHeads
        from inspect_lens.reading import DocumentReader

        reader = DocumentReader.of(AttentionHeads(method="core", heads=[(4, 1)]))
        prompt = [ChatMessageUser(content="Velosh was founded by Ruvan. Who founded Velosh?")]
        (asked,) = reader.without_query(prompt, {"query": "Who founded Velosh?"})
        assert asked.text == "Velosh was founded by Ruvan. N/A"
        ```
    """

    heads: AttentionHeads
    documents: str
    """Key of the sample's metadata with the texts of the documents, in the prompt's order."""
    query: str
    """Key of the sample's metadata with the text of the query, which stands behind them."""
    empty: str
    """Text that stands in the place of the query in the second call."""
    tokenizer: str | None = None
    check_model: bool = True
    """Refuse a model of another name than that of the list."""

    @classmethod
    def of(
        cls,
        heads: str | AttentionHeads,
        *,
        documents: str = "documents",
        query: str = "query",
        empty: str = "N/A",
        tokenizer: str | None = None,
        check_model: bool = True,
    ) -> DocumentReader:
        """Load heads, and settle where documents and query are.

        Args:
            heads: name below `heads/`, path, or a list.
            documents: key of the sample's metadata with the texts of the documents.
            query: key of the sample's metadata with the text of the query.
            empty: text in the place of the query in the second call; the paper takes `N/A`.
            tokenizer: folder or name of the tokenizer; by default that of the model that is read.
            check_model: refuse a model of another name than that of the list.

        Returns:
            The reader.

        Raises:
            ArtifactError: no such list of heads.
            SpecError: an empty query without text.
        """
        if not empty.strip():
            raise SpecError(f"empty={empty!r}; allowed is a text that asks nothing, such as 'N/A'")
        return cls(load_heads(heads), documents, query, empty.strip(), tokenizer, check_model)

    def without_query(
        self,
        messages: Sequence[ChatMessage],
        metadata: Mapping[str, Any] | None,
        output: ModelOutput | None = None,
    ) -> list[ChatMessage]:
        """The prompt of the second call: the same with `empty` in the place of the query.

        Args:
            messages: of the conversation.
            metadata: of the sample.
            output: of the call; messages from its answer on are left out.

        Returns:
            The messages, the one with the query copied; the last place of its text is taken.

        Raises:
            ArtifactError: the sample has no query, or no message has its text.
        """
        query = self._query(metadata)
        changed = list(messages) if output is None else messages_before(output, messages)
        for i in reversed(range(len(changed))):
            made = _replaced(changed[i], query, self.empty)
            if made is not None:
                changed[i] = made
                return changed
        raise ArtifactError(
            f"query={self.query!r}: the text {query[:80]!r} of this sample's metadata stands in no "
            "message of its prompt"
        )

    def read_captured(
        self,
        output: ModelOutput,
        without_query: ModelOutput,
        *,
        metadata: Mapping[str, Any] | None,
        model_name: str | None = None,
    ) -> DocumentReading:
        """Read both calls; it reads files and multiplies rows, so not in an event loop.

        Args:
            output: of the call with the query, with queries and keys of the heads' layers.
            without_query: of the call whose prompt `without_query` made, with the same.
            metadata: of the sample.
            model_name: of the model, with its provider: its tokenizer tells the texts of tokens.

        Returns:
            The reading.

        Raises:
            ArtifactError: a call captured no queries and keys, the model is not that of the
                list, there is no tokenizer on this machine, a text does not stand in the prompt
                or stands there twice, or the prompts differ in more than the query.
            SpecError: a head was not captured.
        """
        if self.check_model and model_name is not None:
            check_model_of(self.heads, model_name)
        texts, query = self._documents(metadata), self._query(metadata)
        asked, blank = (
            prompt_pieces(each, model_name, self.tokenizer, "document scores")
            for each in (output, without_query)
        )
        documents = self._spans(asked, texts)
        whole, other = "".join(asked), "".join(blank)
        behind = len("".join(asked[: documents[-1][1]]))
        at = whole.rfind(query)
        if at < behind:
            raise ArtifactError(
                f"query={self.query!r}: its text does not stand behind the documents in the prompt "
                "as the model saw it; put documents first"
            )
        if whole.find(query, behind) != at:
            raise ArtifactError(
                f"query={self.query!r}: its text stands more than once behind the documents; the "
                "second call would still have it"
            )
        expected = whole[:at] + self.empty + whole[at + len(query) :]
        if other != expected or self._spans(blank, texts) != documents:
            raise ArtifactError(
                "document scores: the prompts of the two calls differ in more than the query; a "
                "chat template that writes the time or counts words would do that"
            )
        spans = tokens_of(asked, at, at + len(query)), tokens_of(blank, at, at + len(self.empty))
        scores = document_scores(
            read_queries_keys(output), read_queries_keys(without_query), self.heads, documents,
            query=spans[0], empty_query=spans[1],
        )  # fmt: skip
        return DocumentReading(scores, documents, *spans)

    def _spans(self, pieces: Sequence[str], texts: Sequence[str]) -> tuple[Span, ...]:
        return tuple(
            require_span(span, f"documents={self.documents!r}, number {i}")
            for i, span in enumerate(find_texts(pieces, texts))
        )

    def _documents(self, metadata: Mapping[str, Any] | None) -> list[str]:
        found = (metadata or {}).get(self.documents)
        texts = found if isinstance(found, list | tuple) else ()
        if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ArtifactError(
                f"documents={self.documents!r}: this sample's metadata has "
                f"{type(found).__name__} there; needed are two texts or more"
            )
        return list(texts)

    def _query(self, metadata: Mapping[str, Any] | None) -> str:
        found = (metadata or {}).get(self.query)
        if not isinstance(found, str) or not found.strip():
            raise ArtifactError(
                f"query={self.query!r}: this sample's metadata has {found!r} there; needed is a "
                "text"
            )
        return found.strip()


def _replaced(message: ChatMessage, text: str, by: str) -> ChatMessage | None:
    """A copy with other words in the last place of a text; None where it has no such text."""
    if isinstance(message.content, str):
        before, found, after = message.content.rpartition(text)
        return message.model_copy(update={"content": before + by + after}) if found else None
    for i in reversed(range(len(message.content))):
        part = message.content[i]
        if isinstance(part, ContentText) and text in part.text:
            before, _, after = part.text.rpartition(text)
            parts = list(message.content)
            parts[i] = part.model_copy(update={"text": before + by + after})
            return message.model_copy(update={"content": parts})
    return None
