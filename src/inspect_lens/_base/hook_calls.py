"""Hooks that run on every request: calls of a server and of an engine in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_lens._base.arguments import one_or_several
from inspect_lens.spec import Hook, parse_hooks

from .to_torch import SavedValues


class HookCalls(ABC):
    """Calls that manage persistent hooks."""

    @abstractmethod
    def _hooks(self, action: str, body: dict[str, Any]) -> Mapping[str, Any]:
        """Have something done with hooks; `body` is that of `/v1/hooks/ACTION`."""

    def register_hooks(
        self,
        hooks: Sequence[Hook | Mapping[str, Any]],
        prefetch_params: str | Sequence[str] | None = None,
    ) -> None:
        """Run hooks on every request from now on, whoever sends it.

        Args:
            hooks: added behind those that are registered.
            prefetch_params: see `prefetch_params`.

        Raises:
            SpecError: the server or engine does not allow code, or cannot use the hooks.
            LensError: a function cannot be read.
        """
        parsed = parse_hooks(list(hooks), where="hooks")
        body: dict[str, Any] = {"hooks": [hook.model_dump(mode="json") for hook in parsed]}
        if prefetch_params:
            body["prefetch_params"] = list(one_or_several(prefetch_params))
        self._hooks("register", body)

    def collect_hook_results(self) -> SavedValues:
        """Get what registered hooks saved for finished requests; it is kept until cleared.

        Returns:
            By request, by index of the hook as text, what `ctx.saved` held; tensors are torch
            tensors on the CPU.
        """
        return SavedValues.of(self._hooks("collect", {}).get("results") or {})

    def clear_hooks(self) -> None:
        """Remove the registered hooks, and what they saved."""
        self._hooks("clear", {})

    def clear_hook_results(self) -> None:
        """Delete what registered hooks saved, and keep the hooks."""
        self._hooks("clear_results", {})

    def prefetch_params(self, names: str | Sequence[str]) -> None:
        """Make parameters known to `ctx.get_parameter` on all ranks and pipeline stages.

        Without a pipeline it is not needed; it saves gathering them again in each call. A call to
        the engine that may change its weights drops them: prefetch them again behind it.

        Args:
            names: dotted paths from the model, such as `lm_head.weight`.

        Raises:
            LensError: the model has no such parameter.
        """
        self._hooks("prefetch", {"params": list(one_or_several(names))})

    def clear_prefetched(self) -> None:
        """Undo `prefetch_params`, and free the parameters."""
        self._hooks("clear_prefetched", {})
