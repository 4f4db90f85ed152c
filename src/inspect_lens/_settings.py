"""Every `INSPECT_LENS_*` environment variable: name, type, default, meaning. Read here only."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import cache

from .errors import SpecError, did_you_mean

_PREFIX = "INSPECT_LENS_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be configured from the environment; `Settings.load()` reads it."""

    disable: bool = False
    """Make the vLLM plug-in a complete no-op in this process."""
    required: bool = False
    """Refuse to start where anything of the lens cannot be served: a model, a setting, a vLLM that
    lacks a name, a start-up check that fails. Otherwise vLLM starts as without it, the log has one
    line, and requests for the lens get a 400 with the reason."""
    layers: str = "all"
    """Layers that get a tap, as `all` or a comma-separated list such as `10,20`. Requests for other
    layers are refused."""
    sites: str = "resid_pre,resid_post"
    """[Sites](capture.md#other-places-in-the-block) that get a tap in those layers,
    comma-separated. `all` stands for `resid_pre,attn_out,mlp_out,resid_post`. Requests for other
    sites are refused."""
    layer_path: str = ""
    """Where the decoder layers of a loaded model are, for one in which they are not found: a path
    of modules with `{i}` for the index of the layer, such as `model.blocks.{i}`. The start-up check
    then tests whether these layers return the residual stream; see [Which models
    work](../models.md#if-your-model-is-refused)."""
    ring_bytes: int = 1 << 30
    """Bytes, at most, of the buffer that captured rows are written to, and on a pipeline also of
    the rows that travel between its stages. It always fits one token of each sequence
    (`max_num_seqs`) at all taps; while a step's rows could be too many for it, prompts are fed in
    smaller chunks."""
    shm_bytes: int = 1 << 30
    """Bytes of memory that a worker shares with front-ends for rows on their way. On a GPU it is
    pinned at start-up."""
    bank_bytes: int = 128 << 20
    """Upper bound, in bytes, of the table of steering rows. A request whose edits do not fit beside
    those of the requests that are running waits until there is room for them."""
    edit_wait_s: float = 300.0
    """How many seconds a request may wait for room in that table once it is the first in line. If
    there is still none by then, it is refused with a 429."""
    edit_queue: int = 100_000
    """How many requests may wait for room in that table. While so many wait, a further one is
    refused with a 429 unless there is room for it."""
    sum_bytes: int = 256 << 20
    """Upper bound, in bytes, of the table in which reductions of sampled tokens, such as `mean`,
    grow inside the engine; rows of requests that do not fit there are sent one by one. In 16 bits a
    request takes 8 bytes per layer and number of the width. 0 sends all."""
    result_timeout_s: float = 60.0
    """Seconds the front-end waits for the last captured rows of a finished request before the
    request fails."""
    cached_rows_bytes: int = 1 << 30
    """Bytes of captured rows that a front-end keeps, by block of tokens. A prompt that begins like
    an earlier one, whose rows were captured too, is then read from vLLM's prefix cache and not
    computed again. 0 keeps none."""
    store_bytes: int = 8 << 30
    """Bytes of results that wait in an API server to be fetched (`transport: binary`). One client
    has at most half of them, and gets 429 beyond that. Results that wait stay."""
    sinks: str = ""
    """Stores and functions that get rows of requests too, by name: JSON, or the path of a file that
    has it. Requests may name them, and a rule may record a share of all others; see [Record what a
    server computes](collect.md#record-what-a-server-computes)."""
    register: str = ""
    """Probes, vectors, edits, lenses, autoencoders and configurations to register at start:
    `name=path`, comma-separated; a path is the folder of a trained probe or of a fitted lens, or a
    JSON file with `probe`, `edits` (of which a vector is one), `lens`, `sae` or `config`."""
    server: str = ""
    """YAML file of what acts on all requests of a server: edits, probes with alarms, and a webhook
    for these; see [Act on all requests](share.md#act-on-all-requests). When it is set and the lens
    cannot run, vLLM does not start."""
    admin_key: str = ""
    """Key for changing what acts on all requests: the routes that do so ask for it, as
    `Authorization: Bearer KEY`. With vLLM's `--api-key`, give it there as one of the keys, too.
    When it is empty, these routes refuse every request."""
    webhook_key: str = ""
    """Key that is sent with each alert to its webhook, as `Authorization: Bearer KEY`. Empty sends
    none."""
    registry_names: int = 1024
    """Names that clients may register, of probes, vectors, edits, lenses, autoencoders and
    configurations together."""
    registry_bytes: int = 1 << 30
    """Bytes of probes and vectors that clients may register, together."""
    probe_columns: int = 4096
    """Numbers per token that one registered probe may make."""
    probe_bytes: int = 1 << 30
    """Bytes of probe weights on each device, of all requests that run. A request beyond it gets a
    429, one that alone is larger a 400."""
    lens_bytes: int = 1 << 30
    """Bytes of tuned and Jacobian lenses and of autoencoders on each device, of all that are
    registered. Each tensor-parallel rank has them whole."""
    registry_key: str = ""
    """Key that routes which register, replace or remove names and hooks ask for, as `Authorization:
    Bearer KEY`. With vLLM's `--api-key`, give it there as one of the keys, too. Empty asks for
    none."""
    allow_code: bool = False
    """Run functions that requests bring along (custom hooks). Everybody who can send this engine
    requests may then run any code in it."""
    hook_bytes: int = 1 << 30
    """Upper bound, in bytes, of what the hooks of one request may save, and of all that persistent
    hooks saved and nobody has cleared."""
    self_check: bool = True
    """Prove at start-up that every tap fires, and that rows of two requests, one of them steered,
    leave each worker as in an eager pass, however steps run; the lens is off where that is not
    so."""
    hosts_address: str = ""
    """Of an engine over several hosts: IP address at which a front-end takes rows of other hosts,
    with ports where a firewall needs them, as `10.0.0.1` or `10.0.0.1:7000-7010`. Empty means
    `VLLM_HOST_IP`, or the address that vLLM's `--master-addr` or `--data-parallel-address` says,
    and any free port."""
    hosts_key: str = ""
    """Secret, at least 16 characters, that all hosts of an engine share. Both ends of a connection
    prove that they know it, and all that they send is encrypted."""
    hosts_open: bool = False
    """Take rows of other hosts without a secret. Everybody who can reach the port may then send
    some, and read what is sent."""
    hosts_timeout_s: float = 15.0
    """Seconds after which a host that is silent counts as gone. Requests that need it fail."""
    kv_connectors: str = ""
    """What KV connectors of others find cache blocks by: `NAME=blocks` (vLLM's block hashes),
    `NAME=tokens` (token ids) or `NAME=request`, comma-separated. With one that is not known,
    steered requests are refused; see [Deploy](deploy.md)."""
    capture: str = ""
    """What every call of a `vllm-lens/` model captures in any task, unchanged: `all`, layers such
    as `10,20`, or a capture as JSON. Empty captures nothing; what a call or `-M capture` asks for
    goes first."""
    edits: str = ""
    """Edits of every call of a `vllm-lens/` model in any task, unchanged: edits and vectors as
    JSON, or the path of a JSON or YAML file that has them. `-M edits` or `-M steer`
    replaces it for that model; see [Steer and edit](steer.md)."""
    dir: str = ""
    """Directory or fsspec URL for activation sidecars; empty means next to the log."""
    follow: str = ""
    """Folders and URLs, comma-separated, below which files may be read where a log names them, or
    `all`. Else only files next to a log are read, since the log may be a stranger's."""
    memory_bytes: int = 4 << 30
    """Bytes of activations that the Inspect process keeps in memory."""
    intake_process: bool = True
    """Receive, hash and write captured activations in a process of its own, not in the Inspect
    process, if there is more than a handful. Otherwise threads of the Inspect process do it."""
    garbage_threshold: int = 200_000
    """Objects that Python makes before it looks for garbage, in a process that runs evals
    (`gc.set_threshold`; Python's own is 700). An API server takes 70,000 where this is more. 0
    leaves Python's collector as it is."""
    parent: int = 0
    """Process with which a vLLM server ends, as a number; the provider sets it for the servers that
    it starts. 0: none."""

    @classmethod
    def load(cls) -> Settings:
        values: dict[str, object] = {}
        known = {variable(item.name) for item in fields(cls)}
        for name in os.environ:
            if name.startswith(_PREFIX) and name not in known:
                raise SpecError(
                    f"{name}: no setting has this name, so nothing would read it; "
                    f"{did_you_mean(name, known)}"
                )
        for item in fields(cls):
            name = variable(item.name)
            raw = os.environ.get(name)
            if raw is not None:
                values[item.name] = _parse(name, raw, item.default)
        return cls(**values)  # type: ignore[arg-type]


