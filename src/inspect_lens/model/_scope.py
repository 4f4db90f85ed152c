"""What every call below asks of the lens, however deep it is made: `lens_scope`, and configs.

Inspect merges configs by replacing `extra_body` as a whole, so a config that a solver sets is lost
as soon as an agent inside it passes one of its own, and what the config of a task or of a model
asks looks like something that each call says itself. A scope is read by the provider, behind all
merging, and before the cache is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from inspect_ai.model import (
    ChatMessage,
    ChatMessageUser,
    GenerateConfig,
    Model,
    ModelAPI,
    get_model,
)

from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.spec import Add, CaptureSpec, EditBase, LensRequest, LogitLens, ProbeUse
from inspect_lens.vector import VectorLike

from ._host import active_generate_config, active_model
from ._request import Body, asked_by, declines_steering, read_body
from ._scores import ProbeLike

__all__ = ["lens_scope"]


class LensProvider(ABC):
    """What a model's provider is that can do what a lens request asks for."""

    @abstractmethod
    def read(self, config: GenerateConfig, messages: Sequence[ChatMessage] = ()) -> Body:
        """What a call asks, with scopes and the default capture, spelled in one way."""


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
            edits_meet=min(outer.edits_meet, scope.request.edits_meet),  # "error", if one says so
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
    own = getattr(api, "own_config", None)  # of a model without a scope
    configs = [active_generate_config(), *(model.config for model in models.values())]
    for config in (*configs, *(() if own is None or models else (own,))):
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
    configuration: str = ""
    """Of the server, which the model's name chooses; what it edits is known there alone."""

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
        if self.configuration:
            parts.append(
                f"the model's name chooses the server's configuration {self.configuration!r}, "
                "which may steer"
            )
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
        getattr(model.api, "configuration", ""),
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


@contextmanager
def lens_scope(
    *,
    capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | int | str | None = None,
    steer: Add | VectorLike | Mapping[str, Any] | Sequence[Any] | None = None,
    edits: EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]] | None = None,
    edits_meet: Literal["in_order", "error"] | None = None,
    probes: ProbeUse | ProbeLike | Sequence[ProbeUse | ProbeLike] | None = None,
    lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None = None,
    model: Model | None = None,
) -> Iterator[None]:
    """Apply capture and steering to every call of a model inside the `with`.

    It reaches `generate()`, agents, tools and anything else that calls the model in this task or
    in tasks started inside, whatever config they pass. What a call asks for itself replaces what
    the scope asks for: its capture, its lens, and its edits, vectors among them, or
    `apply_steering_vectors: []` for none. Scopes nest: their edits add up, the inner capture
    counts. What the config of the task or of the model says is no call's own: the scope's edits
    add to it, and its capture, lens and probes go before it.

    Args:
        capture: `all`, layers, or a `CaptureSpec`.
        steer: a vector, its name, or `{"vector": name, "layer": …, "scale": …}`, or several; see
            `lens_config`.
        edits: other edits, such as `Ablate(direction=v, layers=[4])`; those of nested scopes act
            in order, the outer ones first.
        edits_meet: "error" refuses calls in which two edits would change the same numbers of a
            token, those of the server among them; edits that meet act in order by default.
        probes: probes that the engine runs, as for `with_lens`; or uses of names that somebody
            registered. Names that a call uses itself are its own. An empty list adds none.
        lens: layers to read as predictions of the next token, `all`, or a `LogitLens`; a call that
            asks for a lens itself keeps its own.
        model: whose calls; the model under evaluation by default. A grader is not touched.

    Yields:
        Nothing.

    Raises:
        UnsupportedError: the model's provider has no lens, so that calls would go out plain.
        SpecError: a value is wrong, or vectors are given and the config of the task or of the
            model declines all vectors.
        ArtifactError: a named vector or probe cannot be found.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import activations, lens_scope


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            with lens_scope(capture=[4], steer="organism/truth", model=model):
                output = await model.generate("Who is the founder of the town Velosh?")
            assert activations(output).layers == (4,)


        anyio.run(main)
        ```
    """
    target = require_lens("lens_scope", model)
    request = asked_by(
        capture=capture, steer=steer, edits=edits, edits_meet=edits_meet, probes=probes, lens=lens
    )
    with scope_with(request, target):
        yield


@contextmanager
def scope_with(request: LensRequest, target: Model) -> Iterator[None]:
    """`lens_scope` of what is read already: a solver enters one for each sample."""
    if request.edits and (around := steering_around(target)) is not None and around.declined:
        raise SpecError(
            "lens_scope: the config of the task or of the model says apply_steering_vectors: [], "
            "which declines these edits for every call that carries it; take that out of it, or "
            "say it in the calls that are not to be steered"
        )
    token = SCOPES.set((*SCOPES.get(), Scope(target, request)))
    try:
        yield
    finally:
        SCOPES.reset(token)


async def served_path(name: str, model: Model | None = None) -> str | None:
    """What the server of a model says that it serves under its name; None where nobody says."""
    found = model or active_model()
    ask = getattr(found.api, "served_path", None) if found is not None else None
    if found is None or ask is None or found.name != name:
        return None
    path: str | None = await ask()
    return path


def require_lens(asker: str, model: Model | None = None) -> Model:
    """The model, where it can do what a lens request asks for."""
    target = model or get_model()
    if not isinstance(target.api, LensProvider):
        raise UnsupportedError(
            f"{asker}: {target} has no lens and would answer without steering or capture; allowed "
            "are vllm-lens/ and lens/ models; pass --model vllm-lens/…"
        )
    return target
