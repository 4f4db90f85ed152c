"""HTTP routes of the registry: probes, vectors, edits and lenses that requests refer to by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from inspect_lens._vllm.registered.contents import Tell, forget_unused, give_name, take_name
from inspect_lens._vllm.registered.items import parse_item
from inspect_lens.errors import LensError, SpecError
from inspect_lens.spec import EngineFacts, Registrable, TensorLimits, check_name, shown

from .refusals import json_body, refusal
from .write_key import UNAUTHORIZED, may_write

__all__ = ["add_registry_routes"]

_PATH = "/v1/inspect_lens/registry"
_LOOK_S = 0.2
"""Between two looks at whether requests under way still use what no name stands for."""


def add_registry_routes(  # noqa: C901 - three handlers of a few lines
    app: Any, front_end: Callable[[], Any]
) -> None:
    """Add `GET`, `POST` and `DELETE` of the registry to a server.

    Args:
        app: the FastAPI application.
        front_end: gives the front-end of this process.
    """
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
    app.get(_PATH)(listed)
    app.post(_PATH)(register)
    app.delete(_PATH + "/{name}")(remove)


async def _asked(request: Any, facts: EngineFacts | None) -> tuple[str, Any, bool]:
    """Name, item, and whether to replace, out of a body.

    Raises:
        SpecError: the body is something else.
    """
    body = await json_body(request)
    replace = body.pop("replace", False)
    if not isinstance(replace, bool):
        raise SpecError(f"replace={shown(replace)}; allowed are true and false")
    limits = None if facts is None else TensorLimits.of(facts)
    name, item = await asyncio.to_thread(parse_item, body, limits)
    await asyncio.to_thread(item.reference)  # its hash, which is kept
    return name, item, replace
