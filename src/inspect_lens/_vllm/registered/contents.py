"""What can be registered, who refers to what workers keep by hash, and what acts on a request.

A name refers to its content through a *reference*, an id of its own that workers know. They keep
a content as long as any reference to it is left. So two clients that replace one name at once
cannot take each other's content away, in whatever order workers hear of it. Requests under way
count, too: a reference that no name has any more is given up when none of them uses the content.

What acts on a request is the server's tier, configurations that it chose, and what it brought. This
is the one place where they are put together, whatever way the request has come. The order is that
of acting: edits of the server, then those of the configurations as the request names them, then the
request's own, and in each tier registered edits before others. A probe of a configuration is read
as the request says where it names the probe, too. The server's probes are read as the operator
says, beside those of the request. What the operator says stands in a file, which is read here, too.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.untrusted import at_start, parse_json, parse_yaml, read_regular
from inspect_lens._vllm.sinks.alerts import AlertsConfig
from inspect_lens.errors import ArtifactError, LensError, SpecError, UnsupportedError
from inspect_lens.lens import load_lens
from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import (
    AutoencoderEntry,
    Edit,
    EditBase,
    EngineAutoencoder,
    EngineConfig,
    EngineEdits,
    EngineLens,
    EngineProbe,
    LensEntry,
    LensRequest,
    ProbeReceipt,
    ProbeUse,
    Registrable,
    ServerConfig,
    TensorLimits,
    TierReceipt,
    WeightsEntry,
    check_counts,
    check_name,
    judging,
    read_as,
    shown,
)

if TYPE_CHECKING:
    from .registry import Registry

logger = logging.getLogger("vllm.inspect_lens")

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
            raise at_start("INSPECT_LENS_REGISTER: give name=path, comma-separated", pair)
        try:
            if Path(path).name == _LENS_FILE or (Path(path) / _LENS_FILE).is_file():
                items[name] = load_lens(path).for_engine()
            elif Path(path).is_dir():
                probe = load_probe(path)
                if not isinstance(probe, Probe):
                    raise ValueError(f"a {type(probe).__name__} has no form for the engine yet")
                items[name] = probe.for_engine()
            else:
                body = parse_json(read_regular(path))
                if not isinstance(body, dict):
                    raise ValueError(f"a JSON object is wanted, not {shown(body)}")
                items[name] = parse_item({"name": name, **body})[1]
        except (OSError, ValueError, ArtifactError) as error:
            raise at_start(
                f"INSPECT_LENS_REGISTER: {name}: cannot be used", f"{path}: {error}"
            ) from None
    return items


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
        self._row = self._table[row].data  # which is read and written faster, number by number
        self._lock = threading.Lock()

    def change(self, hashes: tuple[str, ...], by: int) -> None:
        """Count requests of this process."""
        with self._lock:
            for column in _columns(hashes):
                self._row[column] += by

    def any(self, sha256: str) -> bool:
        """Whether a request of any process uses a content."""
        return bool(self._table[:, _column(sha256)].any())


def _column(sha256: str) -> int:
    return int(sha256[:8], 16) % N_COUNTS


@lru_cache(maxsize=1024)
def _columns(hashes: tuple[str, ...]) -> list[int]:
    return list(map(_column, hashes))


async def _here(work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    work(*args, **kwargs)


async def give_name(
    front: Any,
    tell: Tell,
    name: str,
    item: Registrable,
    *,
    replace: bool = False,
    run: Callable[..., Awaitable[None]] = _here,
) -> None:
    """Let a name stand for something, which all workers know before anybody can use it.

    Where several processes share names, `run` calls what waits for their files.
    """
    await run(front.check, name, item, replace=replace)
    reference, sha256 = secrets.token_hex(16), hash_at_workers(item)
    try:
        if sha256 is not None:
            _raise_first(await tell(reference, item))
        await run(front.register, name, item, replace=replace, reference=reference)
    except BaseException:
        # Some workers may have had room for it.
        front.registry.leave(reference, sha256)
        await forget_unused(front.registry, tell)
        raise
    await forget_unused(front.registry, tell)


async def take_name(
    front: Any, tell: Tell, name: str, *, run: Callable[..., Awaitable[None]] = _here
) -> None:
    """Let a name stand for nothing; requests under way keep what they use."""
    await run(front.unregister, name)
    await forget_unused(front.registry, tell)


async def forget_unused(registry: Registry, tell: Tell) -> None:
    """Tell workers of references that no name has and no request needs any more.

    Where that fails they keep what is left, and a later call tries again.
    """
    unused = registry.take_unused()
    try:
        while unused:
            await tell(unused[0][0], None)
            del unused[0]
            registry.pause_s = 0.0
    except Exception:
        if not registry.pause_s:
            logger.exception(
                "inspect_lens: workers could not be told of what is removed; it is tried again, "
                "and further failures are not logged"
            )
        registry.put_off()
    finally:
        for one in unused:
            registry.leave(*one)


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


TIERS_KEY = "tiers"
"""Of a packed envelope: `Tiers.packed`."""
Packed: TypeAlias = tuple[int, list[dict[str, object]]]


@dataclass(frozen=True)
class Tiers:
    """What acts beside a request's own."""

    receipts: tuple[TierReceipt, ...] = ()
    n_own_probes: int = 0
    """Probes that the request reads, its configurations' among them; the server's come behind."""
    n_named: int = 0
    """Edits of the request that it names, which come before those that it brings."""

    @property
    def acts(self) -> bool:
        """Whether anything of them acts."""
        return any(not one.opted_out for one in self.receipts)

    @property
    def has_server(self) -> bool:
        """Whether the server's tier acts."""
        return any(one.tier == "server" and not one.opted_out for one in self.receipts)

    def tell(self, error: LensError) -> None:
        """Have an error of a request say that it is not about what the request brought alone."""
        said = []
        if self.acts:
            all_requests = "that the operator of this server has set for all requests"
            whose = all_requests if self.has_server else "of the configurations that were chosen"
            said.append(f"the edits and probes {whose} count, too")
        n = sum(one.edits for one in self.receipts) + self.n_named
        if n and "edits[" in str(error):
            behind = ", behind those of edits_named" if self.n_named else ""
            said.append(f"edits[{n}] is the first of the request's own{behind}")
        if said:
            error.args = (f"{error}; {': '.join(said)}",)

    @cached_property
    def packed(self) -> Packed:
        """As msgpack-able data."""
        return self.n_own_probes, [one.model_dump(mode="json") for one in self.receipts]


