"""From a log to samples with token scores, one sample in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalLog, EvalSample, read_eval_log, read_eval_log_samples
from inspect_ai.model import ChatCompletionChoice, ChatMessage
from numpy.typing import NDArray

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.model import Activations, ProbeScores, activations
from inspect_lens.model._places import judging_log
from inspect_lens.model._read import given_output
from inspect_lens.reading import TokenScores, given_length

from ._page import CallView, SampleView, TurnView
from ._series import (
    SavedScores,
    Source,
    lay_out,
    read_saved,
    saved_call,
    score_call,
    shared_prefix,
    split_call,
    template_tokens,
)

_PREVIEW = 240
_TEXT = 80


class OpenLog(NamedTuple):
    """A log whose samples have not been read yet."""

    header: EvalLog
    location: str
    samples: Callable[[], Iterator[EvalSample]]
    total: int


class _Call(NamedTuple):
    """One model call of the log."""

    messages: Sequence[ChatMessage]
    choice: ChatCompletionChoice
    handle: Activations | None
    """None where it captured nothing and a scorer kept token scores all the same."""
    written: int | None = None
    """Tokens of an answer that was read; behind them stands one that nobody wrote."""
    scores: ProbeScores | None = None
    """What probes in the engine said of it."""
    model: str | None = None
    """Who made it, as Inspect names models; None where no event tells."""


class ModelTexts:
    """Texts of tokens by the model that made a call; a log has several where calls have roles."""

    def __init__(self, model: str, tokenizer: str | None) -> None:
        self.model = model
        """Whose texts stand where no model is named."""
        self._tokenizer = tokenizer
        self._texts: dict[str, TokenTexts] = {}

    def of(self, model: str | None) -> TokenTexts:
        """Texts of one model."""
        name = model or self.model
        if name not in self._texts:
            self._texts[name] = TokenTexts.of(name, tokenizer=self._tokenizer)
        return self._texts[name]

    @property
    def notes(self) -> list[str]:
        """Why texts of a model that was asked for are not known."""
        return list(dict.fromkeys(texts.note for texts in self._texts.values() if texts.note))


class _Ids(NamedTuple):
    """Token ids of a call."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    n_completion: int
    """Sampled tokens; a scorer never reads the last one."""


class _Part(NamedTuple):
    """The tokens of a call that were not shown with the call before."""

    view: CallView
    ids: list[int]
    tokens: list[str]
    special: list[bool]
    scores: NDArray[np.float32]
    """(series, tokens of the call), with those that stand in the call before."""
    read: NDArray[np.bool_]
    """(series, tokens of the call)."""
    whole: tuple[int, ...]
    """Every token of the call; empty where not all are known."""


def open_log(log: EvalLog | str) -> OpenLog:
    """Open a log."""
    if isinstance(log, EvalLog):
        held = log.samples or []
        return OpenLog(log, log.location, lambda: iter(held), len(held))
    with judging_log(log):
        header = read_eval_log(log, header_only=True)
    total = header.results.total_samples if header.results else header.eval.dataset.samples or 0
    if not log.endswith(".eval"):  # a JSON log is one piece
        with judging_log(log):
            whole = read_eval_log(log, resolve_attachments="full")
        held = whole.samples or []
        return OpenLog(whole, log, lambda: iter(held), len(held))

    def samples() -> Iterator[EvalSample]:
        read = read_eval_log_samples(
            log, all_samples_required=False, resolve_attachments="full", exclude_fields={"store"}
        )
        while True:
            with judging_log(log):
                sample = next(read, None)
            if sample is None:
                return
            yield sample

    return OpenLog(header, log, samples, total)


def model_shown(sample: EvalSample, kept: SavedScores, opened: OpenLog) -> str:
    """The model whose calls a page shows, by those of its first sample."""
    found = (call.model for call in _calls(sample, kept, opened.location))
    return next(filter(None, found), opened.header.eval.model)


