"""KV connectors: how each finds blocks again, and so what may share it with plain requests.

A connector (`--kv-transfer-config`) takes cache blocks out of an engine and brings them back, or to
another engine. A steered request has keys and values of its own, so it matters by what they are
found again. vLLM's hash of a block has our cache salt in it, and the token ids alone have not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from inspect_lens._settings import Settings
from inspect_lens.errors import SpecError

from .features import is_off

Behaviour = Literal["blocks", "tokens", "request"]
"""What blocks are found by: vLLM's hash of a block, token ids, or the request that they are of."""

CONNECTORS: dict[str, Behaviour] = {
    "OffloadingConnector": "blocks",
    "SimpleCPUOffloadConnector": "blocks",
    "MooncakeStoreConnector": "blocks",
    "ExampleConnector": "tokens",
    "HF3FSKVConnector": "tokens",
    # Their keys are made outside of vLLM, from the tokens that it hands over. Whether a server of
    # LMCache takes the salt depends on its release.
    "FlexKVConnectorV1": "tokens",
    "LMCacheConnectorV1": "tokens",
    "LMCacheConnectorV1Dynamic": "tokens",
    "LMCacheMPConnector": "tokens",
    "NixlConnector": "request",
    "NixlPullConnector": "request",
    "NixlPushConnector": "request",
    "MooncakeConnector": "request",
}
"""Connectors whose source was read, see `tests/contracts/vllm/connectors`."""

_SEVERAL = "MultiConnector"
_HOMES = ("vllm.", "lmcache.")
"""Modules in which a name of the table means what it says."""


def has_connector(vllm_config: Any) -> bool:
    return vllm_config.kv_transfer_config is not None


def behaviours_of(vllm_config: Any, settings: Settings) -> dict[str, Behaviour | None]:
    """What an engine's connectors find blocks by; None of one that nobody knows."""
    if not has_connector(vllm_config):
        return {}
    told = _told(settings.kv_connectors)
    found = _all_of(vllm_config.kv_transfer_config, told)
    # Of two by one name, in modules of their own, the one that is not known decides.
    unknown = {name for name, known in found if known is None}
    return {name: None if name in unknown else known for name, known in found}


def _all_of(config: Any, told: Mapping[str, Behaviour]) -> list[tuple[str, Behaviour | None]]:
    name, module = _read(config, "kv_connector"), _read(config, "kv_connector_module_path")
    if name in told:
        return [(name, told[name])]
    if module and not str(module).startswith(_HOMES):
        return [(str(name), None)]
    if name == _SEVERAL:
        parts = (_read(config, "kv_connector_extra_config") or {}).get("connectors") or []
        return [found for part in parts for found in _all_of(part, told)]
    return [(str(name), CONNECTORS.get(str(name)))]


def _read(config: Any, field: str) -> Any:
    """A field of vLLM's configuration, or of the part of one that is still as it was written."""
    return config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)


def _told(text: str) -> dict[str, Behaviour]:
    """What the operator says about connectors of others."""
    found: dict[str, Behaviour] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        known = next((one for one in get_args(Behaviour) if one == value.strip()), None)
        if not name.strip() or known is None:
            raise SpecError(
                f"INSPECT_LENS_KV_CONNECTORS={text!r}; allowed are names of connectors with "
                f"what they find blocks by, one of {', '.join(get_args(Behaviour))}: "
                "MyConnector=tokens,Another=blocks"
            )
        found[name.strip()] = known
    return found


def no_steering(vllm_config: Any, settings: Settings) -> str:
    """Why an engine's requests must not be steered, or empty where they may be."""
    unknown = [name for name, known in behaviours_of(vllm_config, settings).items() if not known]
    if not unknown:
        return ""
    return (
        f"it is not known by what the KV connector {unknown[0]} finds cache blocks again, and "
        "other requests might get those of a steered one; use an engine without it, or start with "
        f"INSPECT_LENS_KV_CONNECTORS={unknown[0]}=tokens where it never touches a request that it "
        "was not told of, or =blocks where it uses vLLM's block hashes"
    )


def connector_refusals(vllm_config: Any) -> dict[str, bool]:
    """Why an engine with a connector is not served, as far as it is not."""
    if not has_connector(vllm_config):
        return {}
    off = is_off("connectors")
    return {
        f"KV connectors: off in this server: {off}": off is not None,
        "a KV connector beside a scheduler that is not vLLM's own has not been tried": (
            not is_vllms_own(vllm_config.scheduler_config.scheduler_cls)
        ),
    }


def is_vllms_own(scheduler: Any) -> bool:
    name = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", "vllm.")
    return scheduler is None or str(name).startswith("vllm.")


def loads_again(vllm_config: Any) -> bool:
    """Whether tokens are computed a second time where a load has failed, in a running request."""
    policy = _read(vllm_config.kv_transfer_config, "kv_load_failure_policy")
    return str(policy) == "recompute"


def transfers_by_request(vllm_config: Any) -> bool:
    """Whether a connector may bring blocks of a certain request of another engine."""
    known = behaviours_of(vllm_config, Settings.load()).values()
    return any(one in ("request", None) for one in known)
