"""What attention says of a call: the focus of Attention Tracker, and the order of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessage, ContentText, ModelOutput
from numpy.typing import NDArray

from inspect_lens._base.labels import LABELS, label_of
from inspect_lens._base.shipped import model_path
from inspect_lens._base.token_texts import TokenTexts, tokens_at
from inspect_lens.attention import (
    AttentionHeads,
    Head,
    QueriesKeys,
    Span,
    document_scores,
    find_tracker_heads,
    instruction_shares,
)
from inspect_lens.errors import ArtifactError, NotCapturedError, SpecError
from inspect_lens.model import activations, know_log

__all__ = ["calibrate_tracker", "read_queries_keys"]


def read_queries_keys(output: ModelOutput) -> QueriesKeys:
    """Queries and keys that a call captured, live or from a log.

    Args:
        output: of the call, whose config was `lens_config(qk=[…])`.

    Raises:
        ArtifactError: the call captured none, or its file cannot be found.

    Example:
        <!-- test: server -->
        ```python
        from functools import partial

        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_config
        from inspect_lens.reading import read_queries_keys

        model = get_model("vllm-lens/organism/checkpoint")
        config = lens_config(qk=[0, 4], max_tokens=1)
        output = anyio.run(partial(model.generate, "Who founded Velosh?", config=config))
        captured = read_queries_keys(output)
        last = captured.patterns(4, queries=[-1])
        assert last.shape == (4, 1, captured.n_tokens)  # heads, queries, keys
        assert captured.attention_to([(0, 0), (4, 1)], [(0, 2)], queries=[-1]).shape == (2, 1, 1)
        ```
    """
    handle = activations(output)
    captured = dict(output.metadata or {})
    if handle is not None:
        captured |= {name: handle.data(name) for name in ("attn_q", "attn_k") if name in handle}
    return QueriesKeys.of(captured)


def find_texts(pieces: Sequence[str], texts: Sequence[str]) -> list[Span | None]:
    """Token ranges of texts that follow each other."""
    whole = "".join(pieces)
    found: list[Span | None] = []
    start = 0
    for text in texts:
        wanted = text.strip()
        at = whole.find(wanted, start) if wanted else -1
        if at < 0:
            found.append(None)
            continue
        start = at + len(wanted)
        found.append(tokens_at(pieces, at, start))
    return found


def require_span(span: Span | None, what: str) -> Span:
    """A range that has to be there."""
    if span is None:
        raise ArtifactError(
            f"{what}: its text does not stand in the prompt as the model saw it; the chat template "
            "may change it, or tokenizer= names that of another model"
        )
    return span


def prompt_pieces(
    output: ModelOutput, model_name: str | None, tokenizer: str | None, what: str
) -> list[str]:
    """Text of each token of a call's prompt."""
    handle = activations(output)
    if handle is None:
        raise NotCapturedError(f"{what}: this call captured nothing; use lens_config(qk=[…])")
    texts = TokenTexts.of(model_name or "", tokenizer=tokenizer)
    if not texts.is_known:
        raise ArtifactError(
            f"{what}: told by the texts of tokens. {texts.note} Allowed is "
            "tokenizer= with the folder of a checkpoint"
        )
    return texts.texts(handle.prompt_token_ids)


def bare_name(model: str) -> str:
    """A model's name without its provider and its adapter."""
    return model.partition("/")[2].partition(":")[0]


def check_model_of(heads: AttentionHeads, model: str) -> None:
    """Refuse heads of another model than the one that made a call."""
    listed, name = heads.model, bare_name(model)

    def place(of: str) -> str:
        # A folder may be written in several ways, and the shipped model has a name, too.
        path = Path(model_path(of)).expanduser()
        return str(path.resolve()) if path.is_dir() else of

    if listed and place(listed) != place(name):
        raise ArtifactError(
            f"heads: the list is of the model {listed!r}, and this is {name!r}; heads of one model "
            "say nothing of another. Find its own with calibrate_tracker or find_core_heads, or "
            "pass check_model=False where both names are of the same model"
        )


