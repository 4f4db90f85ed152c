"""The file in which an operator says what acts on all requests of a server, and who is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from inspect_lens._base.untrusted import read_regular
from inspect_lens._vllm.sinks.alerts import AlertsConfig
from inspect_lens.errors import LensError, SpecError
from inspect_lens.spec import ServerConfig, check_counts, read_as

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class ServerFile:
    """What a file says."""

    config: ServerConfig | None
    """None where it has alerts alone, for probes that are set later."""
    alerts: AlertsConfig | None


def read_server_file(setting: str) -> ServerFile:
    """Read the file that `INSPECT_LENS_SERVER` names.

    Raises:
        SpecError: it cannot be read, or says something that no request could ask for. Whether an
            engine has the layers, and the names are registered, is judged where one is known.
    """
    where = f"INSPECT_LENS_SERVER={setting}"
    try:
        read = yaml.safe_load(read_regular(setting, most=_MOST_BYTES))
    except yaml.YAMLError as error:
        raise SpecError(f"{where}: cannot be read: {_fault_of(error)}") from None
    except (OSError, ValueError, RecursionError) as error:
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


def _fault_of(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the line itself: it may have a webhook's address."""
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
    return f"{getattr(error, 'problem', None) or 'it is not YAML'}{where}"
