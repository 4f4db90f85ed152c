"""What a front-end process knows: its engines, what is registered, and the results it awaits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakSet

import inspect_lens
from inspect_lens._engine.protocol.processes import Address
from inspect_lens._settings import Settings
from inspect_lens._vllm import telemetry
from inspect_lens._vllm.compat.api_server import is_traced
from inspect_lens._vllm.compat.cpu_lora import CpuAdapters
from inspect_lens._vllm.compat.engine_facts import facts_mark, facts_of, links_of, refusal
from inspect_lens._vllm.compat.features import (
    Feature,
    not_served,
    off,
    reason_of,
    require,
    turn_off_engine,
    when_off,
)
from inspect_lens._vllm.http.bodies import payloads
from inspect_lens._vllm.http.server import install_when_serving, is_serving
from inspect_lens._vllm.registered.contents import (
    NO_TIERS,
    SERVER_NAME,
    Tiers,
    compose,
    kept_of,
    parse_shared,
    read_server_file,
    start_items,
)
from inspect_lens._vllm.registered.persistent_hooks import HookBook, raise_first
from inspect_lens._vllm.registered.probe_scores import Reads
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.registered.rows import KEEPS_WEIGHTS, RowCache, is_harmless, keeps_rows
from inspect_lens._vllm.registered.shared_names import SharedNames, folder_of_siblings
from inspect_lens._vllm.results.attach import Results
from inspect_lens._vllm.sinks import alerts
from inspect_lens._vllm.sinks.process import Sinks
from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    NO_REQUEST,
    Cache,
    EngineAutoencoder,
    EngineConfig,
    EngineEdits,
    EngineFacts,
    EngineLens,
    EngineProbe,
    LensRequest,
    Registrable,
    Splice,
    check_engine_autoencoder,
    check_engine_lens,
    check_probe,
    check_request,
    forget_parsed,
)

logger = logging.getLogger("vllm.inspect_lens")

_KNOWN_MOST = 2048


@dataclass(frozen=True)
class Compiled:
    """A request that was judged against an engine: all that does not depend on its prompt."""

    asked: LensRequest
    """Kept beside the facts, so that nothing else gets their identity."""
    facts: EngineFacts
    version: int
    """Of the registry."""
    request: LensRequest
    """With the content of what it names."""
    reads: Reads | None
    """How its probes are read."""
    tiers: Tiers = NO_TIERS
    """What acts beside what the request itself brought."""


class FrontEnd:
    """What this process knows: its engines' facts, and the results it waits for."""

    def __init__(self) -> None:
        problem = None
        items: dict[str, Registrable] = {}
        self.settings = Settings()
        try:
            self.settings = Settings.load()
            items = start_items(self.settings.register)
            if self.settings.server:
                server = read_server_file(self.settings.server)
                items |= {} if server.config is None else {SERVER_NAME: server.config}
                alerts.begin(server.alerts)
        except Exception as error:  # noqa: BLE001 - told by each engine
            problem = reason_of(error)
        self._problem = problem
        """What is wrong with the settings of this process."""
        self.engines: list[EngineFacts | str] = []
        """Facts of each engine of this process, or why the lens does not serve it."""
        self.n_processes = 1
        """API servers in front of the engine; each has a store of tensors of its own."""
        self.known: Cache[tuple[object, ...], Any] = Cache(_KNOWN_MOST)
        """What was compiled, and what was placed in prompts of a length: a batch asks for one thing
        a thousand times."""
        self.row_caches: WeakSet[RowCache] = WeakSet()
        """Captured rows of earlier requests, of each engine that is still there."""
        self._told: Cache[tuple[str, tuple[str, ...]], bool] = Cache(_KNOWN_MOST)
        self.results = Results(self.settings.result_timeout_s)
        self.sinks = Sinks()
        self.registry = Registry(items, self.settings)
        # Of our own: whoever waits for rows must not keep vLLM's threads from their work.
        self.waiting = ThreadPoolExecutor(32, thread_name_prefix="inspect-lens-wait")

    @property
    def facts(self) -> EngineFacts | None:
        """Of the engine of this process; None where there are several, or none."""
        facts = self.engines[0] if len(self.engines) == 1 else None
        return facts if isinstance(facts, EngineFacts) else None

    @property
    def refusal(self) -> str | None:
        """Why the lens serves no engine of this process; None where it serves one, or has none."""
        reasons = [engine for engine in self.engines if isinstance(engine, str)]
        return reasons[0] if reasons and len(reasons) == len(self.engines) else None

    def learn(self, processor: Any, vllm_config: Any) -> None:
        """Take note of an engine; called when its input processor is made."""
        index = len(self.engines)
        self.engines.append("it has not started yet")

        def leave(reason: str) -> None:
            self.engines[index] = reason
            processor.inspect_lens_facts, processor.inspect_lens_refusal = None, reason

        try:
            self._share(vllm_config)
            processor.inspect_lens_adapters = CpuAdapters.of(vllm_config)
            reason = self._problem or refusal(vllm_config)
            if reason is None:
                self.engines[index] = facts = self._learn(processor, vllm_config)
                processor.inspect_lens_facts, processor.inspect_lens_refusal = facts, None
        except Exception as error:  # noqa: BLE001 - vLLM starts without us
            reason = reason_of(error)
        when_off(vllm_config, leave)
        if reason is not None:
            turn_off_engine(vllm_config, reason)
        # The server's modules may not have been imported when the plug-in was loaded.
        install_when_serving(self)

    def _share(self, vllm_config: Any) -> None:
        self.n_processes = vllm_config.parallel_config._api_process_count
        self.results.n_processes = self.n_processes
        if self.n_processes > 1 and not self.registry.is_shared:
            try:
                self.registry.share(SharedNames(folder_of_siblings(), parse_shared))
            except OSError as error:
                logger.warning("inspect_lens: API servers cannot share what they have: %s", error)
        ends_at_once = self.n_processes > 1 and not vllm_config.shutdown_timeout
        if ends_at_once and (self.settings.sinks or alerts.describe() is not None):
            logger.warning(
                "inspect_lens: vLLM kills several API servers at once when it is told to end, and "
                "alerts and rows for sinks that wait are lost; start with --shutdown-timeout 15"
            )
        if self.n_processes > 1 or is_serving():
            payloads.serve(is_needed=self.n_processes > 1)

    def _learn(self, processor: Any, vllm_config: Any) -> EngineFacts:
        # Read again: one process can hold engines with different settings.
        settings = Settings.load()
        facts = facts_of(vllm_config, settings)
        if (links := links_of(vllm_config, settings, facts)) is not None:
            self.results.links = links
        if facts.allows_code:
            processor.inspect_lens_book = HookBook(
                facts, most_bytes=settings.hook_bytes, n_processes=self.n_processes
            )
        self.registry.numerics = facts.numerics
        self.sinks.learn(facts, settings.sinks)
        if self.registry.server is not None:
            try:
                self.compile(NO_REQUEST, facts)
            except LensError as error:
                raise SpecError(f"INSPECT_LENS_SERVER={settings.server}: {error}") from None
        if len(self.engines) == 1:  # further ones may have other layers
            for name in self.registry.configs:
                try:
                    self._check_config(self.registry.config(name), facts)
                except LensError as error:
                    raise SpecError(f"INSPECT_LENS_REGISTER: {name}: {error}") from None
        if is_traced(vllm_config) and is_serving():
            telemetry.begin_spans()
        if is_serving():
            telemetry.begin_metrics()
            payloads.report()
            if self.results.links is None:
                # It makes a folder, for which an event loop would wait at the first request.
                self.results.the_collector()
        if self.n_processes == 1 and keeps_rows(vllm_config, settings):
            # Several API servers would not hear of each other's resets of the prefix cache.
            cache = RowCache(
                settings.cached_rows_bytes, is_served=is_serving(), on_change=self._note_rows
            )
            processor.inspect_lens_rows = cache
            self.row_caches.add(cache)
        return facts

    def _note_rows(self) -> None:
        n_bytes = sum(cache.n_bytes for cache in tuple(self.row_caches))
        telemetry.note("inspect_lens_row_cache_bytes", n_bytes)

    def reply_for(self, facts: EngineFacts) -> str:
        """Where workers of an engine send results."""
        address = self.results.address
        if self.results.links is None:
            return address
        return replace(Address.unpack(address), facts=facts_mark(facts)).pack()

    @property
    def is_local(self) -> bool:
        """Whether all workers are on this host."""
        return self.results.links is None

    def describe(self) -> dict[str, Any]:
        """What an operator wants to know: versions, engines, and what is in flight."""
        return {
            "version": inspect_lens.__version__,
            "engines": [
                {"not_served": e} if isinstance(e, str) else asdict(e) for e in self.engines
            ],
            "api_servers": self.n_processes,
            "open_requests": self.results.n_open,
            "registered": self.registry.describe(),
            "server": self.describe_server(),
            "sinks": self.sinks.describe(),
        }

    def describe_server(self) -> dict[str, Any]:
        """What acts on all requests, the models that are configurations, and where alarms go."""
        server = self.registry.server
        return {
            "acts": None if server is None else self.registry.reference_of(server),
            "configs": list(self.registry.configs),
            "alerts": alerts.describe(),
        }

    def flush_sinks(self, timeout_s: float) -> bool:
        """Have what waits for sinks given away; False where the time was too short."""
        return self.sinks.flush(timeout_s)

    def forget_rows(self, *, keeps_weights: bool) -> None:
        """Forget rows of earlier prompts: an engine's weights or prefix cache may have changed."""
        for cache in tuple(self.row_caches):
            cache.clear(keeps_weights=keeps_weights)

    def register(
        self, name: str, item: Registrable, *, replace: bool = False, reference: str = ""
    ) -> None:
        """Note a name of what workers keep through a reference; see `give_name`."""
        self.check(name, item, replace=replace)
        self.registry.add(name, item, replace=replace, reference=reference)

    def check(self, name: str, item: Registrable, *, replace: bool = False) -> None:
        """Judge what is to be registered.

        A process may have had several engines; what one of them can use is taken, and each request
        is judged against its own engine.
        """
        self.check_alone()
        self.registry.check(name, item, replace=replace)
        problem: LensError | None = None
        for facts in self.engines:
            try:
                if isinstance(facts, str):
                    raise not_served(facts)
                if isinstance(item, EngineProbe):
                    check_probe(item, facts, f"probe {name!r}")
                elif isinstance(item, EngineLens):
                    require("logits")
                    check_engine_lens(item, facts, f"lens {name!r}")
                elif isinstance(item, EngineAutoencoder):
                    require("splice")
                    check_engine_autoencoder(item, facts, f"sae {name!r}")
                elif isinstance(item, EngineConfig):
                    self._check_config(item, facts)
                else:
                    edits = kept_of(item)
                    assert isinstance(edits, EngineEdits)
                    looked_up = self.registry.edits_of(edits, f"edits {name!r}: ")
                    self._judge(LensRequest(edits=looked_up), facts)
                return
            except LensError as error:
                problem = error
        if problem is not None:
            raise problem

    def _check_config(self, config: EngineConfig, facts: EngineFacts) -> None:
        """Judge a configuration as a request that asks for the same would be."""
        composed, _ = compose(
            self.registry,
            LensRequest(edits=config.edits, edits_named=config.edits_named, probes=config.probes),
            alone=True,
        )
        self._judge(self.registry.resolve(composed), facts)

    def _judge(self, request: LensRequest, facts: EngineFacts) -> None:
        """Judge a request all of whose names are looked up."""
        asked: dict[Feature, bool] = {
            "hooks": bool(request.hooks),
            "qk": request.qk is not None,
            "logits": request.lens is not None,
            "splice": any(isinstance(edit, Splice) for edit in request.edits),
        }
        for feature, is_asked in asked.items():
            if is_asked:
                require(feature)
        check_request(request, facts, self.registry.probes)

    def unregister(self, name: str) -> None:
        """Forget a name; see `take_name`."""
        self.check_alone()
        self.registry.remove(name)

    def check_alone(self) -> None:
        """Refuse to change names where other API servers would not hear of it."""
        if self.n_processes > 1 and not self.registry.is_shared:
            raise UnsupportedError(
                f"names cannot be registered or removed: the {self.n_processes} API server "
                "processes have no folder for temporary files that all can write, see the server's "
                "log. Start with --api-server-count 1, or name probes and vectors at start in "
                "INSPECT_LENS_REGISTER, which all processes read"
            )

    def compiled(self, request: object, facts: EngineFacts | None) -> Compiled | None:
        """What `compile` made of a request that is served as it is; None where that is not known.

        A request with texts of tokens, whose ids are looked up, is not.
        """
        known: Compiled | None = self.known.get((id(request), id(facts)))
        if known is None or known.asked is NO_REQUEST or known.version != self.registry.version:
            return None
        return None if known.request.lens is not None and known.request.lens.texts else known

    def compile(self, request: LensRequest, facts: EngineFacts) -> Compiled:
        """Judge a request against its engine, and resolve what it names; once by content."""
        version = self.registry.version
        key = id(request), id(facts)
        known: Compiled | None = self.known.get(key)
        if known is not None and known.version == version:
            return known
        tiers = NO_TIERS
        try:
            composed, tiers = compose(self.registry, request)
            resolved = self.sinks.resolve(self.registry.resolve(composed), facts)
            self._judge(resolved, facts)
        except LensError as error:
            forget_parsed(request)
            if request is not NO_REQUEST:
                tiers.tell(error)
            raise
        reads = None
        if resolved.probes:
            reads = Reads(resolved.probes, self.registry.probes, facts.numerics)
            self._warn_of(reads)
        made = Compiled(request, facts, version, resolved, reads, tiers)
        # Functions that came with a request are not worth being kept.
        if not request.hooks:
            self.known.keep(key, made, request.tensor_bytes)
        return made

    def _warn_of(self, reads: Reads) -> None:
        """Say once of each probe that its alarm was calibrated with other numerics."""
        for use, differs in zip(reads.uses, reads.differences, strict=True):
            if differs and self._told.get(told := (use.name, differs)) is None:
                self._told.keep(told, True)
                logger.warning(
                    "probe %r: its alarm threshold was calibrated elsewhere, and this engine "
                    "computes with %s; its rate of false alarms may differ here, and inspect-lens "
                    "probe check measures by how much", use.name, " and ".join(differs),
                )  # fmt: skip


