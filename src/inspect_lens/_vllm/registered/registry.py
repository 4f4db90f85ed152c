"""Probes, steering vectors and lenses that requests refer to by name."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inspect_lens._engine.protocol.envelope import Envelope, uses_of
from inspect_lens._settings import Settings
from inspect_lens.errors import ArtifactError, CapacityError, SpecError
from inspect_lens.lens import is_lens, load_lens
from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import (
    EngineLens,
    EngineProbe,
    LensEntry,
    LensRequest,
    ProbeUse,
    SteeringVector,
    TensorLimits,
    check_name,
    explain,
    shown,
)

from .probe_scores import Reads
from .shared_names import SharedNames

__all__ = ["Given", "Item", "Registry", "parse_item", "parse_shared", "start_items"]

Item = EngineProbe | SteeringVector | LensEntry
"""What a front-end keeps; of a lens, the workers have the tensors."""

Given = EngineProbe | SteeringVector | EngineLens
"""What is given to be registered."""

_WORDS = {EngineProbe: "probe", SteeringVector: "vector", LensEntry: "lens", None: "name"}

_READS_MOST = 64


class Registry:
    """What one front-end process knows by name, or several together."""

    def __init__(
        self, items: Mapping[str, Given] | None = None, settings: Settings | None = None
    ) -> None:
        """Know some names from the start.

        Args:
            items: of the operator, who is not asked for limits.
            settings: limits of what clients add.
        """
        self._settings = settings or Settings()
        self._items: dict[str, Item] = {}
        self._lock = threading.Lock()
        self._shared: SharedNames | None = None
        self.probes: dict[str, EngineProbe] = {}
        """Probes by name; another object after each change, which is never changed itself."""
        self._version = 0
        self._reads: OrderedDict[int, Reads] = OrderedDict()
        """By identity of the uses; of one version."""
        self._reads_version = 0
        self._sealed: OrderedDict[int, Reads] = OrderedDict()
        """By identity of what is sent of the uses."""
        for name, item in (items or {}).items():
            check_name(name)
            self._items[name] = _kept(item)
        self._changed()

    @property
    def is_shared(self) -> bool:
        """Whether other processes hear of changes."""
        return self._shared is not None

    @property
    def version(self) -> int:
        """Another one after each change, by whomever."""
        if self._shared is not None and self._shared.has_changed:
            with self._changing():
                pass
        return self._version

    def share(self, names: SharedNames) -> None:
        """Know what others know from now on, and they what is known here.

        Args:
            names: that the others share. The first process brings its own, which are those of the
                start and so everybody's.
        """
        with self._lock, names.locked():
            if names.is_new:
                for name, item in self._items.items():
                    names.put(name, item)
            self._items = names.read()
            self._changed()
            self._shared = names

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep others from changing names, and know what they have changed."""
        with self._lock, ExitStack() as stack:
            if self._shared is not None:
                stack.enter_context(self._shared.locked())
                if self._shared.has_changed:
                    self._items = self._shared.read()
                    self._changed()
            yield

    def check(self, name: str, item: Given, *, replace: bool = False) -> None:
        """Refuse what `add` would refuse now, before workers are told of it.

        Raises:
            LensError: see `add`.
        """
        with self._changing():
            self._check(name, _kept(item), replace=replace)

    def add(
        self, name: str, item: Given, *, replace: bool = False
    ) -> EngineProbe | LensEntry | None:
        """Register something.

        Args:
            name: for requests.
            item: a probe, a vector or a lens.
            replace: whether the name may stand for something else so far.

        Returns:
            A probe or a lens that was replaced, and that no other name stands for.

        Raises:
            SpecError: the name is empty, or stands for something else; or the item is too large.
            CapacityError: as much is registered as the settings allow, or the disk is full.
        """
        kept = _kept(item)
        with self._changing():
            self._check(name, kept, replace=replace)
            known = self._items.get(name)
            if known is not None and known.reference() == kept.reference():
                return None
            if self._shared is not None:
                self._shared.put(name, kept)
            self._items[name] = kept
            self._changed()
            return self._unused(known)

    def _check(self, name: str, item: Item, *, replace: bool) -> None:
        check_name(name)
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
        if known is None and len(self._items) >= limits.registry_names:
            raise CapacityError(
                f"{len(self._items)} names are registered, and allowed are "
                f"{limits.registry_names}; remove some, or raise INSPECT_LENS_REGISTRY_NAMES"
            )
        if isinstance(item, LensEntry):
            self._check_room(name, item)
            return
        others = sum(_nbytes(i) for n, i in self._items.items() if n != name)
        if others + _nbytes(item) > limits.registry_bytes:
            raise CapacityError(
                f"{name!r} has {_nbytes(item)} bytes, others have {others}, and allowed are "
                f"{limits.registry_bytes}; remove some, or raise INSPECT_LENS_REGISTRY_BYTES"
            )

    def _check_room(self, name: str, lens: LensEntry) -> None:
        """Refuse a lens that does not fit on the devices; one that it replaces is still there."""
        known = {i.sha256: i.nbytes for i in self._items.values() if isinstance(i, LensEntry)}
        others = sum(n for sha256, n in known.items() if sha256 != lens.sha256)
        if others + lens.nbytes > self._settings.lens_bytes:
            raise CapacityError(
                f"lens {name!r} has {lens.nbytes} bytes, other lenses have {others}, and allowed "
                f"are {self._settings.lens_bytes} on each device; remove some, store it as "
                "float16, or raise INSPECT_LENS_LENS_BYTES"
            )

    def _unused(self, item: Item | None) -> EngineProbe | LensEntry | None:
        """A probe or a lens that was taken out, if no other name stands for it."""
        if not isinstance(item, EngineProbe | LensEntry):
            return None
        left = {i.sha256 for i in self._items.values() if isinstance(i, EngineProbe | LensEntry)}
        return None if item.sha256 in left else item

    def remove(self, name: str) -> EngineProbe | LensEntry | None:
        """Forget a name.

        Returns:
            A probe or a lens that no other name stands for, which the workers may forget.

        Raises:
            SpecError: it is not registered.
        """
        with self._changing():
            if name not in self._items:
                raise SpecError(self._unknown(name))
            item = self._items.pop(name)
            self._changed()
            if self._shared is not None:
                self._shared.drop(name)
            return self._unused(item)

    def describe(self) -> dict[str, dict[str, Any]]:
        """What is registered: kind, hash, layers."""
        self.version  # noqa: B018 - hears of others' changes
        return {name: item.reference() for name, item in sorted(self._items.items())}

    def resolve(self, request: LensRequest) -> LensRequest:
        """Put vectors and lenses in the place of their names, and check the names of probes.

        Raises:
            SpecError: a name is not registered, or stands for another kind; or a lens does not
                translate a layer.
        """
        if request.lens is not None and (name := request.lens.name) is not None:
            entry = self._items.get(name)
            if not isinstance(entry, LensEntry):
                raise SpecError(f"lens.name: {self._unknown(name, LensEntry)}")
            request = request.model_copy(update={"lens": entry.resolve(request.lens)})
        if not request.steer_named and not request.probes:
            return request
        for use in request.probes:
            if not isinstance(self._items.get(use.name), EngineProbe):
                raise SpecError(f"probes: {self._unknown(use.name, EngineProbe)}")
        vectors = []
        for named in request.steer_named:
            vector = self._items.get(named.name)
            if not isinstance(vector, SteeringVector):
                raise SpecError(f"steer_named: {self._unknown(named.name, SteeringVector)}")
            try:
                vectors.append(named.apply(vector))
            except ValueError as error:
                raise SpecError(f"steer_named: {named.name!r}: {error}") from None
        if not vectors:
            return request
        return request.model_copy(update={"steer": (*request.steer, *vectors), "steer_named": ()})

    def reads(self, uses: tuple[ProbeUse, ...]) -> Reads:
        """How uses of registered probes are read; the same object for the same uses.

        Args:
            uses: of a request; equal requests share theirs (`parse_extra_args`).

        Raises:
            SpecError: a name is not registered any more; `resolve` has looked before.
        """
        # As they were judged: what others change meanwhile is for the next request.
        version, probes = self._version, self.probes
        if version != self._reads_version:
            self._reads.clear()
            self._reads_version = version
        known = self._reads.get(id(uses))
        if known is not None:
            return known
        made = Reads(uses, probes)
        # Both are kept by what they name, so that nothing else gets their identity.
        for table, key in ((self._reads, id(made.uses)), (self._sealed, id(made.wire))):
            table[key] = made
            if len(table) > _READS_MOST:
                table.popitem(last=False)
        return made

    def reads_of(self, packed: Mapping[str, Any]) -> Reads:
        """How the probes of a sealed request are read; they may have been removed since.

        Raises:
            SpecError: they were, long ago.
        """
        text = uses_of(packed)
        assert text is not None
        known = self._sealed.get(id(text))
        if known is not None:
            return known
        uses = LensRequest(probes=json.loads(text)).probes
        probes = [self.probes.get(use.name) for use in uses]
        hashes = [None if probe is None else probe.sha256 for probe in probes]
        sealed = Envelope.unpack(packed).probes
        if sealed is None or hashes != list(sealed.names):
            raise SpecError("probes: a probe was removed while the request was on its way")
        return self.reads(uses)

    def _changed(self) -> None:
        self.probes = {n: i for n, i in self._items.items() if isinstance(i, EngineProbe)}
        self._version += 1

    def _unknown(self, name: str, kind: type[Item] | None = None) -> str:
        known = [n for n, i in self._items.items() if kind is None or isinstance(i, kind)]
        return (
            f"no {_WORDS[kind]} is registered as {name!r}; registered are "
            f"{sorted(known) or 'none'}; register it with POST /v1/inspect_lens/registry, "
            "inspect_lens.engine.register or INSPECT_LENS_REGISTER"
        )


