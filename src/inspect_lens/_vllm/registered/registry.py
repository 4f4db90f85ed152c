"""Probes, edits and lenses that requests refer to by name."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from inspect_lens._engine.protocol.messages import Envelope, uses_of
from inspect_lens._engine.protocol.readouts import removed
from inspect_lens._settings import Settings
from inspect_lens.errors import CapacityError, SpecError
from inspect_lens.spec import (
    AutoencoderEntry,
    Edit,
    EngineConfig,
    EngineEdits,
    EngineProbe,
    LensEntry,
    LensRequest,
    Numerics,
    Registrable,
    RequestPart,
    ServerConfig,
    Splice,
    WeightsEntry,
    check_name,
)

from .contents import (
    SERVER_NAME,
    WORDS,
    Item,
    Uses,
    hash_at_workers,
    kept_of,
    nbytes_of,
    start_reference,
)
from .probe_scores import Reads, read_uses
from .shared_names import SharedNames

_LONGEST_S = 60.0
"""Between two attempts to tell workers what they need no more."""


def _check_name(name: str, item: Registrable | Item) -> None:
    if name != SERVER_NAME or not isinstance(item, ServerConfig):
        check_name(name)


class Registry:
    """What one front-end process knows by name, or several together."""

    def __init__(
        self, items: Mapping[str, Registrable] | None = None, settings: Settings | None = None
    ) -> None:
        self._settings = settings or Settings()
        self._items: dict[str, Item] = {}
        self._references: dict[str, str] = {}
        """Of each name to its content at the workers; see `contents`."""
        self._left: list[tuple[str, str]] = []
        """References that no name has any more, and the hashes of their contents."""
        self.pause_s, self._not_before = 0.0, 0.0
        """Where workers could not be told of them: how long until they are to be told again."""
        self._uses = Uses()
        self._lock = threading.Lock()
        # Of its own: whoever waits for something else must not keep all requests waiting.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="inspect-lens-names")
        self._shared: SharedNames | None = None
        self.probes: dict[str, EngineProbe] = {}
        """Probes by name; another object after each change, which is never changed itself."""
        self.numerics: Numerics | None = None
        """Of the engine that this process learned of last."""
        self._configs: tuple[str, ...] = ()
        self._version = 0
        for name, item in (items or {}).items():
            _check_name(name, item)
            self._items[name] = kept_of(item)
            self._references[name] = start_reference(name)
        self._changed()

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    @property
    def version(self) -> int:
        """Another one after each change, by whomever."""
        if self.is_behind:
            with self._changing():
                pass
        return self._version

    @property
    def is_behind(self) -> bool:
        """Whether others have changed what is not known yet."""
        return self._shared is not None and self._shared.has_changed

    async def catch_up(self) -> None:
        """Know what others have changed, which lies in files that an event loop must not wait for.

        Without this `version` reads them.
        """
        if self.is_behind:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._reader, lambda: self.version)

    def share(self, names: SharedNames) -> None:
        """Know what others know from now on, and they what is known here."""
        with self._lock, names.locked():
            if names.is_new:
                for name, item in self._items.items():
                    names.put(name, item, self._references[name])
            self._read(names)
            self._shared, self._uses = names, names.uses

    def _read(self, names: SharedNames) -> None:
        found = names.read()
        self._items = {name: item for name, (item, _) in found.items()}
        self._references = {name: reference for name, (_, reference) in found.items()}
        self._changed()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep others from changing names, and know what they have changed."""
        with self._lock, ExitStack() as stack:
            if self._shared is not None:
                stack.enter_context(self._shared.locked())
                if self._shared.has_changed:
                    self._read(self._shared)
            yield

    def check(self, name: str, item: Registrable, *, replace: bool = False) -> None:
        """Refuse what `add` would refuse now, before workers are told of it."""
        with self._changing():
            self._check(name, kept_of(item), replace=replace)

    def add(
        self, name: str, item: Registrable, *, replace: bool = False, reference: str = ""
    ) -> None:
        """Register something, and leave the reference that is not needed any more."""
        kept = kept_of(item)
        with self._changing():
            self._check(name, kept, replace=replace)
            known = self._items.get(name)
            # Also of the same content: workers of an engine that came later know this one alone.
            if self._shared is not None:
                self._shared.put(name, kept, reference)
            self.leave(self._references.get(name, ""), hash_at_workers(known))
            # A new one: others may be reading that which was.
            self._items = {**self._items, name: kept}
            self._references[name] = reference
            self._changed()

    def _check(self, name: str, item: Item, *, replace: bool) -> None:
        _check_name(name, item)
        limits, known = self._settings, self._items.get(name)
        if isinstance(item, EngineProbe) and item.columns > limits.probe_columns:
            raise SpecError(
                f"probe {name!r}: {item.columns} columns; allowed are {limits.probe_columns}; "
                "register fewer, or raise INSPECT_LENS_PROBE_COLUMNS"
            )
        # The reference has all that counts: hash, layers, strength, threshold.
        if known is not None and known.reference() == item.reference():
            return
        if known is not None and not replace:
            raise SpecError(
                f"{name!r} is registered with other content; choose another name, or replace it "
                "(replace=true)"
            )
        self._check_unused(name)
        if isinstance(item, EngineConfig):
            self._check_names(item)
        elif isinstance(item, EngineEdits):
            self.edits_of(item)
        if known is None and len(self._items) >= limits.registry_names:
            raise CapacityError(
                f"{len(self._items)} names are registered, and allowed are "
                f"{limits.registry_names}; remove some, or raise INSPECT_LENS_REGISTRY_NAMES"
            )
        if isinstance(item, WeightsEntry):
            self._check_room(name, item)
            return
        others = sum(nbytes_of(i) for n, i in self._items.items() if n != name)
        if others + nbytes_of(item) > limits.registry_bytes:
            raise CapacityError(
                f"{name!r} has {nbytes_of(item)} bytes, others have {others}, and allowed are "
                f"{limits.registry_bytes}; remove some, or raise INSPECT_LENS_REGISTRY_BYTES"
            )

    def _check_unused(self, name: str) -> None:
        """Refuse to change an item that a configuration or edits refer to by name."""
        # What the server does is told of first.
        for user, item in sorted(self._items.items(), key=lambda one: one[0] != SERVER_NAME):
            if not isinstance(item, EngineConfig | EngineEdits) or name not in item.names:
                continue
            if user == SERVER_NAME:
                raise SpecError(
                    f"{name!r} is used by what this server does to all requests; it can be "
                    "replaced or removed once that no longer names it (PUT or DELETE "
                    "/v1/inspect_lens/server)"
                )
            what = "configuration" if isinstance(item, EngineConfig) else "edits"
            raise SpecError(
                f"{name!r} is used by the {what} {user!r}; it can be replaced or removed once that "
                "no longer names it, or is removed"
            )

    def _check_names(self, config: EngineConfig) -> None:
        """Refuse a configuration that names what is not there."""
        self.edits_of(config)
        self._check_probes(config)

    def _check_probes(self, part: RequestPart) -> None:
        for use in part.probes:
            if not isinstance(self._items.get(use.name), EngineProbe):
                raise SpecError(f"probes: {self._unknown(use.name, EngineProbe)}")

    def _check_room(self, name: str, item: WeightsEntry) -> None:
        """Refuse what does not fit on the devices; what it replaces is still there."""
        known = {i.sha256: i.nbytes for i in self._items.values() if isinstance(i, WeightsEntry)}
        others = sum(n for sha256, n in known.items() if sha256 != item.sha256)
        if others + item.nbytes > self._settings.lens_bytes:
            raise CapacityError(
                f"{WORDS[type(item)]} {name!r} has {item.nbytes} bytes, other lenses and "
                f"autoencoders have {others}, and allowed are {self._settings.lens_bytes} on each "
                "device; remove some, store it as float16, or raise INSPECT_LENS_LENS_BYTES"
            )

    def remove(self, name: str) -> None:
        """Forget a name, and leave its reference."""
        with self._changing():
            if name not in self._items:
                raise SpecError(self._unknown(name))
            self._check_unused(name)
            if self._shared is not None:
                self._shared.drop(name)
            self.leave(self._references.pop(name), hash_at_workers(self._items[name]))
            self._items = {known: item for known, item in self._items.items() if known != name}
            self._changed()

    def leave(self, reference: str, sha256: str | None) -> None:
        """Note that no name has a reference any more."""
        if sha256 is not None:
            self._left.append((reference, sha256))

    @property
    def has_left(self) -> bool:
        """Whether workers have to be told of references that were left."""
        return bool(self._left)

    def take_unused(self) -> list[tuple[str, str]]:
        """References that were left, and the hashes of their contents, which no request uses."""
        if time.monotonic() < self._not_before:
            return []
        found = [one for one in self._left if not self._uses.any(one[1])]
        for one in found:
            self._left.remove(one)
        return found

    def put_off(self) -> None:
        """Have references that were left wait, each time for longer."""
        self.pause_s = min(2 * self.pause_s or 0.2, _LONGEST_S)
        self._not_before = time.monotonic() + self.pause_s

    def hold(self, hashes: tuple[str, ...]) -> Callable[[], None]:
        """Keep what a request uses at the workers until it is over."""
        self._uses.change(hashes, 1)
        # Counted first: whoever removes a name in another process sees it, or is seen here.
        self.version  # noqa: B018
        gone = set[str]()
        if not self._at_workers.issuperset(hashes):
            gone = set(hashes) - self._at_workers - {sha256 for _, sha256 in tuple(self._left)}
        if gone:
            self._uses.change(hashes, -1)
            raise removed("the request", [sha256[:12] for sha256 in sorted(gone)])
        return partial(self._uses.change, hashes, -1)

    def describe(self) -> dict[str, dict[str, Any]]:
        """What is registered: kind, hash, layers."""
        self.version  # noqa: B018 - hears of others' changes
        items = sorted(self._items.items())
        return {name: self.reference_of(item) for name, item in items if name != SERVER_NAME}

    def reference_of(self, item: Item | Registrable) -> dict[str, Any]:
        """The short form for logs; a configuration's hash is that of `sha256_of`."""
        found = item.reference()
        return found | {"sha256": self.sha256_of(item)} if isinstance(item, EngineConfig) else found

    def sha256_of(self, config: EngineConfig) -> str:
        """Of all that a configuration does, with the contents of what it names."""
        names = config.names
        for use in config.edits_named:
            if isinstance(item := self._items.get(use.name), EngineEdits):
                names |= item.names
        named = {name: self._items.get(name) for name in names}
        contents = {name: item and item.reference() for name, item in named.items()}
        form = json.dumps([config.sha256, contents], sort_keys=True)
        return hashlib.sha256(form.encode()).hexdigest()

    def resolve(self, request: LensRequest) -> LensRequest:
        """Put a lens in the place of its name, and check the names of probes; see `compose`."""
        if request.lens is not None and (name := request.lens.name) is not None:
            entry = self._items.get(name)
            if not isinstance(entry, LensEntry):
                raise SpecError(f"lens.name: {self._unknown(name, LensEntry)}")
            request = request.model_copy(update={"lens": entry.resolve(request.lens)})
        self._check_probes(request)
        return request

    @property
    def server(self) -> ServerConfig | None:
        """What acts on all requests; None where nothing does."""
        if self._shared is not None:
            self.version  # noqa: B018 - hears of others' changes
        return self._server

    @property
    def configs(self) -> tuple[str, ...]:
        """Names of configurations, which are models of their own to clients."""
        if self._shared is not None:
            self.version  # noqa: B018 - hears of others' changes
        return self._configs

    def config(self, name: str) -> EngineConfig:
        """A registered configuration."""
        found = self._items.get(name)
        if not isinstance(found, EngineConfig) or name == SERVER_NAME:
            raise SpecError(f"configs: {self._unknown(name, EngineConfig)}")
        return found

    def edits_of(self, part: RequestPart | EngineEdits, where: str = "") -> tuple[Edit, ...]:
        """Edits of a request or a configuration, those that it names first."""
        found: list[Edit] = []
        for named in () if isinstance(part, EngineEdits) else part.edits_named:
            item = self._items.get(named.name)
            if not isinstance(item, EngineEdits):
                raise SpecError(f"{where}edits_named: {self._unknown(named.name, EngineEdits)}")
            try:
                edits = named.apply(item.edits)
            except SpecError as error:
                raise SpecError(f"{where}edits_named: {error}") from None
            found += self._looked_up(edits, f"{where}edits_named: {named.name!r}: ")
        return (*found, *self._looked_up(part.edits, where))

    def _looked_up(self, edits: Sequence[Edit], where: str) -> Iterator[Edit]:
        """Edits with what the names of their autoencoders stand for."""
        for i, edit in enumerate(edits):
            if isinstance(edit, Splice):
                entry = self._items.get(edit.sae)
                if not isinstance(entry, AutoencoderEntry):
                    unknown = self._unknown(edit.sae, AutoencoderEntry)
                    raise SpecError(f"{where}edits[{i}].sae: {unknown}")
                try:
                    edit = edit.resolved(entry)
                except SpecError as error:
                    raise SpecError(f"{where}edits[{i}].{error}") from None
            yield edit

    def reads_of(self, packed: Mapping[str, Any]) -> Reads:
        """How the probes of a sealed request are read; they may have been removed since."""
        if (known := getattr(packed, "reads", None)) is not None:
            return cast("Reads", known)
        text = uses_of(packed)
        assert text is not None
        uses = read_uses(text)
        probes = [self.probes.get(use.name) for use in uses]
        hashes = [None if probe is None else probe.sha256 for probe in probes]
        sealed = Envelope.unpack(packed).probes
        if sealed is None or hashes != list(sealed.names):
            known = zip(uses, hashes, () if sealed is None else sealed.names, strict=False)
            raise removed("probes", [use.name for use, now, then in known if now != then])
        return Reads(uses, self.probes, self.numerics)

    def _changed(self) -> None:
        self.probes = {n: i for n, i in self._items.items() if isinstance(i, EngineProbe)}
        self._at_workers = {hash_at_workers(item) for item in self._items.values()}
        self._configs = tuple(
            n for n, i in sorted(self._items.items())
            if isinstance(i, EngineConfig) and n != SERVER_NAME
        )  # fmt: skip
        server = self._items.get(SERVER_NAME)
        self._server = server if isinstance(server, ServerConfig) else None
        self._version += 1

    def _unknown(self, name: str, kind: type[Item] | None = None) -> str:
        if name == SERVER_NAME:
            return "nothing is set for all requests"
        here = (one for one in self._items.items() if one[0] != SERVER_NAME)
        known = [n for n, i in here if kind is None or isinstance(i, kind)]
        verb = "are" if kind is EngineEdits else "is"
        return (
            f"no {WORDS[kind]} {verb} registered as {name!r}; registered are "
            f"{sorted(known) or 'none'}; register it with POST /v1/inspect_lens/registry, "
            "inspect_lens.engine.register or INSPECT_LENS_REGISTER"
        )
