"""Names of vLLM's API server that are called: its keys, its errors, its parameters, its traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .features import is_off


def shown_key(scope: Mapping[str, Any]) -> str | None:
    """The key of a server (`--api-key`) that a request shows, and None where it shows none of them.

    Empty where the server has no keys.
    """
    from starlette.datastructures import Headers

    app = scope.get("app")
    for item in getattr(app, "user_middleware", ()):
        if hasattr(item.cls, "verify_token"):  # vLLM's AuthenticationMiddleware
            asks, headers = item.cls(app, *item.args, **item.kwargs), Headers(raw=scope["headers"])
            # Without the scheme, whose letters may be of either case.
            is_one = asks.verify_token(headers)
            return headers["authorization"].partition(" ")[2] if is_one else None
    return ""


_MODELS = "inspect_lens_models"


@dataclass
class _Listed:
    """What a server lists beside its own models."""

    configs: dict[str, str] = field(default_factory=dict)
    """Configuration by the name of its model."""
    paths: list[Any] = field(default_factory=list)


def list_models(
    scope: Mapping[str, Any], configs: Sequence[str], check: Callable[[str], None]
) -> Mapping[str, str] | None:
    """Have a server list `model@name` for each configuration, and take it as a model's name.

    Names that its own models and adapters have are theirs.
    """
    state = getattr(scope.get("app"), "state", None)
    models = getattr(state, "openai_serving_models", None)
    paths: list[Any] | None = getattr(models, "base_model_paths", None)
    if models is None or paths is None:
        return None
    listed: _Listed | None = getattr(state, _MODELS, None)
    if listed is None:
        listed = _Listed()
        setattr(state, _MODELS, listed)
        models.is_base_model = _judging(models.is_base_model, listed, check)
    ours = {id(path) for path in listed.paths}
    base = [path for path in paths if id(path) not in ours]
    taken = {path.name for path in base} | set(getattr(models, "lora_requests", ()))
    listed.configs, listed.paths = {}, []
    for path in base:
        for config in configs:
            if (name := f"{path.name}@{config}") not in taken:
                listed.configs[name] = config
                listed.paths.append(type(path)(name=name, model_path=path.model_path))
    # In place: vLLM's table of models and what judges a request's name hold one list.
    paths[:] = [*base, *listed.paths]
    return listed.configs


def _judging(
    original: Callable[[str], bool], listed: _Listed, check: Callable[[str], None]
) -> Callable[[str], bool]:
    def is_base_model(name: str) -> bool:
        if name in listed.configs:
            check(name)
        return original(name)

    return is_base_model


@cache
def sampling_fields() -> frozenset[str]:
    """What vLLM reads of sampling parameters that come as JSON."""
    from vllm.sampling_params import SamplingParams

    return frozenset(SamplingParams.__struct_fields__)


def one_token(tokens: Sequence[int], extra_args: dict[str, Any] | None) -> Any:
    """Sampling parameters that ask for one token, and the chance of chosen ones."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0, detokenize=False, extra_args=extra_args,
        logprob_token_ids=list(tokens) or None,
    )  # fmt: skip


def status_of(error: BaseException) -> int:
    """HTTP status that vLLM's API server gives an error, ours among them."""
    for name in ("status", "http_status", "status_code"):
        found = getattr(error, name, None)
        if isinstance(found, int):
            return int(found)
    from vllm.exceptions import VLLMClientError

    return 400 if isinstance(error, (ValueError, VLLMClientError)) else 500


def is_traced(vllm_config: Any) -> bool:
    """Whether an engine was started with `--otlp-traces-endpoint`."""
    if is_off("traces") is not None:
        return False
    return vllm_config.observability_config.otlp_traces_endpoint is not None
