"""What the handles of a call have in common: small, frozen, and a reference in the log."""

from __future__ import annotations

from functools import cached_property
from itertools import count
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_serializer

__all__ = ["LoggedHandle"]

_numbers = count()


class LoggedHandle(BaseModel):
    """Data of one model call that lies in a file or in memory; the log has the reference."""

    model_config = ConfigDict(frozen=True)

    sha256: str
    """Of the data, 16 hex digits."""
    n_prompt: int
    """Prompt tokens."""
    n_completion: int
    """Sampled tokens."""
    uri: str | None = None
    """The file, relative to the folder of the log; None when it is only in memory."""
    root: str | None = None
    """That folder when the file was written."""

    _key: str = PrivateAttr(default_factory=lambda: str(next(_numbers)))

    def _contents(self) -> tuple[str, dict[str, Any]]:
        """`$lens` of the logged form, and the fields of this kind of handle."""
        raise NotImplementedError

    @model_serializer(mode="plain")
    def _serialise(self) -> dict[str, Any]:
        # Inspect asks seven times per sample; whoever gets it gets a copy.
        return self._reference

    @cached_property
    def _reference(self) -> dict[str, Any]:
        kind, contents = self._contents()
        where = {} if self.uri is None else {"uri": self.uri, "root": self.root}
        return {
            "$lens": kind,
            **where,
            **contents,
            "sha256": self.sha256,
            "n_prompt": self.n_prompt,
            "n_completion": self.n_completion,
        }

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object = None) -> Self:
        """Immutable, so a deep copy (Inspect makes many) is the same object."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._reference == other._reference

    def __hash__(self) -> int:
        return hash(self.sha256)
