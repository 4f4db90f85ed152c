"""Lenses at one server: registered when a solver first asks for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.lens import Lens, load_lens
from inspect_lens.spec import check_name

__all__ = ["PATH", "LensLike", "LensService", "Send", "read_lens"]

PATH = "/v1/inspect_lens/registry"

LensLike = str | Path | Lens
"""A name that the server knows, or a lens, its path, or its name below `lenses/`."""

Send = Callable[[str, dict[str, Any]], Awaitable[Any]]


def read_lens(lens: LensLike) -> str | Lens:
    """A lens, or the name under which somebody has registered one."""
    if isinstance(lens, str) and "/" not in lens:
        return check_name(lens, field="lens")
    return load_lens(lens)


class LensService:
    """Registers lenses, once for each server and content."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._known: dict[str, anyio.Event] = {}

    def forget(self) -> None:
        """The server that was there is not there any more."""
        self._known.clear()

    async def name_of(self, lens: Lens) -> str:
        """See that the server knows a lens."""
        form = await anyio.to_thread.run_sync(lens.for_engine)
        name = f"lens-{form.sha256[:24]}"
        while (done := self._known.get(name)) is not None:
            await done.wait()
            if self._known.get(name) is done:
                return name
        done = self._known[name] = anyio.Event()
        try:
            values = await anyio.to_thread.run_sync(lambda: form.model_dump(mode="json"))
            response = await self._send(PATH, {"name": name, "lens": values})
            if response.status_code == 200:
                return name
            del self._known[name]
        except BaseException:
            self._known.pop(name, None)
            raise
        finally:
            done.set()
        what = f"lens {lens.card.name!r}: {PATH} answered HTTP {response.status_code}"
        if response.status_code in (400, 422, 429):
            raise SpecError(f"{what}: {response.text[:500]}")
        raise CaptureError(
            f"{what}: {response.text[:500]}; register it at the server's start with "
            "INSPECT_LENS_REGISTER, and pass its name there"
        )
