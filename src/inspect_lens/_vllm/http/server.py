"""In the API server: what is wrapped there, and what is added to its application."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

from inspect_lens import _settings
from inspect_lens._base.garbage import collect_less
from inspect_lens._base.http import json_bytes
from inspect_lens._vllm import telemetry
from inspect_lens._vllm.compat.engine_facts import computing_facts
from inspect_lens._vllm.compat.features import (
    FEATURES,
    all_off,
    is_off,
    pass_over,
    reason_of,
    turn_off,
)
from inspect_lens._vllm.compat.monkeypatches import SERVER_PATCHES, verify, wrap
from inspect_lens._vllm.registered.contents import (
    SERVER_NAME,
    Tell,
    forget_unused,
    give_name,
    parse_item,
    take_name,
)
from inspect_lens._vllm.registered.persistent_hooks import HOOK_ACTIONS, HookBook
from inspect_lens._vllm.telemetry import refused_as
from inspect_lens.errors import CaptureError, LensError, SpecError
from inspect_lens.spec import (
    LENS_KEYS,
    Registrable,
    ServerConfig,
    TensorLimits,
    check_name,
    encode_saved,
    judging,
    shown,
)

from .bodies import FETCH_PATH, LensBodies, check_unread, has_lens_words, payloads
from .payloads import TTL_S, PayloadStore, fetch_payload, takes_any_buffer
from .refusals import json_body, refusal
from .sweep_route import SWEEP_PATH, Sweeps

logger = logging.getLogger("vllm.inspect_lens")

FrontEnd = Callable[[], Any]
Handler = Callable[[Any], Awaitable[Any]]

SERVER_PATH = "/v1/inspect_lens/server"
_OURS = "inspect_lens "
"""How names of our routes begin."""


def unauthorized(setting: str) -> dict[str, dict[str, Any]]:
    """What is said to whoever lacks the key that a setting has."""
    what = "what is registered" if setting == "registry_key" else "what acts on all requests"
    way = (
        f"; send 'Authorization: Bearer KEY' with the value of its {_settings.variable(setting)}"
        if _settings.text(setting)
        else f", and has none, so nobody can; start it with {_settings.variable(setting)}"
    )
    message = f"this server asks for a key to change {what}{way}"
    return {"error": {"message": message, "type": "Unauthorized", "code": 401}}


def add_routes(app: Any, front_end: FrontEnd, payloads: PayloadStore) -> None:
    registry, hooks = "/v1/inspect_lens/registry", "/v1/hooks"
    _add(app, "GET", "/v1/inspect_lens", _about(front_end, payloads))
    _add(app, "GET", f"{FETCH_PATH}{{handle}}", _fetch(payloads))
    names = _Registry(front_end)
    changes, rules = "registry_key", "admin_key"
    _add(app, "GET", registry, names.listed)
    _add(app, "POST", registry, names.register, key=changes)
    _add(app, "DELETE", registry + "/{name}", names.remove, key=changes)
    for action in HOOK_ACTIONS:
        key = "" if action == "collect" else changes
        _add(app, "POST", f"{hooks}/{action}", _hook(action), key=key)
    _add(app, "GET", SERVER_PATH, names.told_server)
    _add(app, "PUT", SERVER_PATH, names.set_server, key=rules)
    _add(app, "DELETE", SERVER_PATH, names.drop_server, key=rules)
    _add(app, "POST", SWEEP_PATH, Sweeps(front_end).run)


def _add(app: Any, method: str, path: str, handler: Handler, *, key: str = "") -> None:
    """Add a route, which answers errors of ours as vLLM would; `key` is its key's setting."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def endpoint(request: Request) -> Any:
        if key and not shows_key(request, key):
            return JSONResponse(unauthorized(key), status_code=401)
        try:
            return await handler(request)
        except LensError as error:
            status = error.status if error.status < 500 else 400
            return JSONResponse(refusal(error, status=status), status_code=status)

    # FastAPI reads annotations at run time, and those of this module are text.
    endpoint.__annotations__ = {"request": Request}
    app.add_api_route(path, endpoint, methods=[method], name=f"{_OURS}{method} {path}")


def shows_key(request: Any, setting: str) -> bool:
    """Whether a request shows the key that a setting has.

    Where the registry has none, everybody may write. What acts on all requests nobody may change
    then.
    """
    wanted = _settings.text(setting)
    if not wanted and setting == "registry_key":
        return True
    scheme, _, given = (request.headers.get("authorization") or "").partition(" ")
    # Hashes have one length, so that the time says nothing of the key.
    hashes = [hashlib.sha256(text.encode()).digest() for text in (given.strip(), wanted)]
    has_key = secrets.compare_digest(*hashes) and scheme.lower() == "bearer" and bool(wanted)
    if not has_key:
        refused_as(401, "Unauthorized")
    return has_key


