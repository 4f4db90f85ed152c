"""What can be registered: its kinds, how it is read, and who refers to what workers keep by hash.

A name refers to its content through a *reference*, an id of its own that workers know. They keep
a content as long as any reference to it is left. So two clients that replace one name at once
cannot take each other's content away, in whatever order workers hear of it. Requests under way
count, too: a reference that no name has any more is given up when none of them uses the content.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, LensError, SpecError
from inspect_lens.lens import load_lens
from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import (
    AutoencoderEntry,
    EditBase,
    EngineAutoencoder,
    EngineConfig,
    EngineEdits,
    EngineLens,
    EngineProbe,
    LensEntry,
    Registrable,
    ServerConfig,
    TensorLimits,
    WeightsEntry,
    check_counts,
    check_name,
    judging,
    shown,
)

Item = EngineProbe | EngineEdits | WeightsEntry | EngineConfig
"""What a front-end keeps."""

WORDS: dict[type[Item] | None, str] = {
    EngineProbe: "probe",
    EngineEdits: "edits",
    LensEntry: "lens",
    AutoencoderEntry: "sae",
    EngineConfig: "config",
    None: "name",
}
SERVER_NAME: Final = "@server"
"""Stands for what acts on all requests; no client can register or name it."""
_LENS_FILE = "lens.safetensors"
"""As `Lens.save` names it."""


def kept_of(item: Registrable) -> Item:
    if isinstance(item, EditBase):
        return EngineEdits(edits=(item,))
    return item.entry if isinstance(item, EngineLens | EngineAutoencoder) else item


def nbytes_of(item: Item) -> int:
    """Bytes that it takes of this process, with all its tensors."""
    if isinstance(item, WeightsEntry):
        return 0  # of the workers; they have a limit of their own
    if isinstance(item, EngineProbe):
        return sum(tensor.nbytes for tensor in item.tensors.values())
    return item.nbytes


def parse_item(
    body: Mapping[str, Any], limits: TensorLimits | None = None
) -> tuple[str, Registrable]:
    """Read `{"name": …, "probe": {…}}`, or another kind in the place of `probe`."""
    kinds: dict[str, type[Registrable]] = {
        "probe": EngineProbe,
        "edits": EngineEdits,
        "lens": EngineLens,
        "sae": EngineAutoencoder,
        "config": EngineConfig,
    }
    given = [kind for kind in kinds if kind in body]
    if len(given) != 1 or set(body) - {"name", *kinds}:
        raise SpecError(
            f"the body has {shown(sorted(map(str, body)))}; it has to have 'name', and one "
            "of 'probe', 'edits' (of which a vector is one), 'lens', 'sae' and 'config'"
        )
    name = check_name(body.get("name"))
    context = None if limits is None else limits.context
    check_counts(body[given[0]], field=given[0])
    with judging(given[0]):
        return name, kinds[given[0]].model_validate(body[given[0]], context=context)


def parse_shared(body: Mapping[str, Any]) -> tuple[str, Item]:
    """Read what another front-end of the same engine keeps of a registered name."""
    if "entry" in body:
        return body["name"], LensEntry.model_validate(body["entry"])
    if "sae_entry" in body:
        return body["name"], AutoencoderEntry.model_validate(body["sae_entry"])
    if "server" in body:
        return SERVER_NAME, ServerConfig.model_validate(body["server"])
    name, item = parse_item(body)
    return name, kept_of(item)


def start_items(setting: str) -> dict[str, Registrable]:
    items: dict[str, Registrable] = {}
    for pair in filter(None, (part.strip() for part in setting.split(","))):
        name, equals, path = pair.partition("=")
        if not equals:
            raise SpecError(f"INSPECT_LENS_REGISTER: {pair!r}; give name=path, comma-separated")
        try:
            if Path(path).name == _LENS_FILE or (Path(path) / _LENS_FILE).is_file():
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


if TYPE_CHECKING:
    from .registry import Registry

N_COUNTS = 1024
"""Counters of a process; contents that share one are kept a little longer."""

Result = TypeVar("Result")

Tell = Callable[[str, "Registrable | None"], Awaitable[Sequence[object]]]
"""Tells all workers of a reference to a content, or with None that there is none any more."""


def start_reference(name: str) -> str:
    """The reference of a name that all processes read at start."""
    return f"start:{name}"


def hash_at_workers(item: Item | Registrable | None) -> str | None:
    """Hash under which workers keep it; None where it comes with each request."""
    if isinstance(item, EngineProbe | EngineLens | EngineAutoencoder | WeightsEntry):
        return item.sha256
    return None


def read_kept(item: Mapping[str, Any]) -> EngineProbe | EngineLens | EngineAutoencoder:
    """Read what workers keep, as a front-end sends it."""
    for kind in (EngineLens, EngineAutoencoder):
        if item.get("kind") in kind.shapes:
            return kind.model_validate(item)
    return EngineProbe.model_validate(item)


class _Store(Protocol):
    def add(self, item: Any, /) -> None: ...

    def remove(self, sha256: str, /) -> None: ...


class WorkerContents:
    """Contents of a worker by hash, with the references to them."""

    def __init__(self, probes: _Store, lenses: _Store) -> None:
        self._stores = {EngineProbe: probes, EngineLens: lenses, EngineAutoencoder: lenses}
        self._of: dict[str, tuple[_Store, str]] = {}

    def add(self, reference: str, item: Registrable) -> None:
        """Keep a content for a reference; vectors and edits come with requests."""
        sha256, store = hash_at_workers(item), self._stores.get(type(item))
        if store is not None and sha256 is not None:
            store.add(item)
            self._of[reference] = store, sha256

    def remove(self, reference: str) -> None:
        """Give a reference up; the last one to a content takes it along. Twice is fine."""
        gone = self._of.pop(reference, None)
        if gone is not None and gone not in self._of.values():
            gone[0].remove(gone[1])


class Uses:
    """How many requests under way use each content, of all processes that share a table."""

    def __init__(self, table: NDArray[np.int32] | None = None, row: int = 0) -> None:
        """Count in a row of a table, (processes, `N_COUNTS`); by default in one of its own."""
        self._table = np.zeros((1, N_COUNTS), np.int32) if table is None else table
        self._row = self._table[row]
        self._lock = threading.Lock()

    def change(self, hashes: Iterable[str], by: int) -> None:
        """Count requests of this process."""
        with self._lock:
            for sha256 in hashes:
                self._row[_column(sha256)] += by

    def any(self, sha256: str) -> bool:
        """Whether a request of any process uses a content."""
        return bool(self._table[:, _column(sha256)].any())


def _column(sha256: str) -> int:
    return int(sha256[:8], 16) % N_COUNTS


async def give_name(
    front: Any, tell: Tell, name: str, item: Registrable, *, replace: bool = False
) -> None:
    """Let a name stand for something, which all workers know before anybody can use it."""
    front.check(name, item, replace=replace)
    reference, sha256 = secrets.token_hex(16), hash_at_workers(item)
    try:
        if sha256 is not None:
            _raise_first(await tell(reference, item))
        front.register(name, item, replace=replace, reference=reference)
    except BaseException:
        # Some workers may have had room for it.
        front.registry.leave(reference, sha256)
        await forget_unused(front.registry, tell)
        raise
    await forget_unused(front.registry, tell)


async def take_name(front: Any, tell: Tell, name: str) -> None:
    """Let a name stand for nothing; requests under way keep what they use."""
    front.unregister(name)
    await forget_unused(front.registry, tell)


async def forget_unused(registry: Registry, tell: Tell) -> None:
    """Tell workers of references that no name has and no request needs any more."""
    for reference, sha256 in registry.take_unused():
        try:
            await tell(reference, None)
        except BaseException:
            registry.leave(reference, sha256)
            raise


def tell_through(engine: Any) -> Tell:
    """Tell the workers of an engine of this process, an `LLM` or what it steps."""

    async def tell(reference: str, item: Registrable | None) -> Sequence[object]:
        wire = None if item is None else item.model_dump(mode="json")
        answers: Sequence[object] = engine.collective_rpc(
            "inspect_lens_register", args=(reference, wire)
        )
        return answers

    return tell


def at_once(work: Coroutine[Any, Any, Result]) -> Result:
    """Run what never waits, as with a `tell` that returns when the workers know."""
    try:
        work.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("it waits")


def _raise_first(answers: Sequence[object]) -> None:
    # One may be without the lens, which its log says.
    if problem := next((answer for answer in answers if isinstance(answer, str)), None):
        raise LensError(problem)
    if not any(answers):
        raise LensError("the lens is not active in this engine's workers; its log says why")
