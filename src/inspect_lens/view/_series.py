"""From probes and captured rows to token scores, and from what was kept where rows are not here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import ChatMessage
from numpy.typing import NDArray

from inspect_lens._base.artifact import with_interval
from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.errors import ArtifactError, NotCapturedError, SpecError
from inspect_lens.model import Activations, ProbeScores, read_probe_scores
from inspect_lens.model._places import may_follow
from inspect_lens.probe import AnyProbe, NeuralProbe, Validity, check_model, found_above, load_probe
from inspect_lens.reading import ProbeReader, TokenScores, read_token_scores
from inspect_lens.reading._rows import pick_rows
from inspect_lens.reading._token_scores import engine_records

from ._page import SampleView, Series


class Source(NamedTuple):
    """A series and the probe that makes it."""

    series: Series
    reader: ProbeReader | None
    """None where the probe is not here and its scores were kept."""

    @property
    def sha256(self) -> str:
        """Of the probe that wrote such scores, restricted to the layers that it read."""
        return self.series.sha256 if self.reader is None else self.reader.probe.sha256


class Scored(NamedTuple):
    """What one series says of one call."""

    scores: NDArray[np.float32]
    """(n_prompt + n_completion,) float32; NaN where a token has no row."""
    value: float | None
    read: NDArray[np.bool_]
    """(n_prompt + n_completion,) the tokens that the probe reads."""


def make_sources(probes: Sequence[AnyProbe], tokenizer: str | None = None) -> list[Source]:
    """One series per probe, and one more for each layer of a probe of several."""
    made = []
    for probe in probes:
        several = len(probe.layers) > 1
        parts = [(None, probe), *((n, probe.at(n)) for n in probe.layers if several)]
        for layer, part in parts:
            limit, read = part.threshold, probe.positions
            finds = found_above(part.card, limit.value) if limit else None
            beside = [
                f"{e.name}: AUROC {with_interval(e.auroc, e.auroc_interval)}; {Validity.of(e)}"
                for e in part.card.evaluations
            ]
            series = Series(
                probe=probe.name, layer=layer, layers=part.layers, sha256=probe.sha256,
                pool=probe.pool, positions=read if isinstance(read, str) else str(list(read)),
                threshold=limit.value if limit else None, fpr=limit.fpr if limit else None,
                description=probe.card.description, neural=isinstance(probe, NeuralProbe),
                finds=str(finds or ""), beside=tuple(beside),
            )  # fmt: skip
            reader = ProbeReader.of(part, source="captured", check_model=False, tokenizer=tokenizer)
            made.append(Source(series, reader))
    return made


def kept_sources(records: Sequence[TokenScores], have: Sequence[Source]) -> list[Source]:
    """Series of probes that are not here, from the token scores that scorers kept."""
    known, names = {s.sha256 for s in have}, {s.series.probe for s in have}
    made = []
    for record in records:
        if record.probe_sha256 in known:
            continue
        known.add(record.probe_sha256)
        series = Series(
            probe=f"{record.probe} (as scored)" if record.probe in names else record.probe,
            layer=None, layers=record.layers, sha256=record.probe_sha256,
            pool=record.pool, positions="as scored", threshold=record.threshold, fpr=None,
            description="",
        )  # fmt: skip
        made.append(Source(series, None))
    return made


def score_call(handle: Activations, source: Source) -> Scored | None:
    """Score every captured token of a call, and pool those that the probe reads.

    Where its value cannot be made here, every token that has a score counts as read.
    """
    if source.reader is None:
        return None
    probe = source.reader.probe
    try:
        rows = pick_rows(handle, probe.layers, probe.site)
    except NotCapturedError:
        return None
    total = handle.n_prompt + handle.n_completion
    scores = np.full(max(total, max(rows.positions, default=-1) + 1), np.nan)
    if len(rows.positions):
        scores[list(rows.positions)] = probe.score_tokens(rows.acts, rows.layers)
    scores = scores[:total].astype(np.float32)
    try:
        found = source.reader.read_captured(handle, model_name=handle.origin.get("model"))
    except ArtifactError:  # not all that it reads was captured, or no tokenizer is here
        return Scored(scores, None, np.isfinite(scores))
    read = np.zeros(total, dtype=np.bool_)
    if found is None:
        return Scored(scores, None, read)
    read[list(found.rows.positions)] = True
    return Scored(scores, found.value, read)


def choose_probes(
    asked: Sequence[str | Path | AnyProbe],
    header: EvalLog,
    first: EvalSample,
    model: str,
    *,
    any_model: bool,
    have_kept: bool = False,
) -> tuple[list[AnyProbe], list[str]]:
    """Load the probes of a page, for a model as Inspect names it."""
    model = model.partition("/")[2].partition(":")[0]
    notes: list[str] = []
    probes = [load_probe(name) for name in asked]
    if not asked:
        probes, notes = _of_log(header, first)
    if not probes and not have_kept:
        raise SpecError(
            "probe: none was given, and the log names none that is here; allowed are a name below "
            f"probes/, a folder or an hf:// address; pass probes=. {' '.join(notes)}".strip()
        )
    for probe in probes:
        if not any_model:
            check_model(probe, model)
        elif probe.card.model and probe.card.model.name != model:
            notes.append(f"{probe.name} was trained on {probe.card.model.name}, not on {model}.")
    return probes, notes


def _of_log(header: EvalLog, first: EvalSample) -> tuple[list[AnyProbe], list[str]]:
    """Load the probes that a log was scored with, and note those that are not here."""
    notes: list[str] = []
    probes: list[AnyProbe] = []
    scored_with = dict(_of_scores(first))
    given = tuple(_of_options(header))
    for name in dict.fromkeys([*given, *scored_with]):
        if name in {p.name for p in probes}:
            continue  # of the card of one that was named by its path
        path = Path(name)
        if ("://" in name or path.is_absolute() or ".." in path.parts) and not may_follow(name):
            notes.append(
                f"The log was scored with {name!r}, which was not fetched: a log may name any "
                f"place; pass it as probes={name}, or allow it with follow={name}."
            )
            continue
        try:
            probe = load_probe(name)
        except ArtifactError as error:
            if name in given or not notes:  # else the card's name of one that was noted
                notes.append(f"The log was scored with {name!r}, which is not here: {error}")
            continue
        wanted = scored_with.get(probe.name)
        if wanted and wanted != probe.sha256:
            notes.append(
                f"The log was scored with another version of {probe.name} "
                f"({wanted[:12]}…, here is {probe.sha256[:12]}…)."
            )
        if probe.sha256 not in {p.sha256 for p in probes}:
            probes.append(probe)
    return probes, notes


def _of_options(header: EvalLog) -> Iterator[str]:
    for scorer in header.eval.scorers or []:
        yield from _names((scorer.options or {}).get("probe"))
        yield from _names((scorer.options or {}).get("probes"))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (v for v in value.values() if isinstance(v, str))
    elif isinstance(value, Sequence):
        yield from (v for v in value if isinstance(v, str))


def _of_scores(sample: EvalSample) -> Iterator[tuple[str, str]]:
    for score in (sample.scores or {}).values():
        facts = score.metadata or {}
        # A dict score has the facts of each part under its key.
        for part in (facts, *(v for v in facts.values() if isinstance(v, Mapping))):
            if isinstance(part.get("probe"), str):
                yield part["probe"], str(part.get("probe_sha256") or "")


_TRIES = 64


class Span(NamedTuple):
    """Tokens `[start, stop)` of one speaker."""

    role: str
    start: int
    stop: int


def find_turns(
    pieces: Sequence[str], messages: Sequence[ChatMessage], special: Sequence[bool] | None = None
) -> list[Span]:
    """Find each message of a prompt among its tokens.

    A message is looked for by its text behind the message before it, as chat templates write
    texts in order and unchanged. Tokens between two texts are the template's: the first closes
    the turn before, the others open the next. What a template changes or leaves out has no turn
    of its own.
    """
    found = _texts_found(pieces, messages, special)
    if not found:
        return [Span("prompt", 0, len(pieces))] if pieces else []
    spans: list[Span] = []
    start = 0
    for i, (which, _, stop) in enumerate(found):
        last = i + 1 == len(found)
        gap = (len(pieces) if last else found[i + 1].start) - stop
        # The token that closes a turn; one that stands alone opens the next one.
        end = stop + 1 if gap > 1 or (last and gap) else stop
        spans.append(Span(messages[which].role, start, end))
        start = end
    if start < len(pieces):
        spans.append(Span("assistant", start, len(pieces)))
    return [span for span in spans if span.stop > span.start]


class _FoundText(NamedTuple):
    """Tokens `[start, stop)` that hold the text of a message."""

    message: int
    """Its place among the messages."""
    start: int
    stop: int


def _texts_found(
    pieces: Sequence[str], messages: Sequence[ChatMessage], special: Sequence[bool] | None
) -> list[_FoundText]:
    """The texts of messages that stand in a prompt, in order and unchanged."""
    ends = list(accumulate(len(piece) for piece in pieces))
    marks = special or [False] * len(pieces)
    text = "".join("\0" * len(p) if mark else p for p, mark in zip(pieces, marks, strict=True))
    found: list[_FoundText] = []
    cursor = 0
    for i, message in enumerate(messages):
        wanted = message.text.strip()
        at = _find(text, wanted, cursor, ends) if wanted else -1
        if at < 0:
            continue
        cursor = at + len(wanted)
        found.append(_FoundText(i, _token_at(ends, at), _token_at(ends, cursor - 1) + 1))
    return found


def template_tokens(
    pieces: Sequence[str], messages: Sequence[ChatMessage], special: Sequence[bool]
) -> list[bool]:
    """Which tokens of a prompt the template wrote around the messages, and nobody else.

    They are names of roles, a system prompt of the template's own, descriptions of tools, and the
    opening of the answer. Nothing is said of what stands beside a message that a template writes
    more of than its text, such as one with tool calls, nor from the first message on whose text is
    not there as it stands: what follows it may have been found inside it.
    """
    marks = list(special)
    found = _texts_found(pieces, messages, special)
    if not found:
        return marks
    placed = {text.message for text in found}
    said = (i for i, message in enumerate(messages) if message.text.strip())
    missed = next((i for i in said if i not in placed), len(messages) + 1)
    whole = [not _has_more(message) for message in messages]
    before = _FoundText(-1, 0, 0)
    for text in [*found, _FoundText(len(messages), len(pieces), len(pieces))]:
        if text.message > missed:
            break
        sides = [whole[i] for i in (before.message, text.message) if 0 <= i < len(messages)]
        if text.message == before.message + 1 and all(sides):
            marks[before.stop : text.start] = [True] * (text.start - before.stop)
        before = text
    return marks


def _has_more(message: ChatMessage) -> bool:
    """Whether a template writes more of a message than its text: thoughts, calls, images."""
    return not isinstance(message.content, str) or bool(getattr(message, "tool_calls", None))


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _find(text: str, wanted: str, start: int, ends: Sequence[int]) -> int:
    """Where a text stands: first where it is whole tokens, else where it is at all."""
    first = at = text.find(wanted, start)
    for _ in range(_TRIES):
        if at < 0:
            break
        stop = at + len(wanted)
        head, tail = _token_at(ends, at), _token_at(ends, stop - 1)
        before = text[ends[head - 1] if head else 0 : at]
        # A short text such as "a" is also found in the middle of a role's name.
        if not before.strip() and not text[stop : ends[tail]].strip():
            return at
        at = text.find(wanted, at + 1)
    return first


def _token_at(ends: Sequence[int], character: int) -> int:
    return min(bisect_right(ends, character), len(ends) - 1)


def split_call(
    pieces: Sequence[str],
    messages: Sequence[ChatMessage],
    special: Sequence[bool] | None,
    n_prompt: int,
) -> list[Span]:
    """Turns of a prompt, and the completion with the template's opening of it."""
    spans = [Span("prompt", 0, n_prompt)] if n_prompt else []
    if special is not None:
        spans = find_turns(pieces[:n_prompt], messages, special)
    begin = n_prompt
    last = spans[-1] if spans else None
    asked = messages[-1].role if messages else ""
    if last is not None and last.role == "assistant" and (asked != "assistant" or special is None):
        begin = last.start
        spans = spans[:-1]
    return [*spans, Span("assistant", begin, len(pieces))] if len(pieces) > begin else spans