def _about(front_end: FrontEnd, payloads: PayloadStore) -> Handler:
    found: dict[str, Any] = {}

    async def about(request: Any) -> dict[str, Any]:
        front = front_end()
        if not found:
            try:  # a vocabulary takes a moment to hash, and does not change
                found.update(await asyncio.to_thread(computing_facts, request.app.state))
            except Exception as error:  # noqa: BLE001 - the rest is an answer without it
                pass_over(error, uses_lens=False)
        return {
            **({} if front is None else front.describe()),
            "off": all_off(),
            "stored_bytes": payloads.n_bytes,
            "results": payloads.name if payloads.is_served else None,
            "computes_with": found,
        }

    return about


_GARBAGE = 70_000
"""Objects, at most, before an API server looks for garbage: after as many, Python looks at all.

Requests leave next to none, and hundreds that are under way at once would be looked at again and
again.
"""


def begin(app: Any) -> None:
    """See to an application before its first request."""
    put_last(app)
    if is_off("lens") is None and is_off("http") is None:
        collect_less(min(_settings.Settings.load().garbage_threshold, _GARBAGE))


def put_last(app: Any) -> None:
    """Have our routes looked at behind vLLM's: each request passes over those before its own."""
    from starlette.routing import Match

    routes = app.router.routes
    ours = [one for one in routes if str(getattr(one, "name", "")).startswith(_OURS)]
    others = [one for one in routes if one not in ours]
    asked = [{"type": "http", "method": next(iter(o.methods)), "path": o.path} for o in ours]

    def takes_ours(route: Any) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for scope in asked)

    at = next((i for i, route in enumerate(others) if takes_ours(route)), len(others))
    routes[:] = [*others[:at], *ours, *others[at:]]


def _fetch(payloads: PayloadStore) -> Handler:
    from fastapi import Response

    async def fetch(request: Any) -> Response:
        began, handle = time.time_ns(), request.path_params["handle"]
        try:
            data = await fetch_payload(handle, payloads)
        except LookupError:
            telemetry.fetched(handle, began, 404, 0)
            return refuse(
                *(404, "UnknownHandle", handle),
                "was not made by this server; behind a load balancer, ask the server that made "
                'it, or have tensors in the answer, with "transport": "inline" in the capture',
            )
        except CaptureError as error:
            telemetry.fetched(handle, began, 504, 0)
            return refuse(*(504, "SlowServer", handle), f"did not come: {error}")
        if data is None:
            return refuse(
                *(410, "ExpiredHandle", handle),
                f"has expired {TTL_S:g} s after its result came, or was fetched before",
            )
        content = data if takes_any_buffer(request.app) else bytes(data)
        return Response(content=content, media_type="application/octet-stream")

    def refuse(status: int, error: str, handle: str, why: str) -> Response:
        refused_as(status, error)
        return Response(status_code=status, content=f"handle {handle!r} {why}")

    return fetch


_LOOK_S = 0.2
"""Between two looks at whether requests under way still use what no name stands for."""


class _Registry:
    """Probes, vectors, edits and lenses that requests refer to by name."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        self._later: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def listed(self, request: Any) -> Any:
        return self._front_end().registry.describe()

    async def register(self, request: Any) -> Any:
        body = await json_body(request)
        replace = body.pop("replace", False)
        if not isinstance(replace, bool):
            raise SpecError(f"replace={shown(replace)}; allowed are true and false")
        facts = self._front_end().facts
        limits = None if facts is None else TensorLimits(facts)
        name, item = await asyncio.to_thread(parse_item, body, limits)
        await asyncio.to_thread(item.reference)  # with its hash, which is kept
        tell = _tell_through(request.app.state.engine_client)
        front, run = self._front_end(), self._apart
        await self._to_its_end(tell, give_name(front, tell, name, item, replace=replace, run=run))
        return {"name": name, **self._front_end().registry.reference_of(item)}

    async def remove(self, request: Any) -> Any:
        name = check_name(request.path_params["name"])
        tell = _tell_through(request.app.state.engine_client)
        await self._to_its_end(tell, take_name(self._front_end(), tell, name, run=self._apart))
        return {"name": name, "removed": True}

    async def told_server(self, request: Any) -> Any:
        return self._front_end().describe_server()

    async def set_server(self, request: Any) -> Any:
        """Let something act on all requests that begin from now on; others keep what they have."""
        body = await json_body(request)
        front = self._front_end()
        context = None if front.facts is None else TensorLimits(front.facts).context

        def read() -> ServerConfig:
            with judging("the body"):
                config = ServerConfig.model_validate(body, context=context)
            config.sha256  # noqa: B018 - worked out here, and not on the event loop
            return config

        config = await asyncio.to_thread(read)
        await self._apart(front.register, SERVER_NAME, config, replace=True)
        return front.describe_server()

    async def drop_server(self, request: Any) -> Any:
        front = self._front_end()
        await self._apart(front.unregister, SERVER_NAME)
        return front.describe_server()

    async def _to_its_end(self, tell: Tell, change: Coroutine[Any, Any, None]) -> None:
        """Change a name, also where whoever asked is gone: half done, workers would lack it."""

        async def run() -> None:
            try:
                await change
            finally:
                self._forget_later(tell)

        await asyncio.shield(run())

    async def _apart(self, work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Change names in a thread, one after the other: the servers of an engine share files."""
        async with self._turn:
            await asyncio.to_thread(work, *args, **kwargs)

    def _forget_later(self, tell: Tell) -> None:
        """Have workers forget what no name stands for, once requests under way need it no more."""
        registry = self._front_end().registry

        async def forget() -> None:
            while registry.has_left:
                await asyncio.sleep(_LOOK_S)
                await forget_unused(registry, tell)

        if registry.has_left and (self._later is None or self._later.done()):
            self._later = asyncio.create_task(forget())