@cache
def variable(field_name: str) -> str:
    """Name of the environment variable behind a field of `Settings`."""
    return f"{_PREFIX}{field_name.upper()}"


def text(field_name: str) -> str:
    """A setting that is text, without reading any other: each call of a model asks for it."""
    return os.environ.get(variable(field_name), "")


def flag(field_name: str, *, wrong: bool = False) -> bool:
    """A switch, without reading any other setting; `wrong` if its value is neither on nor off."""
    value = text(field_name).lower()
    return value in ("1", "true") or (wrong and value not in ("", "0", "false"))


def is_lens_required() -> bool:
    """Whether vLLM is to start with the lens or not at all.

    What an operator has set for all requests must not be left out in silence.
    """
    return flag("required", wrong=True) or bool(text("server"))


def debugs_errors() -> bool:
    """Whether Inspect's variable asks for tracebacks, as `--debug-errors` does."""
    value = os.environ.get("INSPECT_DEBUG_ERRORS", "").lower()
    return value in ("1", "true", "t", "yes", "y", "on")


def vllm_plugins() -> list[str] | None:
    """Plug-ins that vLLM is told to load, as it reads them; None where it loads all."""
    raw = os.environ.get("VLLM_PLUGINS")
    return None if raw is None else raw.split(",")


def server_key(given: str) -> str:
    """The key for a server: the one that was given, or that of Inspect's provider for vLLM."""
    return given or os.environ.get("VLLM_API_KEY", "")


def drop(field_name: str) -> None:
    """Remove a setting, so that processes that are started from now on do not have it."""
    os.environ.pop(variable(field_name), None)


def _parse(name: str, raw: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "0": False, "false": False, "": False}[raw.lower()]
        if isinstance(default, int):
            return int(raw)
        value = float(raw) if isinstance(default, float) else raw
    except (KeyError, ValueError):
        raise SpecError(
            f"{name}={raw!r} is not a {type(default).__name__}; unset it or give a value "
            f"like {default!r}"
        ) from None
    # Timers count milliseconds, in 32 bits.
    if isinstance(value, float) and not 0.01 <= value <= 1e6:
        raise SpecError(f"{name}={raw!r}; allowed are 0.01 to 1000000 seconds")
    return value
