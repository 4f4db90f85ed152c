"""The one file that names private modules of inspect_ai, and what it relies on in each.

`PRIVATE_NAMES` is checked against the installed release by `tests/contracts/test_inspect_names.py`,
so an upgrade that moves something fails there, by name, and not in the middle of an eval.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import inspect_ai
import numpy as np
from inspect_ai._util.error import PrerequisiteError as _PrerequisiteError
from inspect_ai._util.registry import (
    RegistryInfo,
    RegistryType,
    registry_add,
    registry_has,
    registry_info,
    registry_lookup,
)
from inspect_ai.approval import Approver
from inspect_ai.approval._apply import _tool_approver
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.log._recorders.eval import EvalRecorder
from inspect_ai.log._recorders.json import JSONRecorder
from inspect_ai.log._samples import sample_active
from inspect_ai.model import ModelAPI, _model
from inspect_ai.model._generate_config import active_generate_config
from inspect_ai.model._model import active_model, init_model_roles, model_roles
from inspect_ai.solver._task_state import sample_state
from rich.markup import escape

from inspect_lens._base.artifact import BY_CONTENT
from inspect_lens._settings import debugs_errors
from inspect_lens.errors import LensError

if TYPE_CHECKING:
    from inspect_ai._util.local_server import (
        configure_devices,
        start_local_server,
        terminate_process,
    )
    from inspect_ai.model._providers._vllm_lora import (
        LoRAAdapter,
        VLLMServer,
        _vllm_servers,
        ensure_adapter_loaded,
        get_adapter_rank,
    )
    from inspect_ai.model._providers.vllm import VLLMAPI

__all__ = [
    "PRIVATE_NAMES",
    "VLLMAPI",
    "WORDED",
    "ActiveCall",
    "HostName",
    "LoRAAdapter",
    "PrerequisiteError",
    "RegistryInfo",
    "RegistryType",
    "VLLMServer",
    "_vllm_servers",
    "active_approver",
    "active_call",
    "active_generate_config",
    "active_model",
    "apis_of_task",
    "configure_devices",
    "end_in_a_line",
    "ensure_adapter_loaded",
    "get_adapter_rank",
    "hear_server",
    "init_model_roles",
    "is_interim",
    "last_error",
    "registry_add",
    "registry_has",
    "registry_info",
    "registry_lookup",
    "role_of",
    "start_local_server",
    "terminate_process",
    "when_log_is_read",
]

_VLLM = "inspect_ai.model._providers.vllm"
_LORA = "inspect_ai.model._providers._vllm_lora"
_COMPAT = "inspect_ai.model._providers.openai_compatible"
_SERVER = "inspect_ai._util.local_server"
_REGISTRY = "inspect_ai._util.registry"
_RECORDERS = "inspect_ai.log._recorders"

# Loaded on first use: these import the OpenAI client, and whoever reads a log needs none.
_LAZY = {
    "configure_devices": _SERVER,
    "start_local_server": _SERVER,
    "terminate_process": _SERVER,
    "LoRAAdapter": _LORA,
    "VLLMServer": _LORA,
    "_vllm_servers": _LORA,
    "ensure_adapter_loaded": _LORA,
    "get_adapter_rank": _LORA,
    "VLLMAPI": _VLLM,
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class PrerequisiteError(_PrerequisiteError):
    """Inspect's error of what has to be put right before a run, in one line.

    Inspect prints its message as markup, in which the `[vllm]` of a command would vanish. The
    error's `str` has the words as they were given.
    """

    def __init__(self, message: str) -> None:
        super().__init__(escape(message))


WORDED = "worded_by_inspect_lens"
"""Mark of an error of another package whose words are ours, as it has to keep its type."""


def end_in_a_line() -> None:
    """Have a command of Inspect's end an error of ours as it ends its own: in a line.

    A script keeps its traceback: Inspect has its hook there only after it has loaded us. So does
    who asks to debug errors.
    """
    theirs = sys.excepthook
    is_inspects = getattr(theirs, "__module__", None) == _PrerequisiteError.__module__
    if "--debug-errors" in sys.argv or debugs_errors() or not is_inspects:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Inspect takes a ValueError of a scorer for one that is not there, and says only that.
        hidden = None if error.__suppress_context__ else error.__context__
        ours = (hidden or error) if isinstance(error, _PrerequisiteError) else error
        if isinstance(ours, LensError) or hasattr(ours, WORDED):
            said = "\n".join([str(ours), *getattr(ours, "__notes__", ())])
            sys.stderr.write(f"\n{_asked_at(ours.__traceback__)}{said}\n\n")
        else:
            theirs(kind, error, trace)

    sys.excepthook = hook


def _asked_at(trace: TracebackType | None) -> str:
    """The line of a user's own file that led to an error, as `honesty.py:12: `; "" for none."""
    inspects, ours = f"{Path(inspect_ai.__file__).parent}{os.sep}", str(Path(__file__).parents[1])
    libraries = (inspects, f"{ours}{os.sep}", sysconfig.get_path("stdlib"))
    frames = traceback.extract_tb(trace)  # the first ones are of what has started Inspect
    inside = dropwhile(lambda frame: not frame.filename.startswith(inspects), frames)
    files = [
        f"{os.path.relpath(frame.filename)}:{frame.lineno}: "
        for frame in inside
        if not frame.filename.startswith(libraries) and "site-packages" not in frame.filename
    ]
    return files[-1] if files else ""