_TEXT = -1
"""Id and position of what is shown as text, because its tokens are not known."""
_GAP = " … "


@dataclass
class SavedScores:
    """The token scores that scorers and the engine kept of a sample, by the message of the call."""

    records: dict[str, list[TokenScores]] = field(default_factory=dict)
    scores: dict[str, ProbeScores] = field(default_factory=dict)
    """What probes in the engine said, which knows every token of the call."""
    lost: list[str] = field(default_factory=list)
    """Addresses of files that the log refers to and that are not here, or are damaged."""

    def of(self, message_id: str | None) -> list[TokenScores]:
        """What was kept of the call that wrote a message."""
        return self.records.get(message_id or "", [])

    def all(self) -> list[TokenScores]:
        """Every record."""
        return [record for records in self.records.values() for record in records]


def read_saved(sample: EvalSample) -> SavedScores:
    """Find the token scores of a sample; a file that is not here is noted, and is no error."""
    kept = SavedScores()
    for name, score in (sample.scores or {}).items():
        reference = (score.metadata or {}).get("token_scores")
        if not isinstance(reference, Mapping):
            continue
        try:
            found = read_token_scores(reference)
        except ArtifactError:
            kept.lost.append(str(reference.get("uri")))
            continue
        for record in found:
            if record.message_id:
                known = kept.records.setdefault(record.message_id, [])
                known.append(replace(record, scorer=name))
    for call in read_probe_scores(sample):
        if call.message_id is None or not call.scores.is_here:
            continue
        kept.scores[call.message_id] = call.scores
        known = kept.records.setdefault(call.message_id, [])
        have = {record.probe_sha256 for record in known}
        more = engine_records(call.scores, message_id=call.message_id)
        known += [replace(r, scorer="the engine") for r in more if r.probe_sha256 not in have]
    return kept