def _kept(item: Given) -> Item:
    """What is kept of something that is registered."""
    return item.entry if isinstance(item, EngineLens) else item


def _nbytes(item: Item) -> int:
    if isinstance(item, LensEntry):
        return 0  # of the workers; they have a limit of their own
    if isinstance(item, EngineProbe):
        return sum(tensor.nbytes for tensor in item.tensors.values())
    return item.activations.nbytes


def parse_item(body: Mapping[str, Any], limits: TensorLimits | None = None) -> tuple[str, Given]:
    """Read `{"name": …, "probe": {…}}`, or `vector` or `lens` in the place of `probe`.

    Args:
        body: the JSON.
        limits: of the engine; tensors that it has no use for are not unpacked.

    Raises:
        SpecError: anything else.
    """
    kinds: dict[str, type[Given]] = {
        "probe": EngineProbe,
        "vector": SteeringVector,
        "lens": EngineLens,
    }
    given = [kind for kind in kinds if kind in body]
    if len(given) != 1 or set(body) - {"name", *kinds}:
        raise SpecError(
            f"the body has {shown(sorted(map(str, body)))}; it has to have 'name', and one "
            "of 'probe', 'vector' and 'lens'"
        )
    name = check_name(body.get("name"))
    context = None if limits is None else limits.context
    try:
        return name, kinds[given[0]].model_validate(body[given[0]], context=context)
    except ValidationError as error:
        raise SpecError(f"{given[0]}: {explain(error)}") from None


