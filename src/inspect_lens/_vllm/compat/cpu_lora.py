"""What vLLM's LoRA kernels for CPUs do wrong: an engine with adapters there is told so at the edge.

Seen in 0.32, without this package, too. A request without an adapter has the slot -1, which the
kernels take for the last one: once that holds an adapter, such requests get its answer. And a
request for `prompt_logprobs` ends the engine while others run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from inspect_lens.errors import UnsupportedError

logger = logging.getLogger("vllm.inspect_lens")


_made: list[tuple[Any, CpuAdapters]] = []


class CpuAdapters:
    """The adapters that an engine on a CPU has served, as one front-end knows them."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._seen: set[int] = set()
        self._is_told = False

    @classmethod
    def of(cls, vllm_config: Any) -> CpuAdapters | None:
        """Those of an engine; None where it runs elsewhere, or without LoRA."""
        lora = vllm_config.lora_config
        if lora is None or vllm_config.device_config.device_type != "cpu":
            return None
        found = next((made for config, made in _made if config is vllm_config), None)
        if found is None:
            _made.append((vllm_config, found := cls(int(lora.max_loras))))
        return found

    def loaded(self, method: str, args: Sequence[Any]) -> None:
        """Take note of an adapter that a front-end loads or removes by itself."""
        if method == "add_lora":
            self._seen.add(int(args[0].lora_int_id))
        elif method == "remove_lora":
            self._seen.discard(int(args[0]))

    def check(self, params: Any) -> None:
        """Refuse what would end the engine."""
        if getattr(params, "prompt_logprobs", None) is not None:
            raise UnsupportedError(
                "prompt_logprobs: with LoRA enabled vLLM on a CPU ends on such a request, and all "
                "others with it; use a server without --enable-lora"
            )

    def note(self, lora_request: Any, *, uses_lens: bool) -> None:
        if lora_request is not None:
            self._seen.add(int(lora_request.lora_int_id))
            return
        if len(self._seen) < self._slots:
            return
        reason = (
            f"all {self._slots} slots for adapters have been used, and vLLM on a CPU then runs "
            "requests without an adapter with that of the last slot; start with --max-loras "
            f"{len(self._seen) + 1} or more, one above the number of adapters"
        )
        if uses_lens:
            raise UnsupportedError(reason)
        if not self._is_told:
            self._is_told = True
            logger.warning("inspect_lens: the base model is asked beside adapters: %s", reason)