class _Holder:
    front_end: FrontEnd | None = None


def front_end() -> FrontEnd:
    """The front-end state of this process, made when first needed."""
    if _Holder.front_end is None:
        _Holder.front_end = FrontEnd()
    return _Holder.front_end


@contextmanager
def _forgetting(client: Any, method: str, args: Sequence[Any]) -> Iterator[None]:
    """Forget before, for requests that come meanwhile, and after, for what these captured."""
    if method in _ADAPTERS and (adapters := CpuAdapters.of(client.vllm_config)) is not None:
        adapters.loaded(method, args)
    is_fine, keeps_weights = is_harmless(method, args), method in KEEPS_WEIGHTS
    if not is_fine:
        front_end().forget_rows(keeps_weights=keeps_weights)
    try:
        yield
    finally:
        if not is_fine:
            front_end().forget_rows(keeps_weights=keeps_weights)


def _call_utility(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_utility(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        with _forgetting(self, method, args):
            result = original(self, method, *args, **kwargs)
        if method == _FIRST_CALL:
            with _hearing(self) as heard:
                heard += original(self, *_ASK, **kwargs)
        return result

    return call_utility


def _call_utility_async(original: Callable[..., Any]) -> Callable[..., Any]:
    async def call_utility(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        with _forgetting(self, method, args):
            result = await original(self, method, *args, **kwargs)
        if method == "collective_rpc" and args[0] in _TOLD:
            # Of several engines vLLM hands on the answers of the first alone.
            raise_first([answer for answer in result or () if isinstance(answer, str)])
        if method == _FIRST_CALL:
            with _hearing(self) as heard:
                heard += await original(self, *_ASK, **kwargs)
        return result

    return call_utility


_TOLD = ("inspect_lens_register", "inspect_lens_hooks")
"""What workers are told to do, and answer with what went wrong as text."""
_ADAPTERS = ("add_lora", "remove_lora")
_FIRST_CALL = "get_supported_tasks"
"""What every front-end asks an engine that has started, before its first request."""
_ASK: tuple[Any, ...] = ("collective_rpc", "inspect_lens_refusal", None, (), {})


@contextmanager
def _hearing(client: Any) -> Iterator[list[str | None]]:
    """Take note of why the workers of an engine are without the lens, if they are."""
    config = client.vllm_config
    heard: list[str | None] = []
    try:
        yield heard
    except Exception as error:  # noqa: BLE001 - its workers do not know us
        heard = [f"its workers are without inspect-lens ({error})"]
    reason = next((one for one in heard if one is not None), None)
    if reason is not None and off(config) is None:
        turn_off_engine(config, reason, is_told=True)


RESET_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "call_utility": _call_utility,
    "call_utility_async": _call_utility_async,
}
"""Wrapper by name of the monkeypatch."""
