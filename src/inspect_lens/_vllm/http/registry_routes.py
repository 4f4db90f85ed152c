"""HTTP routes of the registry: probes, vectors, edits and lenses that requests refer to by name."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from inspect_lens import _settings
from inspect_lens._vllm.metrics import refused_as
from inspect_lens._vllm.registered.contents import Tell, forget_unused, give_name, take_name
from inspect_lens._vllm.registered.items import parse_item
from inspect_lens._vllm.registered.persistent_hooks import HookBook, packed_hook, raise_first
from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    EngineFacts,
    Registrable,
    TensorLimits,
    check_name,
    encode_saved,
    parse_hooks,
    shown,
)

from .refusals import json_body, refusal

__all__ = [
    "UNAUTHORIZED",
    "add_hook_routes",
    "add_registry_routes",
    "may_write",
]

UNAUTHORIZED: dict[str, dict[str, Any]] = {
    "error": {
        "message": "this server asks for a key to change what is registered; send "
        "'Authorization: Bearer KEY' with the value of its INSPECT_LENS_REGISTRY_KEY",
        "type": "Unauthorized",
        "code": 401,
    }
}


def may_write(request: Any) -> bool:
    """Whether a request brings the key, where one is set."""
    wanted = _settings.text("registry_key")
    if not wanted:
        return True
    scheme, _, given = (request.headers.get("authorization") or "").partition(" ")
    # Hashes have one length, so that the time says nothing of the key.
    hashes = [hashlib.sha256(text.encode()).digest() for text in (given.strip(), wanted)]
    has_key = secrets.compare_digest(*hashes) and scheme.lower() == "bearer"
    if not has_key:
        refused_as(401, UNAUTHORIZED["error"]["type"])
    return has_key


_REGISTRY_PATH = "/v1/inspect_lens/registry"
_LOOK_S = 0.2
"""Between two looks at whether requests under way still use what no name stands for."""


def add_registry_routes(  # noqa: C901 - three handlers of a few lines
    app: Any, front_end: Callable[[], Any]
) -> None:
    """Add `GET`, `POST` and `DELETE` of the registry to a server."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    def refused(error: LensError) -> JSONResponse:
        status = error.status if error.status < 500 else 400
        return JSONResponse(refusal(error, status=status), status_code=status)

    def tell_through(request: Any) -> Tell:
        async def tell(reference: str, item: Registrable | None) -> Sequence[object]:
            engine = request.app.state.engine_client
            # A lens may have gigabytes, and the event loop is everybody's.
            wire: dict[str, Any] | None = None
            if item is not None:
                wire = await asyncio.to_thread(item.model_dump, mode="json")
            return (
                await engine.collective_rpc("inspect_lens_register", args=(reference, wire)) or ()
            )

        return tell

    later: set[asyncio.Task[None]] = set()

    def forget_later(tell: Tell) -> None:
        """Once requests under way need it no longer."""
        registry = front_end().registry

        async def forget() -> None:
            while registry.has_left:
                await asyncio.sleep(_LOOK_S)
                await forget_unused(registry, tell)

        if registry.has_left and not later:
            later.add(task := asyncio.create_task(forget()))
            task.add_done_callback(later.discard)

    async def listed() -> Any:
        return front_end().registry.describe()

    async def register(request: Request) -> Any:
        if not may_write(request):
            return JSONResponse(UNAUTHORIZED, status_code=401)
        try:
            name, item, replace = await _asked(request, front_end().facts)
            await give_name(front_end(), tell_through(request), name, item, replace=replace)
        except LensError as error:
            return refused(error)
        finally:
            forget_later(tell_through(request))
        return {"name": name, **item.reference()}

    async def remove(name: str, request: Request) -> Any:
        if not may_write(request):
            return JSONResponse(UNAUTHORIZED, status_code=401)
        try:
            check_name(name)
            await take_name(front_end(), tell_through(request), name)
        except LensError as error:
            return refused(error)
        finally:
            forget_later(tell_through(request))
        return {"name": name, "removed": True}

    # FastAPI reads annotations at run time, and those of this module are text.
    register.__annotations__["request"] = remove.__annotations__["request"] = Request
    app.get(_REGISTRY_PATH)(listed)
    app.post(_REGISTRY_PATH)(register)
    app.delete(_REGISTRY_PATH + "/{name}")(remove)