NO_TIERS = Tiers()


def receipts_of(
    packed: Packed | None, probes: tuple[ProbeReceipt, ...]
) -> tuple[tuple[ProbeReceipt, ...], tuple[TierReceipt, ...]]:
    """Of what was read for a request: its own part, and what its receipt says of the tiers."""
    if packed is None:
        return probes, ()
    n_own, forms = packed
    made = []
    for form in forms:
        tier = TierReceipt.model_validate(form)
        if tier.tier == "server" and len(probes) > n_own:
            tier = tier.model_copy(update={"probes": probes[n_own:]})
        made.append(tier)
    return probes[:n_own], tuple(made)


def alarms_of(
    packed: Packed, raised: Iterable[tuple[int, ProbeReceipt]]
) -> tuple[TierReceipt, ...]:
    """The tiers of a request, with those of the server's probes that have raised an alarm."""
    found = tuple(probe for i, probe in raised if i >= packed[0])
    return tuple(
        tier.model_copy(update={"probes": found}) if tier.tier == "server" else tier
        for tier in receipts_of(packed, ())[1]
    )


def compose(
    registry: Registry, request: LensRequest, *, alone: bool = False
) -> tuple[LensRequest, Tiers]:
    """Put a request together with the tiers that act on it."""
    server = None if alone else registry.server
    receipts: list[TierReceipt] = []
    edits: list[Edit] = []
    if server is not None and request.server is False:
        if not server.may_opt_out:
            raise UnsupportedError(
                "server=false: the operator of this server has set edits or probes for all "
                "requests, and allows none to leave them out; leave the field out, or ask for "
                "may_opt_out in the server's INSPECT_LENS_SERVER"
            )
        receipts.append(
            TierReceipt(tier="server", sha256=registry.sha256_of(server), edits=0, opted_out=True)
        )
        server = None
    elif server is not None:
        edits += registry.edits_of(server, "the server's ")
        receipts.append(
            TierReceipt(tier="server", sha256=registry.sha256_of(server), edits=len(edits))
        )
    uses: dict[str, ProbeUse] = {}
    own_uses = {use.name: use for use in request.probes}
    for name in dict.fromkeys(request.configs):
        config = registry.config(name)
        found = registry.edits_of(config, f"configs: {name!r}: ")
        edits += found
        for use in config.probes:
            if uses.setdefault(use.name, use) != use and use.name not in own_uses:
                raise SpecError(
                    f"configs: {name!r} has other options for probe {use.name!r} than one before "
                    "it; allowed are equal ones; name the probe in probes, with those that count"
                )
        receipts.append(
            TierReceipt(
                tier="named", name=name, sha256=registry.sha256_of(config), edits=len(found)
            )
        )
    uses |= own_uses
    own = registry.edits_of(request)
    changes = {
        "edits": (*edits, *own),
        "edits_named": (), "configs": (), "server": None,
        "probes": (*uses.values(), *(() if server is None else server.probes)),
    }  # fmt: skip
    if server is not None and request.open_gates:
        # A client that opens what the operator's own rules deny would leave their edits out.
        rules = [edit.when for edit in edits[: receipts[0].edits] if edit.when is not None]
        denied = {key for rule in rules for key in rule.denied}
        opened = tuple(key for key in request.open_gates if key not in denied)
        left_out = tuple(key for key in request.open_gates if key in denied)
        receipts[0] = receipts[0].model_copy(update={"denied_open_gates": left_out})
        request = request.model_copy(update={"open_gates": opened})
    n_named = len(own) - len(request.edits)
    return request.model_copy(update=changes), Tiers(tuple(receipts), len(uses), n_named)