_ROLES: Final = ("system", "user", "assistant", "tool")
_METADATA: Final = "metadata:"


@dataclass(frozen=True)
class FocusReading:
    """Focus score of one call, with the attention of each head."""

    shares: NDArray[np.float64]
    """(heads,) share of the attention to instruction and data that goes to the instruction."""
    instruction: tuple[Span, ...]
    data: tuple[Span, ...]
    rate: float | None = None
    """False positive rate of the list's threshold; None where that does not act."""

    @property
    def focus(self) -> float:
        """Focus score: the mean of the shares, in [0, 1]; low where the data draw attention."""
        return float(self.shares.mean())

    @property
    def value(self) -> float:
        """1 minus the focus score: larger means more like an injection."""
        return 1.0 - self.focus


@dataclass(frozen=True)
class TrackerReader:
    """Reads the focus score of a call from its queries and keys; made before any sample runs."""

    heads: AttentionHeads | None
    """None reads every head that was captured."""
    instruction: str = "system"
    data: str = "user"
    tokenizer: str | None = None
    check_model: bool = True
    """Refuse a model of another name than that of the list."""

    def __post_init__(self) -> None:
        for field, value in (("instruction", self.instruction), ("data", self.data)):
            if value not in _ROLES and not value.startswith(_METADATA):
                raise SpecError(
                    f"{field}={value!r}; allowed are the roles {', '.join(_ROLES)}, and "
                    "metadata:KEY for a text in the sample's metadata"
                )
        if self.instruction == self.data:
            raise SpecError(f"data={self.data!r}: instruction and data have to be different texts")

    def read_captured(
        self,
        output: ModelOutput,
        messages: Sequence[ChatMessage],
        *,
        metadata: Mapping[str, Any] | None = None,
        model_name: str | None = None,
    ) -> FocusReading:
        """Read one call of these messages; it reads files, so not in an event loop."""
        if self.check_model and self.heads is not None and model_name is not None:
            check_model_of(self.heads, model_name)
        captured = read_queries_keys(output)
        pieces = prompt_pieces(output, model_name, self.tokenizer, "attention tracker")
        instruction = self._spans(self.instruction, "instruction", pieces, messages, metadata)
        data = self._spans(self.data, "data", pieces, messages, metadata)
        heads = captured.all_heads() if self.heads is None else self.heads.heads
        shares = instruction_shares(captured, heads, instruction, data, query=len(pieces) - 1)
        return FocusReading(shares, instruction, data)

    def _spans(
        self,
        kind: str,
        field: str,
        pieces: Sequence[str],
        prompt: Sequence[ChatMessage],
        metadata: Mapping[str, Any] | None,
    ) -> tuple[Span, ...]:
        what = f"{field}={kind!r}"
        if kind in _ROLES:
            # All messages, in their order, so that one that quotes another is not taken for it.
            found = find_texts(pieces, [message.text for message in prompt])
            pairs = zip(prompt, found, strict=True)
            spans = [
                require_span(span, what)
                for message, span in pairs
                if message.role == kind and message.text.strip()
            ]
        else:
            text = (metadata or {}).get(kind.removeprefix(_METADATA))
            wanted = [text] if isinstance(text, str) else []
            spans = [require_span(span, what) for span in find_texts(pieces, wanted)]
        if not spans:
            raise ArtifactError(
                f"{what}: this sample has no such text; name the role of its messages, or a key of "
                "its metadata with metadata:KEY"
            )
        return tuple(spans)