def saved_call(records: Sequence[TokenScores], source: Source, size: int) -> Scored | None:
    """What scorers kept of one series."""
    own = [record for record in records if record.probe_sha256 == source.sha256]
    if not own:
        return None
    scores = np.full(size, np.nan, dtype=np.float32)
    for record in own:
        inside = record.positions < size
        scores[record.positions[inside]] = record.scores[inside]
    return Scored(scores, own[0].value, np.isfinite(scores))


class CallLayout(NamedTuple):
    """A call as far as it is known: texts of messages, and tokens where a scorer read them."""

    ids: list[int]
    positions: list[int]
    """In the call; -1 for text."""
    tokens: list[str]
    turns: list[Span]
    n_prompt: int
    n_completion: int


def lay_out(
    records: Sequence[TokenScores],
    texts: TokenTexts,
    *,
    messages: Sequence[ChatMessage],
    said: str,
    handle: Activations | None,
) -> CallLayout:
    """Lay out a call of which not every token is known.

    The prompt stands as the texts of its messages, with the tokens of it that a scorer read behind
    them; the completion has its tokens, and what is behind them as text.
    """
    ids = {int(p): _TEXT for record in records for p in record.positions}
    for record in records:
        ids |= dict(zip(record.positions.tolist(), record.token_ids.tolist(), strict=False))
    n_prompt = handle.n_prompt if handle else (records[0].n_prompt if records else 0)
    row: list[tuple[int, int, str]] = []  # id, position, text
    turns: list[Span] = []

    def add(role: str, items: list[tuple[int, int, str]]) -> None:
        if items:
            turns.append(Span(role, len(row), len(row) + len(items)))
            row.extend(items)

    for message in messages:
        add(message.role, [(_TEXT, _TEXT, message.text)] if message.text else [])
    add(
        "prompt, tokens that were scored",
        list(_pieces([p for p in ids if p < n_prompt], ids, texts)),
    )
    completion = list(_pieces([p for p in ids if p >= n_prompt], ids, texts))
    shown = "".join(text for _, _, text in completion)
    rest = said[len(shown) :] if said.startswith(shown) else "" if completion else said
    add("assistant", [*completion, *([(_TEXT, _TEXT, rest)] if rest else [])])
    count = handle.n_completion if handle else len(completion) + 1
    return CallLayout(
        [i for i, _, _ in row], [p for _, p, _ in row], [t for _, _, t in row], turns,
        n_prompt, count,
    )  # fmt: skip


