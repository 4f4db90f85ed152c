"""The scopes around a call, as the provider reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from inspect_ai.model import Model, ModelAPI

from inspect_lens.spec import LensRequest

__all__ = ["SCOPES", "Scope", "outside_scopes", "scope_of"]


class Scope(NamedTuple):
    """One scope."""

    model: Model
    """Whose calls."""
    request: LensRequest


SCOPES: ContextVar[tuple[Scope, ...]] = ContextVar("inspect_lens_scopes", default=())


def scope_of(api: ModelAPI) -> LensRequest | None:
    """What the scopes around this call ask of a provider's calls, or None."""
    found: LensRequest | None = None
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
            steer=(*outer.steer, *scope.request.steer),
            edits=(*outer.edits, *scope.request.edits),
            lens=scope.request.lens or outer.lens,
            probes=(*(u for u in outer.probes if u.name not in names), *scope.request.probes),
        )
    return found


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Calls inside the `with` are an instrument's own: no scope around them reaches them."""
    token = SCOPES.set(())
    try:
        yield
    finally:
        SCOPES.reset(token)