def parse_shared(body: Mapping[str, Any]) -> tuple[str, Item]:
    """Read what another front-end of the same engine keeps of a registered name."""
    if "entry" in body:
        return body["name"], LensEntry.model_validate(body["entry"])
    name, item = parse_item(body)
    return name, _kept(item)


def start_items(setting: str) -> dict[str, Given]:
    """Read what INSPECT_LENS_REGISTER names.

    Args:
        setting: `name=path` pairs, separated by commas; a path is the folder of a trained probe
            or of a fitted lens, or a JSON file as `parse_item` reads it.

    Returns:
        The items by name.

    Raises:
        SpecError: a pair or a file that cannot be read.
    """
    items: dict[str, Given] = {}
    for pair in filter(None, (part.strip() for part in setting.split(","))):
        name, equals, path = pair.partition("=")
        if not equals:
            raise SpecError(f"INSPECT_LENS_REGISTER: {pair!r}; give name=path, comma-separated")
        try:
            if is_lens(path):
                items[name] = load_lens(path).for_engine()
            elif Path(path).is_dir():
                probe = load_probe(path)
                if not isinstance(probe, Probe):
                    raise ValueError(f"a {type(probe).__name__} has no form for the engine yet")
                items[name] = probe.for_engine()
            else:
                body = json.loads(Path(path).read_text(encoding="utf-8"))
                items[name] = parse_item({"name": name, **body})[1]
        except (OSError, ValueError, ArtifactError) as error:
            raise SpecError(f"INSPECT_LENS_REGISTER: {name}={path}: {error}") from None
    return items
