"""vLLM's `lora_request` of one call, loaded through Inspect's own adapter machinery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inspect_lens.errors import SpecError
from inspect_lens.model._host import LoRAAdapter, VLLMServer, get_adapter_rank

__all__ = ["NamedAdapter", "adapter_of", "announce"]


@dataclass(frozen=True)
class NamedAdapter(LoRAAdapter):
    """An adapter that the server knows by a name of the user's choice."""

    lora_name: str = ""

    @property
    def name(self) -> str:
        """Name on the server, which a request gives as its model."""
        return self.lora_name


def adapter_of(lora_request: Any) -> NamedAdapter | None:
    """Read `extra_body["lora_request"]`.

    Args:
        lora_request: `{"lora_name", "lora_int_id", "lora_path"}`, or None. Without a path the
            server has to have the adapter already; the number is vLLM's own affair.

    Returns:
        The adapter, or None.

    Raises:
        SpecError: it is not such a mapping.
    """
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
