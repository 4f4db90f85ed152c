"""Where else the rows of a request go: a store or a function that the server's operator named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from inspect_lens.spec.values._strict import Flag, check_name, shown

__all__ = ["SinkReceipt", "SinkStatus", "SinkUse"]

SinkStatus = Literal["written", "queued", "spilled", "sampled_out", "dropped", "failed"]
"""What became of a request's rows at a sink.

`written`: a finished shard has them, or the function has returned. `queued`: in memory, in the
next shard. `spilled`: on a disk of the server, and to be written later, also after a restart.
`sampled_out` and `dropped`: the sink was slow, and they are gone. `failed`: it could not take them.
"""

_TEXT_MOST = 256
_COLUMNS_MOST = 16


class SinkUse(BaseModel):
    """How one request uses a sink: a store or a function on the server's side.

    The operator of the server says what a sink records (layers, site, tokens) and where to. A
    request gives the sink's name, and what a training set has to know of the sample.

    Example:
        ```python
        from inspect_lens import LensRequest

        request = LensRequest(sink={"name": "recorded", "label": True, "group": "town-3"})
        assert request.sink.wait
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of the sink, as `GET /v1/inspect_lens` lists it."""
    id: str | None = Field(default=None, min_length=1, max_length=_TEXT_MOST)
    """Id of the sample; without it that of the request."""
    label: Flag | None = None
    """Label of the sample, for training."""
    group: str | None = Field(default=None, min_length=1, max_length=_TEXT_MOST)
    """Samples that belong together, such as those of one question; without it the id."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Further columns of the sample, at most 16."""
    wait: Flag = True
    """Answer when the rows are written or lost, so that the receipt says which. Otherwise the
    answer comes at once, and rows that wait for the next shard are `queued`."""

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> str:
        return check_name(value, field="sink.name")

    @field_validator("columns", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) > _COLUMNS_MOST:
            raise ValueError(f"{shown(value)}; allowed is an object of at most {_COLUMNS_MOST}")
        for key, text in value.items():
            for part in (key, text):
                if not isinstance(part, str) or len(part) > _TEXT_MOST or not _encodes(part):
                    raise ValueError(
                        f"{shown(part)}; allowed are names and texts of at most {_TEXT_MOST} "
                        "characters"
                    )
        return dict(value)


def _encodes(text: str) -> bool:
    """Whether a file can hold a text: one with half of a surrogate pair it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class SinkReceipt(BaseModel):
    """Part of the receipt about a sink: what became of the request's rows there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Of the sink."""
    status: SinkStatus
    rows: int = 0
    """Tokens that were handed over."""
    shard: str | None = None
    """File that has them, relative to the store; None where none has."""
    reason: str | None = None
    """Why they are not `written`."""
