"""What the config of a task or of a model asks of every call: the outermost scope.

Inspect merges it into each call's own config, where it would look like something that the call says
itself, and so drop what `lens_scope` asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from inspect_ai.model import ChatMessage, ChatMessageUser, Model, ModelAPI

from inspect_lens.errors import LensError
from inspect_lens.model._host import active_generate_config, active_model
from inspect_lens.spec import Add, EditBase, LensRequest

from ._body import declines_steering, read_body

__all__ = [
    "SCOPES",
    "Around",
    "Scope",
    "inherited_requests",
    "instrument_message",
    "is_instrument_call",
    "outside_scopes",
    "scope_of",
    "steering_around",
]


class Scope(NamedTuple):
    """One scope."""

    model: Model
    """Whose calls."""
    request: LensRequest


SCOPES: ContextVar[tuple[Scope, ...]] = ContextVar("inspect_lens_scopes", default=())
_of_instrument: ContextVar[bool] = ContextVar("inspect_lens_of_instrument", default=False)


def scope_of(api: ModelAPI) -> LensRequest | None:
    """What `-M` and the scopes around this call ask of a provider's calls, or None."""
    found: LensRequest | None = None
    if not _of_instrument.get():
        found = getattr(api, "edited", None)  # by `-M edits` or `-M steer`: the outermost scope
    for scope in SCOPES.get():
        if scope.model.api is not api:
            continue
        if found is None:
            found = scope.request  # nearly always the only one; each call asks twice
            continue
        outer = found
        names = {use.name for use in scope.request.probes}
        found = LensRequest(
            capture=scope.request.capture or outer.capture,
            edits=(*outer.edits, *scope.request.edits),
            lens=scope.request.lens or outer.lens,
            probes=(*(u for u in outer.probes if u.name not in names), *scope.request.probes),
        )
    return found


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Calls inside the `with` are an instrument's own: no scope or `-M edits` reaches them."""
    scopes, instrument = SCOPES.set(()), _of_instrument.set(True)
    try:
        yield
    finally:
        SCOPES.reset(scopes)
        _of_instrument.reset(instrument)


def inherited_requests(api: ModelAPI) -> tuple[LensRequest, ...]:
    """What the running task's config and the model's own ask of every call inside scopes."""
    models = {id(scope.model): scope.model for scope in SCOPES.get() if scope.model.api is api}
    found = []
    for config in (active_generate_config(), *(model.config for model in models.values())):
        try:
            request = read_body(config.extra_body).request
        except LensError:
            continue  # calls that carry it are refused with the reason
        if request is not None:
            found.append(request)
    return tuple(found)


class Around(NamedTuple):
    """What steers, at this place, a call that says nothing itself."""

    config: LensRequest
    """Of the task, or of the model."""
    scope: LensRequest
    """Of the scopes around."""
    declined: bool
    """Whether the config says `apply_steering_vectors: []`."""

    def __str__(self) -> str:
        parts = []
        for source, where in (
            (self.config, "the config of the task or the model"),
            (self.scope, "-M edits, -M steer, or with_lens or lens_scope around it"),
        ):
            words = [f"registered edits {use.name!r}" for use in source.edits_named]
            words += map(_described, source.edits)
            if words:
                parts.append(f"{where} steers ({'; '.join(words)})")
        if self.declined:
            parts.append("the config of the task or the model says apply_steering_vectors: []")
        return " and ".join(parts)


def _described(edit: EditBase) -> str:
    if not isinstance(edit, Add):
        return f"edit {edit.op!r}, layers {list(edit.layers)}"
    return f"layers {list(edit.layers)}, scale {edit.scale:g}, sha256 {edit.vector.sha256[:12]}"


def steering_around(model: Model) -> Around | None:
    """Find what a call of a model is steered by where it says nothing itself."""
    body = _inherited_body(model)
    found = Around(
        read_body(body).request or LensRequest(),
        scope_of(model.api) or LensRequest(),
        declines_steering(body),
    )
    return found if str(found) else None


def _inherited_body(model: Model) -> Mapping[str, Any] | None:
    """The `extra_body` of a call that has none, by the rules of Inspect."""
    if model is active_model() and (body := active_generate_config().extra_body) is not None:
        return body
    return model.config.extra_body


_KEY = "inspect_lens_instrument"


def instrument_message(text: str, *, name: str) -> ChatMessageUser:
    """The message of a call that is an instrument's own; the log keeps the mark."""
    return ChatMessageUser(content=text, metadata={_KEY: name})


def is_instrument_call(messages: Sequence[ChatMessage]) -> bool:
    """Whether the input of a model call is an instrument's own, live or out of a log."""
    return any(_KEY in (message.metadata or {}) for message in messages)
