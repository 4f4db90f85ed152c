"""A stepper whose requests may bring hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._hooks import EAGER_KEY, HookRunner
from ._stepper import Stepper

__all__ = ["HookedStepper"]


class HookedStepper(Stepper):
    """Passes requests with hooks, and those for queries and keys, on to a runner of hooks."""

    hooks: HookRunner | None = None
    """Set once, when the model is there."""

    def add(self, key: str, envelope: Mapping[str, Any]) -> None:
        """See `Stepper.add`."""
        super().add(key, envelope)
        if self.hooks is None or EAGER_KEY not in envelope:
            return
        self.take_up()
        if key not in self._roster.by_key:
            return
        try:
            self.hooks.add(key, envelope)
        except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own request
            self._fail(key, error)

    def remove(self, key: str) -> None:
        """See `Stepper.remove`."""
        if self.hooks is not None and key in self.hooks.live:
            try:
                self.hooks.remove(key)
            except Exception as error:  # noqa: BLE001 - the boundary: see `add`
                self._fail(key, error)
        super().remove(key)

    def flush(self, keys: Sequence[str]) -> None:
        """See `Stepper.flush`; what hooks have saved is sent, too."""
        super().flush(keys)
        for key in keys:
            if self.hooks is not None and key in self.hooks.live:
                try:
                    self.hooks.flush(key)
                except Exception as error:  # noqa: BLE001 - the boundary: see `add`
                    self._fail(key, error)

    def fail(self, key: str, error: Exception) -> None:
        """Fail one request."""
        self._fail(key, error)

    def _fail(self, key: str, error: Exception, reply: str = "", salt: str | None = None) -> None:
        if self.hooks is not None:
            self.hooks.drop(key)
        super()._fail(key, error, reply, salt)