_written: deque[str] = deque(maxlen=400)
"""The last lines of servers that Inspect started, which it only logs."""
_own_level = [logging.NOTSET]
"""That somebody gave Inspect's logger of them."""
_ENDS = re.compile(
    r"(?:\([\w-]+ pid=\d+\) )?(?:ERROR \S+ \S+ \[[^]]+\] )?"
    r"((?:[\w.]+(?:Error|Exception)|[\w.]+: error): \S.*)"
)
_FOLLOWS = re.compile(r"initiali[sz]ation failed|See root cause above")


def _hear(record: logging.LogRecord) -> bool:
    _written.append(record.getMessage())
    above = logging.getLogger(_SERVER).parent
    least = _own_level[0] or (above.getEffectiveLevel() if above else 0)
    is_repeated = "Try rerunning" in record.getMessage()  # by the error, with a better command
    return not is_repeated and record.levelno >= least


def hear_server() -> None:
    """Listen to what the next server writes, and show no more of it than before."""
    _written.clear()
    logger = logging.getLogger(_SERVER)
    if _hear not in logger.filters or logger.level != logging.DEBUG:
        _own_level[0] = logger.level
    logger.addFilter(_hear)
    logger.setLevel(logging.DEBUG)


def last_error() -> str:
    """The error that a server has written last, with its second line where that says it; or ""."""
    lines, said = list(_written), ""
    for line, below in zip(lines, [*lines, ""][1:], strict=True):
        if (found := _ENDS.match(line)) and not _FOLLOWS.search(line):
            said = f"{found[1]} {below}" if "validation error" in line else found[1]
    return said[:600]


def role_of(api: object) -> str:
    """Names of the roles that a model has in the running task, by its provider; "" for none."""
    return ", ".join(role for role, one in _apis_of_roles() if one is api)


def apis_of_task() -> list[ModelAPI]:
    """Providers of the models of the running task: the one under evaluation, and those of roles."""
    evaluated = active_model()
    return [*([] if evaluated is None else [evaluated.api]), *(api for _, api in _apis_of_roles())]


def _apis_of_roles() -> list[tuple[str, ModelAPI]]:
    return [
        (role, model.api)
        for role, models in model_roles().items()
        for model in (models if isinstance(models, list) else [models])
    ]


class HostName(NamedTuple):
    """One private name of inspect_ai and what we expect of it."""

    module: str
    name: str
    """Attribute path inside the module."""
    parameters: tuple[str, ...] | None
    """Parameters that we pass or override with; None for what is not called."""
    reason: str


