"""In the API server: the results of a request in its response, or at the end of its stream.

vLLM's handlers know nothing of results, and drop what they do not know. So results stay with the
body that asked for them, and are put into the answer where it leaves the application.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._vllm.compat.guard import fault_of
from inspect_lens._vllm.metrics import delivered, failed, stored
from inspect_lens._vllm.traces import remember
from inspect_lens.errors import LensError
from inspect_lens.spec import (
    LENS_KEYS,
    NATIVE_KEY,
    LensRequest,
    PatternBudget,
    TensorData,
    encode_saved,
)

from .payloads import PayloadStore, handle_entries, inline_entries
from .refusals import Message, Send, refuse

payloads = PayloadStore(on_change=stored)
"""The store of this process; a handle is valid at the process that made it."""


@dataclass
class Body:
    """A body that was read: what it asks of the lens, and the results of its choices."""

    request: LensRequest | None = None
    kind: str = ""
    """What events of its stream are."""
    others: dict[str, Any] = field(default_factory=dict)
    """Extra arguments that are not ours, wherever in the body they stand."""
    patterns: PatternBudget = field(default_factory=PatternBudget)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    """As JSON, by index of the choice."""
    scores: list[dict[str, Any]] = field(default_factory=list)
    """Token scores that no event of the stream has carried yet."""
    n_choices: int = 0
    n_prompts: int = 0
    span: Any = None
    """Of OpenTelemetry."""
    error: BaseException | None = None
    """Why a prompt has no results."""

    def begin(self, params: Any) -> int:
        """Have a prompt's parameters ask what the body asks; index of its first choice.

        vLLM asks for the prompts of a body one after the other.
        """
        given = {**(params.extra_args or {}), **self.others}
        args = {key: value for key, value in given.items() if key not in LENS_KEYS}
        if self.request is not None:
            args[NATIVE_KEY] = self.request
        params.extra_args = args or None
        first, self.n_choices = self.n_choices, self.n_choices + params.n
        self.n_prompts += 1
        return first

    def take(self, output: Any, first: int) -> None:
        """Take what is ours from an output of a prompt."""
        for completion in output.outputs:
            index = first + completion.index
            if scores := completion.__dict__.pop("inspect_lens_scores", None):
                self.scores.append({"index": index, "probes": scores})
            if result := getattr(completion, "inspect_lens_json", None):
                self.results[index] = result
                remember(self.span, result)

    def forget(self) -> None:
        """Let go of everything: tasks that outlive the request have its context."""
        self.request, self.patterns, self.others = None, PatternBudget(), {}
        self.results, self.scores = {}, []
        self.span = self.error = None


SERVED: ContextVar[Body | None] = ContextVar("inspect_lens_body", default=None)
"""The body whose request is served."""


class Answer:
    """What an application sends in answer to a body, with its results."""

    def __init__(self, send: Send, body: Body) -> None:
        self._send, self._body = send, body
        self._start: Message | None = None
        """The head of an answer that is sent when its length is known."""
        self._parts: list[bytes] = []
        self._is_stream = False
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = b"".join(
                v for name, v in message.get("headers", ()) if name.lower() == b"content-type"
            )
            self._is_stream, self.status = b"event-stream" in kind, message["status"]
            if message["status"] == 200 and b"json" in kind:
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._send_whole(self._start)
            return
        elif self._is_stream and message["type"] == "http.response.body":
            await self._send_event(message)
            return
        await self._send(message)

    async def _send_whole(self, start: Message) -> None:
        data = b"".join(self._parts)
        try:
            data = with_results(data, self._body.results)
        except BaseException as error:
            if ends_process(error):
                raise
            await refuse(fault_of(error), self._send)
            return
        others = [h for h in start.get("headers", ()) if h[0].lower() != b"content-length"]
        headers = [*others, (b"content-length", b"%d" % len(data))]
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": data})

    async def _send_event(self, message: Message) -> None:
        """Send token scores behind their tokens, and the results before the stream ends."""
        body, kind = self._body, self._body.kind
        data = message.get("body", b"")
        is_end = data.startswith(b"data: [DONE]")
        if is_end:
            await self._send_scores(body.scores, kind)
            body.scores = []
        if is_end and body.results:
            await self._send(_event(_last_event(body.results, kind)))
        await self._send(message)
        if body.scores and not is_end:
            # vLLM asks several prompts ahead of what it has sent.
            sent = _choices_in(data) if body.n_prompts > 1 else None
            ready = [s for s in body.scores if sent is None or s["index"] in sent]
            if sent is not None:
                ready = list({s["index"]: s for s in reversed(ready)}.values())  # each one's first
            body.scores = [s for s in body.scores if not any(s is one for one in ready)]
            await self._send_scores(ready, kind)

    async def _send_scores(self, scores: list[dict[str, Any]], kind: str) -> None:
        if scores:
            event = {"object": kind, "choices": [], "inspect_lens_scores": scores}
            await self._send(_event(event))


def _choices_in(data: bytes) -> set[int]:
    """Choices that an event is about."""
    try:
        event = from_json(data.removeprefix(b"data:").strip())
        return {choice["index"] for choice in event["choices"]}
    except (ValueError, KeyError, TypeError):
        return set()


def with_results(data: bytes, found: dict[int, dict[str, Any]]) -> bytes:
    """A response with results: the first choice's at the top, each one's on its choice."""
    if not found:
        return data
    response = from_json(data)
    response |= found[min(found)]
    if len(response["choices"]) > 1:
        for i, choice in enumerate(response["choices"]):
            choice |= found.get(i, {})
    return json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()


def _event(value: dict[str, Any]) -> Message:
    data = f"data: {json.dumps(value)}\n\n".encode()
    return {"type": "http.response.body", "body": data, "more_body": True}


def _last_event(found: dict[int, dict[str, Any]], kind: str) -> dict[str, Any]:
    event: dict[str, Any] = {"object": kind, "choices": [], **found[min(found)]}
    if len(found) > 1:
        event["inspect_lens_choices"] = [{"index": i, **found[i]} for i in sorted(found)]
    return event


def as_json(completion: Any) -> dict[str, Any]:
    """A choice's result as it stands in a response: `activations` and `inspect_lens`."""
    result: dict[str, Any] = {"inspect_lens": completion.inspect_lens.model_dump(mode="json")}
    tensors: dict[str, TensorData] = completion.inspect_lens_tensors
    if tensors:
        is_binary = completion.inspect_lens_transport == "binary"
        try:
            entries = handle_entries(tensors, payloads) if is_binary else inline_entries(tensors)
        except LensError as error:
            failed(error)
            raise
        plain = getattr(completion, "inspect_lens_plain", {})
        result["activations"] = entries | {n: {"__json__": value} for n, value in plain.items()}
    if (saved := getattr(completion, "inspect_lens_saved", None)) is not None:
        result["hook_results"] = encode_saved(saved)
    delivered(completion)
    return result
