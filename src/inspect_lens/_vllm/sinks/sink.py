"""What is given to a sink, and how an operator describes one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from inspect_lens._shards import Captured, SampleRecord
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    RESID_POST,
    CaptureSpec,
    EngineFacts,
    Layers,
    PositionName,
    RowDType,
    SinkUse,
    Site,
    TensorData,
    check_name,
    explain,
    shown,
)

HIDDEN = "sink"
"""Transport of a capture that is for a sink alone: the response has none of its rows."""


@dataclass(frozen=True)
class Said:
    """Prompt and completion of a choice, whole, however they were streamed."""

    key: str
    """Id of the request, as its client knows it."""
    prompt_ids: tuple[int, ...]
    prompt: str
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Done:
    """The results of a finished choice, joined over workers and steps."""

    tensors: Mapping[str, TensorData]
    """(layers, tokens, width) by name."""
    positions: tuple[int, ...] = ()
    """Of the captured tokens, ascending."""
    layers: tuple[int, ...] = ()
    """Captured layers, ascending."""
    said: Said | None = None
    """None where no sink of this choice reads it."""
    use: SinkUse | None = None
    """What the request says of itself; None for one that a rule has chosen."""

    def captured(self, name: str, index: int) -> Captured:
        tensor, said = own_memory(self.tensors[name]), self.said
        assert said is not None
        n_rows = tensor.shape[1]
        key = said.key if self.use is None or self.use.id is None else self.use.id
        record = SampleRecord(
            index=index,
            id=key,
            label=None if self.use is None else self.use.label,
            group=(None if self.use is None else self.use.group) or key,
            n_rows=n_rows,
            n_prompt=len(said.prompt_ids),
            completion=said.text,
            columns={} if self.use is None else self.use.columns,
            prompt=said.prompt,
            content=hashlib.sha256(repr(said.prompt_ids).encode()).hexdigest()[:24],
        )
        return Captured(
            record=record,
            acts=tensor if n_rows else None,
            layers=self.layers if n_rows else (),
            positions=self.positions,
            token_ids=(*said.prompt_ids, *said.token_ids),
        )


def own_memory(tensor: TensorData) -> TensorData:
    """The same rows, copied where they would keep much more memory than their own."""
    memory: Any = tensor.storage.base
    if memory is not None and 4 * memoryview(memory).nbytes > 5 * tensor.nbytes:
        # Of a text that ended long before it had to. numpy copies without the interpreter's lock.
        return TensorData(tensor.storage.copy(), tensor.dtype)
    return tensor


def lot(*words: str) -> float:
    """A number from 0 to 1, excluded, that depends on some words alone and falls evenly."""
    digest = hashlib.blake2b("\0".join(words).encode(errors="replace"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


class SinkConfig(BaseModel):
    """One sink: where to, what of, which requests, and what to do when it is slow."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    store: str | None = None
    """Folder of shards: a path or any fsspec URL."""
    callback: str | None = None
    """Or a function: name of an entry point of the group `inspect_lens.sinks`."""
    layers: Layers = "all"
    """Layers to record."""
    site: Site = RESID_POST
    """Place in the block; one, since a store holds rows of one kind."""
    positions: PositionName = "completion"
    """Tokens to record."""
    dtype: RowDType = "model"
    """dtype of the rows."""
    share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the requests without lens keys that is recorded, chosen by the request's id."""
    seed: str = ""
    """Secret that the choice depends on, so that nobody can choose ids that are never recorded."""
    requests: bool = True
    """Whether requests may name the sink."""
    limit_bytes: int = Field(default=0, ge=0)
    """Bytes of rows that each front-end process takes for it at most, until it ends; 0: any."""
    label_meaning: str = ""
    """What label 1 of a sample means; goes into the store."""
    when_slow: Literal["drop", "sample", "spill"] = "drop"
    """What happens to rows that come faster than the sink takes them."""
    memory_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of rows that wait in the memory of each front-end process."""
    spill: str = ""
    """Folder of this host that takes rows with `when_slow: spill`."""
    spill_bytes: int = Field(default=4 << 30, gt=0)
    """Bytes that each front-end process writes there at most."""
    shard_bytes: int = Field(default=16 << 20, gt=0)
    """Bytes of rows after which a shard is written."""
    shard_s: float = Field(default=30.0, gt=0.0)
    """Seconds after which one is written that is not full."""
    linger_s: float = Field(default=0.1, ge=0.0)
    """The same for one that a request waits for."""

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return CaptureSpec(layers=value).layers

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.store is None) == (self.callback is None):
            raise ValueError("give one of store (a folder) and callback (a name)")
        if (self.when_slow == "spill") != bool(self.spill):
            raise ValueError("when_slow='spill' and spill (a folder of this host) go together")
        return self

    def capture(self) -> CaptureSpec:
        """What is captured for it, and not returned."""
        made = CaptureSpec(
            layers=self.layers, site=self.site, positions=self.positions, dtype=self.dtype
        )
        return made.model_copy(update={"transport": HIDDEN})

    def layers_of(self, facts: EngineFacts) -> tuple[int, ...]:
        return tuple(range(facts.n_layers)) if self.layers == "all" else self.layers


def read_sinks(setting: str) -> dict[str, SinkConfig]:
    text = setting.strip()
    if not text:
        return {}
    try:
        loaded = json.loads(text if text.startswith("{") else Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"INSPECT_LENS_SINKS: not JSON, and not a file that has it ({error}); give an object "
            'such as {"recorded": {"store": "/data/recorded", "layers": [12], "share": 0.01}}'
        ) from None
    if not isinstance(loaded, dict):
        raise SpecError(f"INSPECT_LENS_SINKS={shown(loaded)}; give an object of sinks by name")
    found = {}
    for name, fields in loaded.items():
        check_name(name, field="INSPECT_LENS_SINKS")
        try:
            found[name] = SinkConfig.model_validate_json(json.dumps(fields))
        except ValidationError as error:
            raise SpecError(f"INSPECT_LENS_SINKS: {name}: {explain(error)}") from None
    return found