def read_sample(
    sample: EvalSample, sources: Sequence[Source], known: ModelTexts, *, location: str
) -> SampleView:
    """Score every captured call; one whose activations are not here has what scorers kept."""
    kept = read_saved(sample)
    parts: list[_Part] = []
    before: tuple[int, ...] = ()
    said: list[ChatMessage] = []
    start = 0
    for call in _calls(sample, kept, location):
        records = kept.of(call.choice.message.id)
        ids, texts = _ids_of(call, records), known.of(call.model)
        if ids is not None:
            part = _read_call(call, ids, records, sources, texts, before=before, start=start)
        else:
            new = [m for m in call.messages if m.id is None or m.id not in {o.id for o in said}]
            part = _lay_out(call, records, sources, texts, messages=new, start=start)
        parts.append(part)
        start += len(part.ids)
        before = part.whole
        said = [*call.messages, call.choice.message]
    if parts and parts[-1].whole and parts[-1].view.origin == "kept":
        parts[-1] = _with_end(parts[-1], said[-1].text)
    scores, read = _joined(parts, len(sources))
    return SampleView(
        id=str(sample.id),
        epoch=sample.epoch,
        label=(sample.metadata or {}).get("label"),
        target=_short(sample.target if isinstance(sample.target, str) else ", ".join(sample.target),
                      _TEXT),
        preview=_preview(sample),
        scores=_scores(sample),
        calls=[part.view for part in parts],
        token_ids=np.array([i for part in parts for i in part.ids], dtype=np.int64),
        tokens=[text for part in parts for text in part.tokens],
        special=np.array([flag for part in parts for flag in part.special], dtype=bool),
        token_scores=scores, read=read,
        kept_by=tuple(dict.fromkeys(r.scorer for r in kept.all() if r.scorer)),
        lost=kept.lost[0] if kept.lost else "",
    )  # fmt: skip


