"""In the front-end: persistent hooks of an engine, what they saved, and sealing hooks."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

from inspect_lens._base.to_torch import to_torch
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.hooks.results import OWN, PERSISTENT, Gathered
from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens.errors import CaptureError, LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    EngineFacts,
    Hook,
    HookReceipt,
    LensRequest,
    TensorData,
    check_hooks,
    parse_hooks,
    shown,
)

TellHooks = Callable[[str, Any], Awaitable[Sequence[str | None]]]
"""Tells all workers of an engine to do something with hooks; they answer what went wrong."""

HOOK_ACTIONS: Final = (
    "register", "collect", "clear", "clear_results", "prefetch", "clear_prefetched",
)  # fmt: skip

_FIELDS = {"register": ("hooks", "prefetch_params"), "prefetch": ("params",)}
"""Of their bodies; others have none."""

_numbers = itertools.count(1)


class HookBook:
    """Persistent hooks of one engine of this process, and what they saved.

    A persistent hook runs on every request that this process sends after it was registered.
    """

    books: ClassVar[WeakValueDictionary[int, HookBook]] = WeakValueDictionary()
    """By number, which sealed requests carry; an engine keeps its own, and what stands in it."""

    def __init__(self, facts: EngineFacts, *, most_bytes: int, n_processes: int = 1) -> None:
        self._facts = facts
        self._most = most_bytes
        self._n_processes = n_processes
        self._lock = threading.Lock()
        self._hooks: list[tuple[str, Hook]] = []
        self._results: dict[str, dict[str, Any]] = {}
        self._n_bytes = 0
        self.number = next(_numbers)
        HookBook.books[self.number] = self

    @property
    def hooks(self) -> list[tuple[str, Hook]]:
        """Names that workers know, and hooks, in the order in which they run."""
        with self._lock:
            return list(self._hooks)

    @classmethod
    def of(cls, engine: Any, no_leave: str) -> HookBook:
        """That of an engine; else says that it is not served, or runs no code."""
        processor = getattr(engine, "input_processor", None)
        book: HookBook | None = getattr(processor, "inspect_lens_book", None)
        if book is None:
            reason = getattr(processor, "inspect_lens_refusal", None)
            served = f"hooks: the lens does not serve this engine: {reason}"
            raise UnsupportedError(served if reason else no_leave)
        return book

    async def act(self, tell: TellHooks, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Do one of `HOOK_ACTIONS`, as a client asks for it."""
        allowed = _FIELDS.get(action, ())
        if unknown := sorted(set(body) - set(allowed)):
            raise SpecError(
                f"the body: {shown(unknown[0])} is no field of it; allowed are "
                f"{', '.join(allowed) or 'none'}"
            )
        if action == "collect":
            return {"results": self.results()}
        done: dict[str, Any] = {"status": "ok"}
        if action == "register":
            if not isinstance(body.get("hooks"), list):
                raise SpecError("hooks: a list of hooks is wanted")
            hooks = parse_hooks(body["hooks"], where="hooks")
            prefetch = _names(body, "prefetch_params") if body.get("prefetch_params") else []
            await self.register(tell, hooks, prefetch)
            return done | {"count": len(hooks)}
        if action == "prefetch":
            names = _names(body, "params")
            await self.manage(tell, action, names)
            return done | {"params": names}
        if action == "clear":
            await self.clear(tell)
        elif action == "clear_results":
            self.clear_results()
        else:
            await self.manage(tell, action)
        return done

    async def register(
        self, tell: TellHooks, hooks: Sequence[Hook], prefetch: Sequence[str] = ()
    ) -> None:
        """Judge hooks, and let further requests run them."""
        check_hooks(tuple(hooks), self._facts, "hooks")
        if self._facts.is_speculative:
            raise UnsupportedError(
                "hooks beside speculative decoding, whose rejected drafts would be seen as tokens"
            )
        if self._n_processes > 1:
            raise UnsupportedError(
                f"persistent hooks with {self._n_processes} API server processes, of which one "
                "would know them; start with --api-server-count 1, or send hooks with requests"
            )
        named = {f"{next(_numbers)}:{hook.fn.sha256[:16]}": hook for hook in hooks}
        if prefetch:
            await self.manage(tell, "prefetch", prefetch)
        # The workers first: a hook that runs is known everywhere.
        packed = {name: packed_hook(hook) for name, hook in named.items()}
        try:
            await self.manage(tell, "register", packed)
        except BaseException:
            await tell("unregister", list(named))  # some workers may have some of them
            raise
        with self._lock:
            self._hooks += named.items()

    async def clear(self, tell: TellHooks) -> None:
        """Forget hooks and results; then the workers forget them, too."""
        with self._lock:
            names = [name for name, _ in self._hooks]
            self._hooks = []
            self._results, self._n_bytes = {}, 0
        await self.manage(tell, "unregister", names)

    async def manage(self, tell: TellHooks, action: str, payload: Any = None) -> None:
        """Have all workers do something; raises what went wrong in one of them."""
        raise_first(await tell(action, payload))

    def clear_results(self) -> None:
        with self._lock:
            self._results, self._n_bytes = {}, 0

    def results(self) -> dict[str, dict[str, Any]]:
        """What persistent hooks saved, of finished requests: by request, by index of the hook."""
        with self._lock:
            return dict(self._results)

    def keep(self, key: str, saved: dict[str, Any]) -> None:
        """Keep what persistent hooks saved of a request, if they saved anything."""
        if not any(saved.values()):
            return  # hooks that only edit would fill the memory of a server that nobody asks
        size = len(key) + _nbytes(saved)
        with self._lock:
            if self._n_bytes + size > self._most:
                raise CaptureError(
                    f"persistent hooks have saved {self._n_bytes} bytes and nobody "
                    "has cleared them: call clear_hook_results (POST /v1/hooks/clear_results) "
                    "between turns, save less, or raise INSPECT_LENS_HOOK_BYTES"
                )
            self._results[key] = saved
            self._n_bytes += size


