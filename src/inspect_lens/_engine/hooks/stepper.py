"""A stepper whose requests may bring hooks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inspect_lens._engine.protocol.processes import as_exception, ends_process
from inspect_lens._engine.step.lens_stepper import LensStepper
from inspect_lens.errors import UnsupportedError

from .runner import EAGER_KEY, HookRunner

logger = logging.getLogger("vllm.inspect_lens")


class HookedStepper(LensStepper):
    """Passes requests with hooks on to a runner of hooks."""

    hooks: HookRunner | None = None
    """Set once, when the model is there."""

    @property
    def is_watching(self) -> bool:
        """See `Stepper.is_watching`; a failed request with hooks is there until it is over."""
        return super().is_watching or (self.hooks is not None and bool(self.hooks.live))

    def add(self, key: str, envelope: Mapping[str, Any]) -> None:
        super().add(key, envelope)
        if EAGER_KEY not in envelope:
            return
        self.take_up()
        if self.hooks is None:
            if key in self._live.by_key:
                self._fail(key, UnsupportedError("hooks are off: see the log"))
            return
        with self._failing(key):
            # Also where the request has failed here: ranks take part in gathering alike.
            self.hooks.add(key, envelope)
        if key not in self._live.by_key:
            self.hooks.drop(key)

    def remove(self, key: str) -> None:
        if self.hooks is not None and key in self.hooks.live:
            with self._failing(key):
                self.hooks.remove(key)
        super().remove(key)

    def flush(self, keys: Sequence[str]) -> None:
        """See `Stepper.flush`; what hooks have saved is sent, too."""
        super().flush(keys)
        for key in keys:
            if self.hooks is not None and key in self.hooks.live:
                with self._failing(key):
                    self.hooks.flush(key)

    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """The boundary: a fault fails its own request."""
        try:
            yield
        except BaseException as error:
            if ends_process(error, in_user_code=True):
                raise
            if key in self._live.by_key:
                self._fail(key, as_exception(error))
            else:  # its request has failed before, and heard why
                logger.exception("inspect_lens: hooks of request %s, which has failed before", key)

    def fail(self, key: str, error: Exception) -> None:
        """Fail one request."""
        self._fail(key, error)

    def _fail(self, key: str, error: Exception, reply: str = "", salt: str | None = None) -> None:
        if self.hooks is not None:
            self.hooks.drop(key)
        super()._fail(key, error, reply, salt)
