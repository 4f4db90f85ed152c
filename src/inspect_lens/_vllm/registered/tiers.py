"""What acts on a request: the server's tier, configurations that it chose, and what it brought.

The one place where they are put together, whatever way the request has come. The order is that of
acting: edits of the server, then those of the configurations as the request names them, then the
request's own, and in each tier registered edits before others. A probe of a configuration is read
as the request says where it names the probe, too. The server's probes are read as the operator
says, beside those of the request. What the operator says stands in a file, which is read here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from inspect_lens._base.untrusted import read_regular
from inspect_lens._vllm.sinks.alerts import AlertsConfig
from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    Edit,
    LensRequest,
    ProbeReceipt,
    ProbeUse,
    ServerConfig,
    TierReceipt,
    check_counts,
    read_as,
)

if TYPE_CHECKING:
    from .registry import Registry

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
    """The tiers of a request, with those of the server's probes that have raised an alarm.

    Args:
        packed: tiers of the request.
        raised: probes with an alarm, by their index among all that were read.
    """
    found = tuple(probe for i, probe in raised if i >= packed[0])
    return tuple(
        tier.model_copy(update={"probes": found}) if tier.tier == "server" else tier
        for tier in receipts_of(packed, ())[1]
    )


def compose(
    registry: Registry, request: LensRequest, *, alone: bool = False
) -> tuple[LensRequest, Tiers]:
    """Put a request together with the tiers that act on it.

    Args:
        registry: what is known by name.
        request: what a client asks for; `NO_REQUEST` where it asks for nothing.
        alone: leave the server's tier out.

    Returns:
        The request with all edits and probes, none of them by the name of a configuration, and what
        its receipt says of the tiers.

    Raises:
        SpecError: a name is not registered, or stands for another kind.
        UnsupportedError: the request leaves out the server's tier, and may not.
    """
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
    for name in dict.fromkeys(request.configs):
        config = registry.config(name)
        found = registry.edits_of(config, f"configs: {name!r}: ")
        edits += found
        uses |= {use.name: use for use in config.probes}
        receipts.append(
            TierReceipt(
                tier="named", name=name, sha256=registry.sha256_of(config), edits=len(found)
            )
        )
    uses |= {use.name: use for use in request.probes}
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
