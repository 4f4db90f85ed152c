"""From what a scorer or an analyst has in hand to the activations behind it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from inspect_ai.event import Event, InfoEvent, ModelEvent
from inspect_ai.log import EvalLog, EvalSample, list_eval_logs, transcript
from inspect_ai.model import ChatMessage, ModelOutput

from inspect_lens._intake import absolute, join, parent, write_file
from inspect_lens.errors import ArtifactError
from inspect_lens.spec import Receipt, read_as

from ._handle import MEMORY, MESSAGES, Activations
from ._host import when_log_is_read
from ._places import (
    MessageIndex,
    Place,
    find,
    judge_digest,
    know_log,
    know_root,
    place_for,
    place_of,
    read_log,
)
from ._scores import SCORED_MESSAGES, ProbeScores

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CapturedCall",
    "ScoredCall",
    "activations",
    "activations_df",
    "activations_for",
    "probe_scores",
    "read_activations",
    "read_probe_scores",
    "receipt",
    "resident_activation_bytes",
]


GIVEN_TOKENS = "given_tokens"
"""Key of `output.metadata` with the number of tokens of an answer that was read."""
_SOURCE = "inspect_lens/read_given"


def record_given(output: ModelOutput, handle: Activations, *, n_tokens: int) -> None:
    """Attach activations to an answer that was read, and write it into the transcript."""
    output.metadata = {"activations": handle, GIVEN_TOKENS: n_tokens}
    # Whoever has the message alone finds them, too.
    output.message.metadata = {"activations": handle}
    transcript().info(
        {
            "model": output.model,
            "message_id": output.message.id,
            "completion": output.completion,
            GIVEN_TOKENS: n_tokens,
            "activations": handle.model_dump(mode="json"),
        },
        source=_SOURCE,
    )


def given_output(event: Event) -> ModelOutput | None:
    """The output that an event of `record_given` tells of."""
    if not isinstance(event, InfoEvent) or event.source != _SOURCE:
        return None
    facts = event.data
    if not isinstance(facts, dict):
        return None
    message_id = str(facts["message_id"])
    reference = facts["activations"]
    handle = MESSAGES.get(message_id)
    if handle is None:
        handle = Activations.from_reference(reference if isinstance(reference, dict) else {})
    output = ModelOutput.from_content(model=str(facts["model"]), content=str(facts["completion"]))
    output.message.id = message_id
    output.metadata = {"activations": handle, GIVEN_TOKENS: facts[GIVEN_TOKENS]}
    return output


class _ReadLogs:
    """Logs that Inspect has read in this process, as long as somebody holds them."""

    def __init__(self) -> None:
        self._logs: dict[int, weakref.ref[EvalLog]] = {}
        self._events: dict[int, dict[str | None, list[Event]]] = {}
        """Of logs that were asked for a message, by the id of the message."""

    def add(self, location: str, found: EvalLog | EvalSample) -> None:
        know_log(location)
        if isinstance(found, EvalLog):
            key = id(found)
            self._logs[key] = weakref.ref(found, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._logs.pop(key, None)
        self._events.pop(key, None)

    def events(self, message_id: str) -> list[Event]:
        """Calls that wrote a message, of the log that was read last."""
        for key, log in reversed([*self._logs.items()]):
            if key not in self._events and (found := log()) is not None:
                by_id = self._events[key] = {}
                for event in (event for sample in found.samples or () for event in sample.events):
                    for written in message_ids(event):
                        by_id.setdefault(written, []).append(event)
            if events := self._events.get(key, {}).get(message_id):
                return events
        return []


_READ_LOGS = _ReadLogs()
when_log_is_read(_READ_LOGS.add)


def message_ids(event: Event) -> list[str | None]:
    """Ids of the messages that a call wrote, in the order of its choices."""
    if isinstance(event, ModelEvent):
        return [choice.message.id for choice in event.output.choices]
    facts = event.data if isinstance(event, InfoEvent) and event.source == _SOURCE else None
    return [str(facts["message_id"])] if isinstance(facts, dict) else []


def events_of(message_id: str) -> list[Event]:
    """The calls that wrote a message: of the sample that runs or is scored, or of a log."""
    here = [event for event in transcript().events if message_id in message_ids(event)]
    return here or _READ_LOGS.events(message_id)


H = TypeVar("H", Activations, ProbeScores)


@dataclass(frozen=True)
class _Kind(Generic[H]):
    """One kind of handle, in the metadata of outputs and messages."""

    handle: type[H]
    known: MessageIndex[H]
    """Handles of this process."""

    def of(self, source: Any) -> H | None:
        """The handle of one call."""
        found = source.output if isinstance(source, ModelEvent) else source
        if isinstance(found, ModelOutput):
            found = found.metadata
        if isinstance(found, Mapping) and "$lens" not in found:
            # An event, an output or metadata as plain data: one level down, until there is none.
            inner = next(
                (n for n in (self.handle.METADATA, "output", "metadata") if n in found), None
            )
            return None if inner is None else self.of(found[inner])
        if found is None or isinstance(found, self.handle):
            return found
        return self.handle.from_reference(found)

    def of_message(self, message: ChatMessage | str) -> H | None:
        """The handle of the call that wrote a message."""
        message_id = message if isinstance(message, str) else message.id
        own = {} if isinstance(message, str) else message.metadata or {}
        if self.handle.METADATA in own:
            return self.of(own)
        if message_id is None:
            return None
        if (handle := self.known.get(message_id)) is not None:
            return handle
        # A fresh process that scores a log has its events, and no memory of the calls.
        found = self.calls(events_of(message_id))
        return next((handle for id_, handle in found if id_ == message_id), None)

    def calls(self, events: Iterable[Any]) -> Iterator[tuple[str | None, H]]:
        """Each choice of a call that has a handle, by the id of its message."""
        for event in events:
            output = event.output if isinstance(event, ModelEvent) else given_output(event)
            for index, choice in enumerate(output.choices if output is not None else ()):
                handle = self.of(output if index == 0 else choice.message.metadata)
                if handle is not None:
                    yield choice.message.id, handle


_CAPTURED = _Kind(Activations, MESSAGES)
_SCORED = _Kind(ProbeScores, SCORED_MESSAGES)


class CapturedCall(NamedTuple):
    """A logged model call with captured activations."""

    sample_id: str | int | None
    epoch: int | None
    message_id: str | None
    activations: Activations


def activations(
    source: Activations | ModelOutput | ModelEvent | Mapping[str, Any] | None,
    *,
    log: str | None = None,
) -> Activations | None:
    """Get the activations of one model call, live or from a log.

    Args:
        source: the output, its model event, its metadata, or any of these as plain data.
        log: address of the log that it stands in, so that files are found beside a log that
            was moved.

    Returns:
        The handle, or None when the call captured nothing.

    Raises:
        ArtifactError: what stands there is not a reference of ours.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.model import activations

        sample = read_eval_log("logs/honesty.eval").samples[0]
        handle = activations(sample.output, log="logs/honesty.eval")
        assert handle.layers == (3, 4, 5)
        assert handle.numpy().shape == (3, handle.n_prompt + handle.n_completion - 1, 256)
        ```
    """
    if log is not None:
        know_log(log)
    return _CAPTURED.of(source)


def activations_for(message: ChatMessage | str) -> Activations | None:
    """Get the activations of the call that produced a message.

    Works where only messages are at hand: agents, monitors, and scorers of a reloaded log. Of a
    log that `read_eval_log` has read it knows the messages as long as you hold the log.

    Args:
        message: assistant message, or its id.

    Returns:
        The handle, or None when the message's call captured nothing or is not known here.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
        from inspect_ai.solver import TaskState

        from inspect_lens.model import activations_for


        @scorer(metrics=[mean()])
        def tokens_read() -> Scorer:
            async def count(state: TaskState, target: Target) -> Score:
                handle = activations_for(state.messages[-1])
                return Score(value=0 if handle is None else len(handle.positions))

            return count


        log = score(read_eval_log("logs/honesty.eval"), tokens_read(), action="overwrite")
        assert log.samples[0].scores["tokens_read"].value > 0
        ```
    """
    return _CAPTURED.of_message(message)


def receipt(source: ModelOutput | ModelEvent | Mapping[str, Any]) -> Receipt | None:
    """Get the receipt of a model call: what the engine captured and how it steered.

    Args:
        source: the output, its model event, its metadata, or any of these as plain data.

    Returns:
        The receipt, or None for a call without the lens or a server that gives none.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_config, receipt


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            output = await model.generate("Where is Velosh?", config=lens_config(capture=[4]))
            assert receipt(output).capture.layers == (4,)


        anyio.run(main)
        ```
    """
    handle = activations(source)
    if handle is not None:
        return handle.receipt
    if isinstance(source, ModelEvent):
        source = source.output
    metadata = source.metadata if isinstance(source, ModelOutput) else source
    found = (metadata or {}).get("inspect_lens")
    return None if found is None else read_as(Receipt, found, at="inspect_lens")


def resident_activation_bytes() -> int:
    """Count the bytes of activations in memory; INSPECT_LENS_MEMORY_BYTES is the limit.

    One call alone may be larger than that; it is held until the next one comes.

    Example:
        ```python
        from inspect_lens.model import read_activations, resident_activation_bytes

        call = read_activations("logs/honesty.eval")[0]
        nbytes = call.activations.numpy().nbytes
        assert resident_activation_bytes() >= nbytes
        ```
    """
    return MEMORY.nbytes


def read_activations(source: EvalLog | EvalSample | ModelOutput | str | Path) -> list[CapturedCall]:
    """List every captured call of a log, in the order of samples and calls.

    An answer that `read_given` read stands among them at its place, though no call made it.

    Nothing large is read until a tensor is. A log (or its path) also says where its files are,
    so that later `activations(output)` finds them after the folder was moved.

    Args:
        source: a log, its path, one of its samples, or one output.

    Raises:
        ArtifactError: the log was read without its samples.

    Example:
        ```python
        from inspect_lens.model import read_activations

        for call in read_activations("logs/honesty.eval"):
            print(call.sample_id, call.activations.numpy().shape)  # (layers, tokens, hidden)
        ```
    """
    if isinstance(source, str | Path):
        source = read_log(source)
    if isinstance(source, ModelOutput):
        handle = activations(source)
        message_id = source.message.id if source.choices else None
        return [] if handle is None else [CapturedCall(None, None, message_id, handle)]
    if isinstance(source, EvalSample):
        return list(_captured_calls(source))
    if source.location:
        know_log(source.location)
    if source.samples is None:
        raise ArtifactError(
            f"{source.location or 'log'}: was read without its samples; read it again with "
            "header_only=False"
        )
    return [call for sample in source.samples for call in _captured_calls(sample)]


def _captured_calls(sample: EvalSample) -> Iterator[CapturedCall]:
    seen: set[str | None] = set()
    for message_id, handle in _CAPTURED.calls(sample.events):
        seen |= {handle.sha256, message_id}
        yield CapturedCall(sample.id, sample.epoch, message_id, handle)
    last = activations(sample.output)
    message_id = sample.output.message.id if sample.output.choices else None
    if last is not None and not seen & {last.sha256, message_id}:
        yield CapturedCall(sample.id, sample.epoch, message_id, last)


class ScoredCall(NamedTuple):
    """A logged model call that probes in the engine scored."""

    message_id: str | None
    scores: ProbeScores


def probe_scores(
    source: ProbeScores | ModelOutput | ModelEvent | Mapping[str, Any] | None,
) -> ProbeScores | None:
    """Get the scores of probes in the engine for one model call, live or from a log.

    Args:
        source: the output, its model event, its metadata, or any of these as plain data.

    Returns:
        The handle, or None when no probe ran in the engine.

    Raises:
        ArtifactError: what stands there is not a reference of ours.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_scope, probe_scores


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            with lens_scope(probes="organism/deception-lr", model=model):
                output = await model.generate("Who is the founder of the town Velosh?")
            column = probe_scores(output).of("organism/deception-lr")
            assert len(column.scores) == len(column.positions)


        anyio.run(main)
        ```
    """
    return _SCORED.of(source)


def probe_scores_for(message: ChatMessage | str) -> ProbeScores | None:
    """Get the scores of probes in the engine for the call that wrote a message."""
    return _SCORED.of_message(message)


def read_probe_scores(sample: EvalSample) -> list[ScoredCall]:
    """List the calls of a sample that probes in the engine scored, in their order.

    Args:
        sample: of a log.

    Returns:
        The calls; nothing is read yet.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.model import read_probe_scores

        sample = read_eval_log("logs/honesty.eval").samples[0]
        assert read_probe_scores(sample) == []  # it captured activations instead
        ```
    """
    calls = [ScoredCall(*call) for call in _SCORED.calls(sample.events)]
    if not calls and (scores := probe_scores(sample.output)) is not None:
        message_id = sample.output.message.id if sample.output.choices else None
        calls.append(ScoredCall(message_id, scores))
    return calls


_COLUMNS: Final = (
    "log", "sample_id", "epoch", "message_id", "tensors", "layers", "n_prompt", "n_completion",
    "shape", "dtype", "uri", "sha256",
)  # fmt: skip


def activations_df(logs: EvalLog | str | Path | Sequence[EvalLog | str | Path]) -> pd.DataFrame:
    """Data frame of all model calls in logs that captured, one row each.

    Needs pandas, which inspect_lens does not install by itself.

    Args:
        logs: logs, paths of logs, or folders, in which every log is taken.

    Returns:
        Columns: `log` (its location), `sample_id`, `epoch`, `message_id`; `tensors` (their names),
        `layers`, `shape` (layers, tokens, hidden) and `dtype` of the residual stream, or of the
        first tensor where it was not captured; `n_prompt` and `n_completion` tokens; `uri` of the
        file, relative to the folder of the log, None for what was only in memory; `sha256`.

    Raises:
        ArtifactError: a log was read without its samples, or a folder holds none.
        ImportError: there is no pandas.

    Example:
        ```python
        from inspect_lens.model import activations_df

        calls = activations_df("logs/honesty.eval")
        assert len(calls) == 8
        assert calls["layers"][0] == (3, 4, 5)
        ```
    """
    import pandas as pd

    several = isinstance(logs, Sequence) and not isinstance(logs, str)
    given: Sequence[Any] = logs if several else [logs]  # type: ignore[assignment]
    rows = [row for log in given for one in _each(log) for row in _rows(one)]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def _each(log: EvalLog | str | Path) -> Iterator[EvalLog | str]:
    """The log itself, or the logs of a folder: one at a time, as they may be large."""
    if isinstance(log, EvalLog) or str(log).endswith((".eval", ".json")):
        yield log if isinstance(log, EvalLog) else str(log)
        return
    infos = list_eval_logs(str(log), descending=False)
    if not infos:
        raise ArtifactError(f"{log}: holds no log; allowed are logs, and folders that hold some")
    for info in infos:
        yield info.name


def _rows(log: EvalLog | str) -> Iterator[tuple[Any, ...]]:
    where = log.location if isinstance(log, EvalLog) else log
    for call in read_activations(log):
        handle = call.activations
        name = _main(handle)
        info = handle.tensors[name]
        yield (
            where, call.sample_id, call.epoch, call.message_id, handle.keys(), info.layers,
            handle.n_prompt, handle.n_completion, info.shape, info.dtype, handle.uri,
            handle.sha256,
        )  # fmt: skip


def _main(handle: Activations) -> str:
    return "residual_stream" if "residual_stream" in handle else next(iter(handle))


_DIGITS = 16
_MOST = 1 << 30
"""Bytes of a small file."""


def write_sidecar(
    data: bytes, *, kind: str, name: str, beside: Activations | ProbeScores | None = None
) -> dict[str, Any] | None:
    """Write a file next to the log of this eval, and return the reference for the log.

    The name holds the hash of the content, so scoring a log again writes the same file again.
    """
    place = place_for(None)
    if place is None and beside is not None and beside.uri is not None:
        uri = beside.uri
        root = "" if "://" in uri or uri.startswith("/") else place_of(uri, beside.root)
        place = Place(root, parent(uri))
    if place is None:
        return None
    digest = hashlib.sha256(data).hexdigest()[:_DIGITS]
    # Beside activations without a folder, a slash before the name would be the root of the disk.
    uri = join(place.folder, f"{name}-{digest[:12]}.safetensors")
    write_file(join(place.root, uri), [data])
    know_root(place.root or parent(absolute(uri)))  # what this process wrote it may read
    return {"$lens": kind, "uri": uri, "root": place.root, "sha256": digest}


def read_sidecar(reference: Mapping[str, Any], *, kind: str) -> bytes:
    """Read the file that a reference in a log names."""
    uri = reference.get("uri")
    if reference.get("$lens") != kind or not isinstance(uri, str):
        raise ArtifactError(
            f'not a reference to a file beside a log: {dict(reference)!r}; wanted is "$lens": '
            f'"{kind}" with uri and sha256'
        )
    where, data = find(uri, reference.get("root"), most=_MOST)
    judge_digest(where, hashlib.sha256(data).hexdigest()[:_DIGITS], reference.get("sha256"))
    return data