PRIVATE_NAMES: tuple[HostName, ...] = (
    HostName("inspect_ai._util.error", "PrerequisiteError", ("message",), "a clean error at start"),
    HostName(_REGISTRY, "RegistryInfo", ("type", "name"), "a registration"),
    HostName(_REGISTRY, "RegistryType", None, "kinds of registrations"),
    HostName(_REGISTRY, "registry_add", ("o", "info"), "names that import their package when used"),
    HostName(_REGISTRY, "registry_has", ("type", "name"), "whether a name is registered already"),
    HostName(
        _REGISTRY, "registry_info", ("o",), "the registration of what is put around a factory"
    ),
    HostName(_REGISTRY, "registry_lookup", ("type", "name"), "Inspect's own model `none`"),
    HostName(
        _SERVER,
        "configure_devices",
        ("server_args", "parallel_size_param"),
        "-M device= means what it means for Inspect's own vLLM provider",
    ),
    HostName(
        _SERVER,
        "start_local_server",
        ("base_cmd", "host", "port", "api_key", "server_type", "timeout", "server_args", "env"),
        "start vLLM through `python -m`: the `vllm` script is missing from some wheels",
    ),
    HostName(_SERVER, "terminate_process", ("process",), "release the port that was reserved"),
    HostName(
        "inspect_ai.approval._apply",
        "_tool_approver",
        None,
        "a gate judges a call first, and then the approver that was there before",
    ),
    *(
        HostName(
            f"{_RECORDERS}.{module}", f"{name}{read}", with_, "where a log was read, its files are"
        )
        for module, name in (("eval", "EvalRecorder"), ("json", "JSONRecorder"))
        for read, with_ in (
            ("", None),
            (".read_log", ("location",)),
            (".read_log_sample", ("location",)),
        )
    ),
    HostName("inspect_ai.log._samples", "sample_active", (), "where the log of this eval is"),
    HostName(
        "inspect_ai.log._samples",
        "ActiveSample.__init__",
        ("self", "log_location", "sample", "epoch", "sample_uuid"),
        "fields that name a sidecar file",
    ),
    HostName(
        "inspect_ai.model._generate_config",
        "active_generate_config",
        (),
        "lens_config adds to the task's extra_body, which Inspect would replace",
    ),
    HostName(
        "inspect_ai.model._model",
        "active_model",
        (),
        "the config of the task is in calls of this model alone",
    ),
    HostName("inspect_ai.model._model", "model_roles", (), "messages name the role of a model"),
    HostName(
        "inspect_ai.model._model",
        "to_jsonable_python",
        None,
        "models with other arrays among their arguments are other models",
    ),
    HostName(
        "inspect_ai.model._model",
        "init_model_roles",
        ("roles",),
        "an audit without a target in the roles audits the model under evaluation",
    ),
    HostName(
        "inspect_ai.solver._task_state",
        "sample_state",
        (),
        "metrics of a running eval's display leave out what is slow",
    ),
    HostName(
        _VLLM,
        "VLLMAPI.__init__",
        ("self", "model_name", "base_url", "port", "api_key", "config", "lazy_init"),
        "the provider that ours extends",
    ),
    HostName(_VLLM, "VLLMAPI._resolve_server", ("self",), "keep the public base_url port-free"),
    HostName(
        _VLLM,
        "VLLMAPI._start_server",
        ("self", "model_path", "port"),
        "replaced: another command, loopback only",
    ),
    HostName(
        _VLLM,
        "VLLMAPI._ensure_server_started",
        ("self",),
        "extended: a user sees that a server starts; called before an adapter is loaded",
    ),
    HostName(_VLLM, "VLLMAPI._server_root", ("self",), "replaced: reads our own server record"),
    HostName(_VLLM, "VLLMAPI.close", ("self",), "extended: no child process is left behind"),
    HostName(_VLLM, "VLLMAPI.connection_key", ("self",), "extended: tells the hook who is calling"),
    HostName(
        _COMPAT,
        "OpenAICompatibleAPI._generate_completion",
        ("self", "request", "config"),
        "after the request is logged and before the response is dumped",
    ),
    HostName(
        _COMPAT,
        "OpenAICompatibleAPI.completion_params",
        ("self", "config", "tools"),
        "the request as it is logged",
    ),
    HostName(
        _COMPAT,
        "OpenAICompatibleAPI.stream_completion",
        ("self", "stream"),
        "the stream accumulator drops our chunk",
    ),
    HostName(
        _COMPAT, "OpenAICompatibleAPI.resolve_stream", ("self", "config"), "lens calls decline"
    ),
    HostName(_COMPAT, "OpenAICompatibleAPI._create_client", ("self",), "a client of our base_url"),
    HostName(_COMPAT, "OpenAICompatibleAPI.should_retry", ("self", "ex"), "an incomplete capture"),
    HostName(
        _LORA,
        "VLLMServer",
        ("enable_lora", "max_lora_rank", "base_url", "api_key", "port", "process"),
        "the record of a server",
    ),
    HostName(_LORA, "_vllm_servers", None, "our servers are not registered there"),
    HostName(_LORA, "LoRAAdapter", ("path", "revision", "is_preloaded"), "an adapter of one call"),
    HostName(_LORA, "ensure_adapter_loaded", ("server", "adapter"), "load an adapter once"),
    HostName(_LORA, "get_adapter_rank", ("adapter",), "rank for a server that is not started yet"),
)