def _joined(parts: Sequence[_Part], n_series: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Scores of all tokens of a sample, (series, tokens), and which of them were read."""
    total = sum(len(part.ids) for part in parts)
    scores = np.full((n_series, total), np.nan, np.float32)
    read = np.zeros((n_series, total), np.bool_)
    # Where the tokens of the latest call stand in the sample.
    at = np.zeros(0, np.int64)
    start = 0
    for part in parts:
        stop = start + len(part.ids)
        at = np.concatenate([at[: part.view.folded], np.arange(start, stop)])
        # A call never reads its own last token; the call after it does.
        scores[:, at] = np.where(np.isnan(scores[:, at]), part.scores, scores[:, at])
        read[:, at] |= part.read
        start = stop
    return scores, read


def _calls(sample: EvalSample, kept: SavedScores, location: str) -> Iterator[_Call]:
    """Captured calls; the output of a sample too, where no call of the log made it."""
    seen: set[str] = set()
    for event in sample.events:
        given = given_output(event)
        output = event.output if isinstance(event, ModelEvent) else given
        if output is None:
            continue
        for index, choice in enumerate(output.choices):
            source = output if index == 0 else choice.message.metadata
            handle = activations(source, log=location)
            if handle is not None or kept.of(choice.message.id):
                seen |= {handle.sha256 if handle else "", choice.message.id or ""}
                if isinstance(event, ModelEvent):
                    scores = kept.scores.get(choice.message.id or "")
                    yield _Call(event.input, choice, handle, scores=scores, model=event.model)
                else:
                    yield _Call(_before(sample, choice), choice, handle, given_length(output))
    handle = activations(sample.output, log=location)
    for last in sample.output.choices[:1]:
        if last.message.id in seen or (handle is not None and handle.sha256 in seen):
            continue
        if handle is not None or kept.of(last.message.id):
            before = [m for m in sample.messages if m.id != last.message.id]
            scores = kept.scores.get(last.message.id or "")
            yield _Call(before, last, handle, given_length(sample.output), scores)


def _before(sample: EvalSample, choice: ChatCompletionChoice) -> list[ChatMessage]:
    """The messages in front of an answer that was read; of raw text, what it is."""
    found = next((i for i, m in enumerate(sample.messages) if m.id == choice.message.id), 1)
    return sample.messages[:found]


def _ids_of(call: _Call, records: Sequence[TokenScores]) -> _Ids | None:
    """Token ids of a call: of its activations, or of scorers that read every token of it."""
    handle = call.handle
    if handle is not None and handle.is_here:
        written = handle.token_ids[: call.written]
        return _Ids(handle.prompt_token_ids, written, handle.n_completion)
    if call.scores is not None:
        scores = call.scores
        ids = tuple(scores.token_ids)[: call.written]
        return _Ids(tuple(scores.prompt_token_ids), ids, scores.n_completion)
    known = {
        int(p): int(i) for r in records for p, i in zip(r.positions, r.token_ids, strict=False)
    }
    if not records or sorted(known) != list(range(len(known))) or len(known) < records[0].n_prompt:
        return None
    ids, n = tuple(known[p] for p in range(len(known))), records[0].n_prompt
    return _Ids(ids[:n], ids[n:], handle.n_completion if handle else len(ids) - n + 1)


def _read_call(
    call: _Call,
    ids: _Ids,
    records: Sequence[TokenScores],
    sources: Sequence[Source],
    texts: TokenTexts,
    *,
    before: tuple[int, ...],
    start: int,
) -> _Part:
    prompt, completion, handle = ids.prompt, ids.completion, call.handle
    whole = (*prompt, *completion)
    folded = shared_prefix(before, prompt)
    said = call.choice.logprobs
    logged = [entry.token for entry in said.content][: len(completion)] if said else []
    pieces = texts.texts(prompt) + texts.texts(completion, logged)
    here = handle is not None and handle.is_here
    scored = [
        (score_call(handle, source) if here and handle else None)
        or saved_call(records, source, len(whole))
        for source in sources
    ]
    scores = np.full((len(sources), len(whole)), np.nan, np.float32)
    read = np.zeros(scores.shape, np.bool_)
    for k, found in enumerate(scored):
        if found is not None:
            scores[k], read[k] = found.scores[: len(whole)], found.read[: len(whole)]
    shown_apart = texts.special(whole)
    marks = shown_apart[: len(prompt)] if texts.is_known else None
    if marks is not None:
        shown_apart[: len(prompt)] = template_tokens(pieces[: len(prompt)], call.messages, marks)
    shift = start - folded
    turns = tuple(
        TurnView(role, max(a, folded) + shift, b + shift, generated=b > len(prompt))
        for role, a, b in split_call(pieces, call.messages, marks, len(prompt))
        if b > folded
    )
    view = CallView(
        start=start, folded=folded, n_prompt=len(prompt), n_completion=ids.n_completion,
        values=tuple(None if s is None else s.value for s in scored), turns=turns,
        origin="activations" if here else "kept", captured=handle is not None,
    )  # fmt: skip
    return _Part(
        view, list(whole[folded:]), pieces[folded:], shown_apart[folded:], scores, read, whole
    )  # fmt: skip


def _with_end(part: _Part, said: str) -> _Part:
    """The last call with the text of its last token, which no scorer reads."""
    turns, start = part.view.turns, part.view.start
    turn = slice(turns[-1].start - start, None)
    words = zip(part.tokens[turn], part.special[turn], strict=True)
    shown = "".join(text for text, is_mark in words if not is_mark)
    if not said.startswith(shown) or said == shown:
        return part
    last = replace(turns[-1], stop=turns[-1].stop + 1)
    column = np.full((len(part.scores), 1), np.nan, np.float32)
    return part._replace(
        view=replace(part.view, turns=(*turns[:-1], last)), ids=[*part.ids, -1],
        tokens=[*part.tokens, said[len(shown) :]], special=[*part.special, False],
        scores=np.concatenate([part.scores, column], axis=1),
        read=np.concatenate([part.read, np.zeros(column.shape, np.bool_)], axis=1),
    )  # fmt: skip


def _lay_out(
    call: _Call,
    records: Sequence[TokenScores],
    sources: Sequence[Source],
    texts: TokenTexts,
    *,
    messages: Sequence[ChatMessage],
    start: int,
) -> _Part:
    layout = lay_out(
        records, texts, messages=messages, said=call.choice.message.text, handle=call.handle
    )
    size = max((p for p in layout.positions), default=-1) + 1
    scored = [saved_call(records, source, size) for source in sources]
    at = np.array(layout.positions, dtype=np.int64)
    scores = np.full((len(sources), len(at)), np.nan, np.float32)
    for k, found in enumerate(scored):
        if found is not None:
            scores[k, at >= 0] = found.scores[at[at >= 0]]
    view = CallView(
        start=start, folded=0, n_prompt=layout.n_prompt, n_completion=layout.n_completion,
        values=tuple(None if s is None else s.value for s in scored),
        turns=tuple(
            TurnView(role, a + start, b + start, generated=role == "assistant" and b == len(at))
            for role, a, b in layout.turns
        ),
        origin="kept" if records else "none", captured=call.handle is not None,
        positions=tuple(layout.positions),
    )  # fmt: skip
    return _Part(
        view, layout.ids, layout.tokens, texts.special(layout.ids), scores, np.isfinite(scores), ()
    )


def _scores(sample: EvalSample) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, score in (sample.scores or {}).items():
        value = score.value
        parts = value if isinstance(value, dict) else {"": value}
        for key, part in parts.items():
            made[f"{name}.{key}" if key else name] = _plain(part)
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return _short(str(value), _TEXT)


def _preview(sample: EvalSample) -> str:
    """What was asked last, and what was answered, for the list and its search."""
    asked = sample.input if isinstance(sample.input, str) else ""
    if not isinstance(sample.input, str):
        asked = next((m.text for m in reversed(sample.input) if m.role == "user"), "")
    said = sample.output.completion if sample.output else ""
    return f"{_short(asked, _PREVIEW)}\n{_short(said, _PREVIEW)}"


def _short(text: str, limit: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"