def _tell_through(engine: Any) -> Tell:
    async def tell(reference: str, item: Registrable | None) -> Sequence[object]:
        # A lens may have gigabytes, and the event loop is everybody's.
        wire: dict[str, Any] | None = None
        if item is not None:
            wire = await asyncio.to_thread(item.model_dump, mode="json")
        return await engine.collective_rpc("inspect_lens_register", args=(reference, wire)) or ()

    return tell


def _hook(action: str) -> Handler:
    from fastapi import Response

    async def run(request: Any) -> Any:
        engine = request.app.state.engine_client
        book = HookBook.of(
            engine,
            "hooks are functions of the client that run inside the server, and this server "
            "was started without leave for it; start it with INSPECT_LENS_ALLOW_CODE=1, which "
            "lets everybody who can send it requests run any code there",
        )

        async def tell(action: str, payload: Any) -> Sequence[str | None]:
            told: Sequence[str | None] = await engine.collective_rpc(
                "inspect_lens_hooks", args=(action, payload)
            )
            return told

        done = await book.act(tell, action, await json_body(request))
        # What hooks saved may be a gigabyte, and the event loop is everybody's.
        body = await asyncio.to_thread(lambda: json_bytes(encode_saved(done)))
        return Response(body, media_type="application/json")

    return run


_SERVER_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server",
    "vllm.entrypoints.openai.chat_completion.serving",
)


class _Front:
    """The front-end of this process, once it has an engine."""

    end: Any = None


def is_serving() -> bool:
    if not sys.modules.keys().isdisjoint(_SERVER_MODULES):
        return True
    main = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)
    return main in _SERVER_MODULES


def install_when_serving(front_end: Any = None, keys: Collection[str] = LENS_KEYS) -> None:
    """Wrap the HTTP layer where this process is an API server, or becomes one.

    Bodies are judged there in any case: while the lens is off, those with `keys` are refused.
    """
    if front_end is not None:
        _Front.end = front_end
    if not is_serving():
        return
    try:
        if is_off("http") is None:
            verify(SERVER_PATCHES)
    except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
        reason = reason_of(error)
        logger.warning("inspect_lens: %s: off: %s", FEATURES["http"], reason)
        turn_off("http", reason)
    for item in SERVER_PATCHES:
        make = _routers if item.name == "routers" else _reading
        try:
            wrap(item, partial(make, keys))
        except Exception as error:  # noqa: BLE001 - nor here
            logger.error("inspect_lens: bodies with lens keys may be passed over: %s", error)


def _reading(keys: Collection[str], original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse lens keys of bodies that come by no route of ours, as those of `vllm run-batch`."""

    def to_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            check_unread(self, keys)
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            pass_over(error, uses_lens=bool(has_lens_words(self, keys)))
        return original(self, *args, **kwargs)

    return to_params


def _routers(keys: Collection[str], original: Callable[..., Any]) -> Callable[..., Any]:
    def register(app: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(app, *args, **kwargs)
        try:
            if is_off("http") is None:
                add_routes(app, lambda: _Front.end, payloads)
        except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
            turn_off("http", reason_of(error))
        fetch = None if is_off("http") is not None else _fetch(payloads)
        try:
            app.add_middleware(
                LensBodies, front_end=lambda: _Front.end, keys=keys, fetch=fetch, begin=begin
            )
        except Exception as error:  # noqa: BLE001 - nor here
            logger.error("inspect_lens: bodies with lens keys are passed over: %s", error)
        return made

    return register