class ActiveCall(NamedTuple):
    """Where in an eval a model call happens."""

    log_location: str
    sample_uuid: str
    sample_id: str | int | None
    epoch: int


def active_call() -> ActiveCall | None:
    """The sample that this task is running, or None outside an eval."""
    sample = sample_active()
    if sample is None or not sample.log_location:
        return None
    return ActiveCall(
        log_location=sample.log_location,
        sample_uuid=sample.sample_uuid,
        sample_id=sample.sample.id,
        epoch=sample.epoch,
    )


def is_interim() -> bool:
    """Whether a metric is computed for the display of an eval that goes on.

    Inspect does so every second, in the task of a sample that has just ended, and everything else
    of the eval waits for it.
    """
    return sample_active() is None and sample_state() is not None


def active_approver() -> Approver | None:
    """The approver of tool calls that this task runs under, or None."""
    return _tool_approver.get(None)


def when_log_is_read(told: Callable[[str, EvalLog | EvalSample], None]) -> None:
    """Call a function with the address of every log that Inspect reads, and what it read of it.

    A scorer, a column and `sample.output` are given a sample and not the address of its log, and
    a monitor that runs over a log is given messages alone.
    """

    def telling(read: Callable[..., Any]) -> Any:
        @functools.wraps(read)
        async def tell(cls: Any, location: str, *args: Any, **options: Any) -> Any:
            found = await read(cls, location, *args, **options)
            told(location, found)
            return found

        return classmethod(tell)

    for recorder in (EvalRecorder, JSONRecorder):
        for name in ("read_log", "read_log_sample"):
            setattr(recorder, name, telling(getattr(recorder, name).__func__))


def _content(value: Any) -> str | None:
    """What stands for a number or an array of NumPy or PyTorch in a key."""
    if not (hasattr(value, "dtype") and hasattr(value, "tolist")):
        return None
    is_array = type(value) is np.ndarray and not value.dtype.hasobject
    if is_array or str(value.dtype).startswith("torch."):  # numbers of one type: their bytes do
        array = np.asarray(value if is_array else value.tolist())
        data = repr(array.shape).encode() + array.tobytes()
    else:
        data = repr(value.tolist()).encode()
    return f"{value.dtype} {hashlib.sha256(data).hexdigest()}"


def tell_models_apart() -> None:
    """Have `get_model` look at arrays, probes and vectors among the arguments of a model.

    It keeps models by their arguments as JSON, in which every array is null: who passed another
    vector would get the model of the first.
    """
    plain = _model.to_jsonable_python  # type: ignore[attr-defined]

    def by_content(value: Any, **options: Any) -> Any:
        return plain(value, **options | {"fallback": _content, "context": BY_CONTENT})

    _model.to_jsonable_python = by_content  # type: ignore[attr-defined]


tell_models_apart()