_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class ServerFile:
    """What a file says."""

    config: ServerConfig | None
    """None where it has alerts alone, for probes that are set later."""
    alerts: AlertsConfig | None


def read_server_file(setting: str) -> ServerFile:
    """Read the file that `INSPECT_LENS_SERVER` names."""
    where = f"INSPECT_LENS_SERVER={setting}"
    try:
        read = parse_yaml(read_regular(setting, most=_MOST_BYTES))
    except (OSError, ValueError) as error:
        raise SpecError(f"{where}: cannot be read: {error}") from None
    if not isinstance(read, Mapping) or not read:
        raise SpecError(
            f"{where}: holds no fields; allowed is a mapping with one or more of "
            f"{', '.join((*ServerConfig.model_fields, 'alerts'))}"
        )
    values: dict[str, Any] = dict(read)
    told = values.pop("alerts", None)
    check_counts(values, field=where)
    try:
        config = read_as(ServerConfig, values) if values or told is None else None
        alerts = None
        if told is not None:
            alerts = read_as(AlertsConfig, told, at="alerts").below(Path(setting).parent)
            if config is not None and not any(use.alarm for use in config.probes):
                raise SpecError(
                    "alerts: no probe of the file has an alarm, so nobody would ever be told; add "
                    "alarm: flag or alarm: stop to one"
                )
    except LensError as error:
        raise SpecError(f"{where}: {error}") from None
    return ServerFile(config, alerts)
