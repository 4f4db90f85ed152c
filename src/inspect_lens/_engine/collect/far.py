"""Workers of other hosts, as the collector sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inspect_lens._engine.hooks.results import SavedResults
from inspect_lens._engine.protocol.hosts import Address, Links
from inspect_lens._engine.protocol.shared_memory import ArenaReader
from inspect_lens.errors import CaptureError

from .blame import lost
from .listener import Listener
from .notifier import News
from .pending import Pending

__all__ = ["Far"]


class Far:
    """Whether there are any, and what is done when one of them has gone."""

    def __init__(
        self,
        local: str,
        links: Links | None,
        news: News,
        pending: Mapping[str, Pending],
        saved: SavedResults,
    ) -> None:
        """Listen, if there are any.

        Args:
            local: address of the collector's socket.
            links: where they find this process; None where there are none.
            news: told of what they do.
            pending: running requests.
            saved: what hooks of requests saved.
        """
        self._news, self._pending, self._saved = news, pending, saved
        self.ends: Callable[[Mapping[str, CaptureError]], None] = lambda failed: None
        """Called for running requests that have failed with their worker."""
        self.came: Callable[[], None] = lambda: None
        """Called when a worker has begun, or begun anew."""
        self.address = local
        """Where workers send results."""
        self._listener: Listener | None = None
        if links is not None:
            self._listener = Listener(
                links, local, lost=self._lose, told=self._tell, came=lambda: self.came()
            )
            far = self._listener.address
            self.address = Address(local, links.own_host, far).pack()

    @property
    def is_listening(self) -> bool:
        """Whether there are any."""
        return self._listener is not None

    def reader(self, name: str) -> ArenaReader:
        """The memory of a worker of this host or another one.

        Raises:
            OSError: there is no such worker.
        """
        mirror = None if self._listener is None else self._listener.mirror(name)
        return mirror or ArenaReader(name)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    def _tell(self) -> None:
        with self._news.changed:
            self._news.tell()

    def _lose(self, reader: ArenaReader, why: str) -> None:
        with self._news.changed:
            failed = lost(self._pending, reader, why)
            for key in failed:
                self._saved.fail(key)
            self._news.tell()
        self.ends(failed)