def _names(body: Mapping[str, Any], field: str) -> list[str]:
    names = body.get(field)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SpecError(f"{field}: a list of names of parameters is wanted")
    return names


def seal_eager(request: LensRequest, book: HookBook | None) -> dict[str, Any] | None:
    """What the workers need of a request whose steps run eagerly."""
    persistent = [] if book is None else book.hooks
    if not persistent and not request.hooks:
        return None
    hooks = [*(hook for _, hook in persistent), *request.hooks]
    layers = {layer for hook in hooks for layer in hook.layer_indices}
    digest = hashlib.sha256("|".join(hook.content for hook in hooks).encode())
    return {
        "own": [packed_hook(hook) for hook in request.hooks],
        "persistent": [name for name, _ in persistent],
        "n_layers": len(layers),
        "hook_layers": sorted(layers),
        # For this process; workers do not look at these.
        "book": 0 if book is None else book.number,
        "hash": digest.hexdigest(),
        "sha256": {
            OWN: [hook.fn.sha256 for hook in request.hooks],
            PERSISTENT: [hook.fn.sha256 for _, hook in persistent],
        },
    }


def packed_hook(hook: Hook) -> dict[str, Any]:
    """A hook as plain data that msgpack carries."""
    return {
        "data": hook.fn.data,
        "name": hook.fn.name,
        "sha256": hook.fn.sha256,
        "layers": list(hook.layer_indices),
        "pre": hook.pre,
    }


class EagerResults:
    """What hooks saved for one finished request."""

    def __init__(self, sealed: Mapping[str, Any], gathered: Gathered) -> None:
        self.saved: dict[str, Any] | None = gathered.parts[OWN] if sealed["own"] else None
        """By index of the hook; None where the request brought none."""
        if self.saved is not None:
            # A hook that saved nothing, or was not called, has an empty place.
            self.saved = {str(i): self.saved.get(str(i), {}) for i in range(len(sealed["own"]))}
        self.persistent: dict[str, Any] = {
            str(i): gathered.parts[PERSISTENT].get(str(i), {})
            for i in range(len(sealed["persistent"]))
        }
        self.hook_receipt: HookReceipt | None = None
        if sealed["own"] or sealed["persistent"]:
            self.hook_receipt = HookReceipt(
                functions=tuple(sealed["sha256"][OWN]),
                persistent=tuple(sealed["sha256"][PERSISTENT]),
                layers=tuple(sealed["hook_layers"]),
                n_tokens=gathered.n_fed,
                n_edited=gathered.n_edited,
            )


def take_eager(
    collector: Collector, key: str, packed: Mapping[str, Any], *, n_fed: int, timeout_s: float
) -> EagerResults | None:
    """Wait for what the workers saved of a finished request."""
    sealed = packed.get(EAGER_KEY)
    if sealed is None:
        return None
    gathered = collector.take_saved(key, n_fed=n_fed, timeout_s=timeout_s)
    if gathered is None:
        return None
    results = EagerResults(sealed, gathered)
    book = HookBook.books.get(sealed["book"])
    if book is not None and sealed["persistent"]:
        book.keep(key, results.persistent)
    return results


def live_values(value: Any) -> Any:
    if isinstance(value, TensorData):
        return to_torch(value)
    if isinstance(value, dict):
        return {key: live_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [live_values(item) for item in value]
    return value


def put_eager(completion: Any, results: EagerResults) -> None:
    if results.saved is not None:
        completion.inspect_lens_saved = results.saved
        completion.hook_results = live_values(results.saved)


_OF_A_VALUE = 64
"""Bytes, about, that Python takes for a value, however small."""


def _nbytes(value: Any) -> int:
    inside = 0
    if isinstance(value, TensorData):
        inside = value.nbytes
    elif isinstance(value, dict):
        inside = sum(_nbytes(key) + _nbytes(item) for key, item in value.items())
    elif isinstance(value, list):
        inside = sum(_nbytes(item) for item in value)
    elif isinstance(value, str):
        inside = len(value)
    return _OF_A_VALUE + inside


def raise_first(answers: Sequence[str | None]) -> None:
    problem = next((answer for answer in answers if answer), None)
    if problem is not None:
        raise LensError(problem)
