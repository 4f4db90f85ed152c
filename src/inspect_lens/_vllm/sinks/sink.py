"""Sinks: how an operator describes one, what is given to it, and who takes that in the end."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from inspect_lens._base.untrusted import at_start, parse_json, read_regular
from inspect_lens._intake import write_file
from inspect_lens._shards import Captured, SampleRecord, ShardWriter
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
class Exchange:
    """Prompt and completion of a choice, whole, however they were streamed."""

    key: str
    """Id of the request, as its client knows it."""
    prompt_ids: tuple[int, ...]
    prompt: str
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Done:
    """The results of a finished choice, joined over workers and steps."""

    tensors: Mapping[str, TensorData]
    """(layers, tokens, width) by name."""
    positions: tuple[int, ...] = ()
    """Of the captured tokens, ascending."""
    layers: tuple[int, ...] = ()
    """Captured layers, ascending."""
    said: Exchange | None = None
    """None where no sink of this choice reads it."""
    use: SinkUse | None = None
    """What the request says of itself; None for one that a rule has chosen."""

    def captured(self, name: str, index: int) -> Captured:
        tensor, said = self.tensors[name], self.said
        assert said is not None
        tensor = TensorData(own_memory(tensor.storage), tensor.dtype)
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


def own_memory(rows: NDArray[Any]) -> NDArray[Any]:
    """The same rows, copied where they would keep much more memory than their own."""
    memory: Any = rows.base
    if memory is not None and 4 * memoryview(memory).nbytes > 5 * rows.nbytes:
        # Of a text that ended long before it had to. numpy copies without the interpreter's lock.
        return rows.copy()
    return rows


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
        loaded = parse_json(text if text.startswith("{") else read_regular(text))
    except (OSError, ValueError) as error:
        raise at_start(
            "INSPECT_LENS_SINKS: not JSON, and not a file that has it; give an object such as "
            '{"recorded": {"store": "/data/recorded", "layers": [12], "share": 0.01}}',
            str(error),
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


GROUP = "inspect_lens.sinks"
"""Entry points of functions."""

Function = Callable[[Captured, Mapping[str, Any]], object]
Parts = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Given:
    """What became of samples that were given away."""

    shard: str | None = None
    """File that has them."""
    errors: Sequence[BaseException | None] = ()
    """Of each sample, where each has its own."""


class Receiver(Protocol):
    """Takes samples, in a thread of the sink's own."""

    is_eager: bool
    """Whether it takes samples one by one, and need not wait for more."""

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Give samples away."""
        ...


class StoreReceiver:
    is_eager = False

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Write a shard; the same one may be written again."""
        name, _ = self._writer.write(number, samples, writer=writer, parts=parts)
        return Given(shard=name)


class FunctionReceiver:
    is_eager = True

    def __init__(self, function: Function, about: Mapping[str, Any]) -> None:
        self._function, self._about = function, about

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Call it; what it raises is of that sample alone."""
        errors: list[BaseException | None] = []
        for sample in samples:
            try:
                self._function(sample, self._about)
                errors.append(None)
            except BaseException as error:  # noqa: BLE001 - somebody's code, in a thread of ours
                errors.append(error)
        return Given(errors=errors)


def find_function(name: str) -> Function:
    points = entry_points(group=GROUP)
    found = {point.value: point for point in points if point.name == name}
    if len(found) != 1:
        raise SpecError(
            f"INSPECT_LENS_SINKS: callback={name!r} is {' and '.join(found) or 'no entry point'} "
            f"of {GROUP!r}; installed are {', '.join(sorted(points.names)) or 'none'}; install one "
            "package that has it beside the server"
        )
    try:
        function: Any = found.popitem()[1].load()
    except Exception as error:
        raise at_start(
            f"INSPECT_LENS_SINKS: callback={name!r} cannot be loaded", f"{name}: {error}"
        ) from error
    if not callable(function):
        raise SpecError(f"INSPECT_LENS_SINKS: callback={name!r} is no function")
    made: Function = function
    return made


_SHARD = re.compile(r"shard-([0-9a-f]{12})-(\d+)\.safetensors")
_LOCK = re.compile(r"([0-9a-f]{12})\.lock")


@dataclass(frozen=True)
class Spilled:
    """A shard in the folder."""

    path: Path
    writer: str
    number: int
    n_bytes: int


class SpillFolder:
    """Shards of this process, and of processes that ended before theirs were taken.

    Each process holds a lock on a file with its name, which goes with it, however it ends.
    """

    def __init__(self, folder: Path, most_bytes: int, writer: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._most = folder, most_bytes
        self._lock = threading.Lock()
        self._waiting: deque[Spilled] = deque()
        self._held: dict[str, int] = {}
        """By writer, a lock that this process has."""
        if not self._hold(writer):
            raise OSError(f"{folder}: another process is called {writer}")
        self._adopt()
        self.n_bytes = sum(one.n_bytes for one in self._waiting)
        """Of all that waits here for this process."""

    def put(self, writer: str, number: int, parts: Sequence[bytes | memoryview]) -> bool:
        """Keep a shard; False where there is no room for it."""
        size = sum(memoryview(part).nbytes for part in parts)
        with self._lock:
            if self.n_bytes + size > self._most:
                return False
            self.n_bytes += size
        path = self._folder / f"shard-{writer}-{number:06d}.safetensors"
        try:
            write_file(str(path.absolute()), parts, mode=0o600)
        except BaseException:
            with self._lock:
                self.n_bytes -= size
            raise
        with self._lock:
            self._waiting.append(Spilled(path, writer, number, size))
        return True

    def first(self) -> Spilled | None:
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def remove(self, one: Spilled) -> None:
        # First, or a file that cannot be removed would be given away for ever.
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(one)
            self.n_bytes -= one.n_bytes
        one.path.unlink(missing_ok=True)

    def _hold(self, writer: str) -> bool:
        """Take the lock of a writer; False while its process lives."""
        lock = os.open(
            self._folder / f"{writer}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._held[writer] = lock
        return True

    def _adopt(self) -> None:
        """Take over what processes left that have ended."""
        ours = set(self._held)
        for path in sorted(self._folder.glob("*.lock")):
            match = _LOCK.fullmatch(path.name)
            if match and match[1] not in ours:
                self._hold(match[1])
        found: dict[str, list[Spilled]] = {writer: [] for writer in self._held}
        for path in sorted(self._folder.glob("shard-*.safetensors")):
            if (match := _SHARD.fullmatch(path.name)) and match[1] in found:
                one = Spilled(path, match[1], int(match[2]), path.stat().st_size)
                found[match[1]].append(one)
        for writer, shards in found.items():
            self._waiting.extend(shards)
            if not shards and writer not in ours:
                # Still held, so that nobody else takes it up between.
                (self._folder / f"{writer}.lock").unlink(missing_ok=True)