def calibrate_tracker(
    log: EvalLog,
    *,
    label: str = "label",
    n_std: float = 4.0,
    instruction: str = "system",
    data: str = "user",
    tokenizer: str | None = None,
) -> AttentionHeads:
    """Find the important heads of a model in a log of a handful of normal and attacked prompts.

    Args:
        log: whose samples captured queries and keys of the layers that may hold them, such as
            all: `config=lens_config(qk=True, max_tokens=1)`.
        label: key of the sample metadata that is 1 or true for an attacked prompt.
        n_std: standard deviations by which a head's attention has to fall; see
            `find_tracker_heads`.
        instruction: role of the messages that instruct, or `metadata:KEY` for a text that the
            sample's metadata has.
        data: the same of the messages that bring data, such as `tool`.
        tokenizer: folder or name of the model's tokenizer; that of the log's model by default.

    Returns:
        The heads, without a threshold; set one on other normal prompts, with the values of the
        scorer `attention_tracker` and `inspect_lens.train.fit_threshold`.

    Raises:
        ArtifactError: a sample captured nothing, a text does not stand in the prompt, or no
            tokenizer is on this machine.
        SpecError: a sample without label, layers that differ, too few prompts of a kind, or no
            head that falls by more than it varies.

    Source:
        Hung et al. 2024, arXiv:2411.00348.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.solver import generate

        from evals.prompt_injection import injection_dataset
        from inspect_lens.model import lens_config
        from inspect_lens.reading import calibrate_tracker

        plain_and_injected = injection_dataset(part="calibration", conditions=["plain", "injected"])
        config = lens_config(qk=True, max_tokens=1)
        task = Task(plain_and_injected, solver=generate(), config=config)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint")
        heads = calibrate_tracker(log, n_std=1.0)
        heads.save("heads/mine.json")
        assert heads.found.n_samples == {"normal": 30, "attack": 30}
        ```
    """
    if log.location:
        know_log(log.location)
    reader = TrackerReader(None, instruction, data, tokenizer)
    shares: dict[bool, list[NDArray[np.float64]]] = {False: [], True: []}
    heads: tuple[Head, ...] | None = None
    for sample in log.samples or []:
        found = sample.metadata.get(label)
        if (mark := label_of(found)) is None:
            raise SpecError(
                f"label={label!r}: sample {sample.id} has {found!r} there; allowed are {LABELS}"
            )
        own = read_queries_keys(sample.output).all_heads()
        if heads is not None and own != heads:
            raise SpecError(
                f"log: sample {sample.id} captured other layers than those before it; capture the "
                "same in all"
            )
        heads = own
        answer = sample.output.message.id if sample.output.choices else None
        prompt = [m for m in sample.messages if answer is None or m.id != answer]
        reading = reader.read_captured(
            sample.output, prompt, metadata=sample.metadata, model_name=log.eval.model
        )
        shares[mark].append(reading.shares)
    empty = np.empty((0, len(heads or ())))
    normal, attack = (np.stack(rows) if rows else empty for rows in (shares[False], shares[True]))
    return find_tracker_heads(
        normal, attack, heads or (), n_std=n_std, model=bare_name(log.eval.model),
        data=log.eval.dataset.name or log.eval.task,
    )  # fmt: skip


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
    """Reads how relevant documents are from two calls: with the query, and with an empty one."""

    heads: AttentionHeads
    documents: str = "documents"
    """Key of the sample's metadata with the texts of the documents, in the prompt's order."""
    query: str = "query"
    """Key of the sample's metadata with the text of the query, which stands behind them."""
    empty: str = "N/A"
    """Text that stands in the place of the query in the second call, without outer spaces."""
    tokenizer: str | None = None
    check_model: bool = True
    """Refuse a model of another name than that of the list."""

    def __post_init__(self) -> None:
        if not self.empty.strip():
            raise SpecError(
                f"empty={self.empty!r}; allowed is a text that asks nothing, such as 'N/A'"
            )
        object.__setattr__(self, "empty", self.empty.strip())

    def without_query(
        self, messages: Sequence[ChatMessage], metadata: Mapping[str, Any] | None
    ) -> list[ChatMessage]:
        """The prompt of the second call: the same with `empty` in the place of the query."""
        query = self._query(metadata)
        changed = list(messages)
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
        """Read both calls; it reads files and multiplies rows, so not in an event loop."""
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
        spans = tokens_at(asked, at, at + len(query)), tokens_at(blank, at, at + len(self.empty))
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