def _pieces(
    positions: Sequence[int], ids: Mapping[int, int], texts: TokenTexts
) -> Iterator[tuple[int, int, str]]:
    """Tokens in order, with a mark where some are left out; without an id, by their position."""
    ordered = sorted(positions)
    known = iter(texts.texts([ids[p] for p in ordered if ids[p] != _TEXT]))
    for before, position in zip(
        [ordered[0] - 1, *ordered] if ordered else [], ordered, strict=False
    ):
        if before != position - 1:
            yield _TEXT, _TEXT, _GAP
        yield ids[position], position, next(known) if ids[position] != _TEXT else f"⟨{position}⟩"


def origin_notes(samples: Sequence[SampleView]) -> list[str]:
    """What a page says of activations that are not here."""
    calls = [call for sample in samples for call in sample.calls]
    never = sum(not call.captured for call in calls)
    kept = sum(call.origin == "kept" for call in calls) - never
    gone = sum(call.origin == "none" for call in calls)
    scorers = ", ".join(dict.fromkeys(name for sample in samples for name in sample.kept_by))
    colours = (
        f"Their colours are the token scores that {scorers} kept beside the log, so you see only "
        "the probes and tokens that it scored."
    )
    notes = []
    if never:
        notes.append(f"{never} of {len(calls)} calls captured no activations. {colours}")
    if kept:
        notes.append(f"The activations of {kept} of {len(calls)} calls are not here. {colours}")
    if gone:
        lost = next((sample.lost for sample in samples if sample.lost), "")
        why = f"the file {lost} is not here either" if lost else "no scorer kept their token scores"
        notes.append(
            f"The activations of {gone} of {len(calls)} calls are not here, and {why}: they are "
            "shown as text, without colours."
        )
    if kept or gone:
        notes.append(
            "With the .lens folder of the log beside it, or INSPECT_LENS_DIR set to the folder "
            "that holds it, every captured token has a colour."
        )
    return notes
