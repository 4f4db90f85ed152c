"""HTTP routes of persistent hooks: paths, bodies and answers of vllm-lens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from inspect_lens._vllm.registered.persistent_hooks import HookBook, packed_hook, raise_first
from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.spec import encode_saved, parse_hooks

from .refusals import json_body, refusal
from .write_key import UNAUTHORIZED, may_write

__all__ = ["add_hook_routes"]

_PATH = "/v1/hooks"

Handler = Callable[[HookBook, Any, dict[str, Any]], Awaitable[dict[str, Any]]]


def add_hook_routes(app: Any) -> None:
    """Add the routes to a server.

    Args:
        app: the FastAPI application.
    """
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
        app.post(f"{_PATH}/{name}")(route(handler))


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