async def _asked(request: Any, facts: EngineFacts | None) -> tuple[str, Any, bool]:
    """Name, item, and whether to replace, out of a body."""
    body = await json_body(request)
    replace = body.pop("replace", False)
    if not isinstance(replace, bool):
        raise SpecError(f"replace={shown(replace)}; allowed are true and false")
    limits = None if facts is None else TensorLimits.of(facts)
    name, item = await asyncio.to_thread(parse_item, body, limits)
    await asyncio.to_thread(item.reference)  # its hash, which is kept
    return name, item, replace


_HOOKS_PATH = "/v1/hooks"

Handler = Callable[[HookBook, Any, dict[str, Any]], Awaitable[dict[str, Any]]]


def add_hook_routes(app: Any) -> None:
    """Add the routes to a server."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    def route(handler: Handler) -> Callable[..., Awaitable[Any]]:
        async def endpoint(request: Request) -> Any:
            if handler is not _collect and not may_write(request):
                return JSONResponse(UNAUTHORIZED, status_code=401)
            try:
                engine = request.app.state.engine_client
                return await handler(_book_of(engine), engine, await json_body(request))
            except LensError as error:
                status = error.status if error.status < 500 else 400
                return JSONResponse(refusal(error, status=status), status_code=status)

        # FastAPI reads annotations at run time, and those of this module are text.
        endpoint.__annotations__["request"] = Request
        endpoint.__name__ = f"hooks_{handler.__name__.strip('_')}"
        return endpoint

    for name, handler in _HANDLERS.items():
        app.post(f"{_HOOKS_PATH}/{name}")(route(handler))


def _book_of(engine: Any) -> HookBook:
    processor = getattr(engine, "input_processor", None)
    book: HookBook | None = getattr(processor, "inspect_lens_book", None)
    if book is None:
        reason = getattr(processor, "inspect_lens_refusal", None)
        raise UnsupportedError(
            f"hooks: the lens does not serve this engine: {reason}"
            if reason
            else "hooks are functions of the client that run inside the server, and this server "
            "was started without leave for it; start it with INSPECT_LENS_ALLOW_CODE=1, which "
            "lets everybody who can send it requests run any code there"
        )
    return book


def _names(body: dict[str, Any], field: str) -> list[str]:
    names = body.get(field)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SpecError(f"{field}: a list of names of parameters is wanted")
    return names


async def _tell(engine: Any, action: str, payload: Any) -> None:
    answers: Sequence[str | None] = await engine.collective_rpc(
        "inspect_lens_hooks", args=(action, payload)
    )
    raise_first(answers)


async def _register(book: HookBook, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(body.get("hooks"), list):
        raise SpecError("hooks: a list of hooks is wanted")
    named = book.prepare(parse_hooks(body["hooks"], where="hooks"))
    if body.get("prefetch_params"):
        await _tell(engine, "prefetch", _names(body, "prefetch_params"))
    # The workers first: a hook that runs is known everywhere.
    await _tell(engine, "register", {name: packed_hook(hook) for name, hook in named.items()})
    book.add(named)
    return {"status": "ok", "count": len(named)}


async def _collect(book: HookBook, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    return {"results": encode_saved(book.results())}


async def _clear(book: HookBook, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    await _tell(engine, "unregister", book.clear())
    return {"status": "ok"}


async def _clear_results(book: HookBook, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    book.clear_results()
    return {"status": "ok"}


async def _prefetch(book: HookBook, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    names = _names(body, "params")
    await _tell(engine, "prefetch", names)
    return {"status": "ok", "params": names}


async def _clear_prefetched(book: HookBook, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    await _tell(engine, "clear_prefetched", None)
    return {"status": "ok"}


_HANDLERS: dict[str, Handler] = {
    "register": _register,
    "collect": _collect,
    "clear": _clear,
    "clear_results": _clear_results,
    "prefetch": _prefetch,
    "clear_prefetched": _clear_prefetched,
}
