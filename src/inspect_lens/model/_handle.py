"""The handle in `output.metadata["activations"]`: tensors while live, a reference in the log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property, lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_serializer

from inspect_lens._base.to_torch import to_torch
from inspect_lens._intake import (
    Payload,
    Stored,
    decode_file,
    encode_file,
    is_local,
    join,
    parent,
    stamp_of,
)
from inspect_lens.errors import ArtifactError
from inspect_lens.spec import LENS_NAME, LensTable, Numerics, Receipt, Reduce, TensorData, explain

from ._places import MemoryStore, MessageIndex, find, is_there, judge_digest, know_root

if TYPE_CHECKING:
    import torch

__all__ = ["Activations", "TensorInfo"]


_numbers = count()
NUMERICS = "numerics"
"""Key of what the engine computed with, in the origin of a call's data."""


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

    KIND: ClassVar[str]
    """`$lens` of the logged form."""
    METADATA: ClassVar[str]
    """Where the handle stands in the metadata of an output."""
    MEMORY: ClassVar[MemoryStore[Any]]
    """Data that this process holds."""

    _key: str = PrivateAttr(default_factory=lambda: str(next(_numbers)))

    def _contents(self) -> dict[str, Any]:
        """The fields of this kind of handle, as they are logged."""
        raise NotImplementedError

    @classmethod
    def _fields_of(cls, logged: dict[str, Any]) -> dict[str, Any]:
        """All fields, from what is logged of them."""
        return logged

    def _most(self) -> int:
        """Bytes that the data may have in a file, beside header and ids."""
        raise NotImplementedError

    def _decoded(self, content: bytes, where: str) -> Any:
        """The data, from its file."""
        raise NotImplementedError

    def _encoded(self) -> bytes:
        """The data, as it is in a file."""
        raise NotImplementedError

    @classmethod
    def from_reference(cls, reference: Mapping[str, Any]) -> Self:
        """Make a handle from its logged form.

        Args:
            reference: the mapping that stands in the log.

        Returns:
            The handle; nothing is read yet.

        Raises:
            ArtifactError: the mapping is not such a reference.
        """
        try:
            fields = {name: value for name, value in reference.items() if name != "$lens"}
            if reference.get("$lens") != cls.KIND:
                raise ValueError(f"$lens is {reference.get('$lens')!r}")
            return cls.model_validate(cls._fields_of(fields))
        except (AttributeError, KeyError, TypeError, ValueError, ValidationError) as error:
            why = explain(error) if isinstance(error, ValidationError) else error
            what = cls.METADATA.replace("_", " ")
            raise ArtifactError(
                f"not a logged reference to {what} ({why}); wanted is the mapping with "
                f'"$lens": "{cls.KIND}" from output.metadata["{cls.METADATA}"]'
            ) from None

    def remember(self, data: Any) -> None:
        """Hold the data of this handle in memory."""
        self.MEMORY.put(self._key, data)

    @property
    def in_memory(self) -> bool:
        """Whether no file has to be read."""
        return self.MEMORY.get(self._key) is not None

    @property
    def is_here(self) -> bool:
        """Whether the data is in memory, or its file is where it is looked for.

        False for a log that came without the `.lens` folder beside it.
        """
        return self.in_memory or (self.uri is not None and is_there(self.uri, self.root))

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt as the engine saw it."""
        return tuple(self._load().prompt_token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids that were sampled."""
        return tuple(self._load().token_ids)

    @property
    def origin(self) -> Mapping[str, Any]:
        """Model, sample, epoch and message that these belong to, as far as known."""
        origin: Mapping[str, Any] = self._load().origin
        return origin

    @property
    def numerics(self) -> Numerics | None:
        """What the engine computed them with; None where its server did not tell."""
        found = self.origin.get(NUMERICS)
        try:
            return None if found is None else _numerics(tuple(found.items()))
        except (AttributeError, TypeError, ValidationError):
            return None  # of a release that tells more

    def _load(self) -> Any:
        data = self.MEMORY.get(self._key)
        if data is None:
            data = self._read()
            self.remember(data)
        return data

    def _read(self) -> Any:
        if self.uri is None:
            raise ArtifactError(
                f"{self.METADATA}: not in memory any more (or never kept, as with -M "
                "activations=drop), and there is no file; raise INSPECT_LENS_MEMORY_BYTES, or "
                "write files with -M activations_dir= or INSPECT_LENS_DIR"
            )
        most = self._most() + 8 * (self.n_prompt + self.n_completion) + _HEADER
        where, content = find(self.uri, self.root, most=most)
        return self._decoded(content, where)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for Inspect's cache: the file by absolute address, else the data itself."""
        if self.uri is not None:
            moved = {"uri": join(self.root or "", self.uri), "root": None}
            return _unpickle, (type(self), self.model_dump() | moved, None)
        return _unpickle, (type(self), self.model_dump(), self._encoded())

    @model_serializer(mode="plain")
    def _serialise(self) -> dict[str, Any]:
        # Inspect asks seven times per sample; whoever gets it gets a copy.
        return self._reference

    @cached_property
    def _reference(self) -> dict[str, Any]:
        where = {} if self.uri is None else {"uri": self.uri, "root": self.root}
        return {
            "$lens": self.KIND,
            **where,
            **self._contents(),
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


KEEPS_FILES: ContextVar[bool | None] = ContextVar("inspect_lens_keeps_files", default=None)
"""Whether the call that this task is about to make keeps files; None once it has its answer."""


def _unpickle(
    kind: type[LoggedHandle], reference: dict[str, Any], data: bytes | None
) -> LoggedHandle:
    handle = kind.from_reference(reference)
    keeps_files = KEEPS_FILES.get()
    if handle.uri is not None:
        know_root(parent(handle.uri))  # pickled by Inspect's cache, and not out of a log
        if keeps_files is not None and is_local(handle.uri) and not handle.is_here:
            raise ArtifactError(f"{handle.uri}: gone, so the call is made again")
    elif keeps_files:
        raise ArtifactError(f"{kind.METADATA}: without a file, so the call is made again")
    if data is not None:
        handle.remember(handle._decoded(data, "Inspect's cache"))  # noqa: SLF001 - of this module
    return handle


@lru_cache(maxsize=64)
def _numerics(told: tuple[tuple[str, Any], ...]) -> Numerics:
    """All calls to a server are told the same."""
    return Numerics.model_validate(dict(told))


_HEADER = 64 << 20
"""Bytes that receipt and names of a file may take beside its data."""
_LONGEST = 90
"""Letters of a tensor's facts: where Inspect walks a value, more than 100 become an attachment."""
_FACTS = re.compile(r"(\w+) (\d+(?:x\d+)*) layers ([\d,-]+)(?: (\w+))?")


class TensorInfo(BaseModel):
    """Facts about one captured tensor that are known without reading it."""

    model_config = ConfigDict(frozen=True)

    shape: tuple[int, ...]
    """(layers, tokens, hidden), or what `REDUCTIONS` says of `reduce`."""
    dtype: str
    layers: tuple[int, ...]
    """Layers of the first axis, ascending."""
    reduce: Reduce = "none"
    """What was made of the tokens' rows in the engine."""

    @cached_property
    def _logged(self) -> str | dict[str, Any]:
        layers = _write_layers(self.layers)
        text = f"{self.dtype} {'x'.join(map(str, self.shape))} layers {layers}"
        text += "" if self.reduce == "none" else f" {self.reduce}"
        if len(text) <= _LONGEST and _FACTS.fullmatch(text):
            return text
        return self.model_dump(mode="json", exclude_defaults=True)


def write_info(info: TensorInfo) -> str | dict[str, Any]:
    """As it stands in a log: in words, since Inspect walks every value of a mapping often."""
    return info._logged  # noqa: SLF001 - of this module


def read_info(logged: object) -> dict[str, Any]:
    """The fields of a `TensorInfo`, from what a log has now or had at first."""
    if not isinstance(logged, str):
        fields = cast("Mapping[str, Any]", logged)
        return {**fields, "layers": _read_layers(fields["layers"])}
    if (match := _FACTS.fullmatch(logged)) is None:
        raise ValueError(f"tensors: {logged!r}")
    dtype, shape, layers, reduce = match.groups(default="none")
    return {
        "shape": tuple(map(int, shape.split("x"))),
        "dtype": dtype,
        "layers": _read_layers(layers),
        "reduce": reduce,
    }


def _write_layers(layers: tuple[int, ...]) -> str:
    """Long runs of layers as `0-79`, because a log has hundreds of these."""
    run = len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if run else ",".join(map(str, layers))


def _read_layers(value: object) -> tuple[int, ...]:
    if not isinstance(value, str):
        return tuple(cast("list[int]", value))
    if match := re.fullmatch(r"(\d+)-(\d+)", value):
        return tuple(range(int(match[1]), int(match[2]) + 1))
    return tuple(map(int, value.split(",")))


@lru_cache(maxsize=1024)
def tensor_info(
    shape: tuple[int, ...], dtype: str, layers: tuple[int, ...], reduce: Reduce
) -> TensorInfo:
    """The facts of a tensor; calls of one length have the same ones."""
    return TensorInfo.model_construct(shape=shape, dtype=dtype, layers=layers, reduce=reduce)


REFERENCE = "activations/2"
"""`$lens` of the logged form."""

RESIDUAL_STREAM = "residual_stream"

MEMORY: MemoryStore[Payload] = MemoryStore()
"""Payloads that this process holds."""


class Activations(LoggedHandle):
    """Handle of the activations that one model call captured; tensors are read when asked for.

    `acts["residual_stream"]` is a torch tensor in the captured dtype, of shape
    (layers ascending, tokens, hidden); where all tokens were asked for there are
    n_prompt + n_completion - 1 of them, because the last sampled token is never fed to the
    model. What was reduced in the engine has one row of all tokens, or one number per token;
    `acts.tensors` says so. `acts.numpy("residual_stream")` needs no torch.

    The handle is small. What it stands for is held in memory up to INSPECT_LENS_MEMORY_BYTES
    and, inside an eval, in a file beside the log; in the log the handle is a reference to it.

    Example:
        ```python
        from inspect_lens.model import read_activations

        acts = read_activations("logs/honesty.eval")[0].activations
        assert acts.tensors["residual_stream"].shape[2] == 256  # known without reading the file
        rows = acts.numpy()[acts.layers.index(4)]  # (tokens, hidden) float32
        assert len(rows) == len(acts.positions)
        ```
    """

    tensors: dict[str, TensorInfo]
    """What there is, by name."""
    sha256: str
    """Hash over names, dtypes, shapes and contents of the tensors, 16 hex digits."""

    KIND = REFERENCE
    METADATA = "activations"
    MEMORY = MEMORY

    _steered: bool | None = PrivateAttr(default=None)
    _stamp: str | None = PrivateAttr(default=None)

    @classmethod
    def of(
        cls, payload: Payload, *, uri: str | None = None, root: str | None = None
    ) -> Activations:
        """Make a handle for a payload; see `remember`."""
        return cls.stored(Stored.of(payload), uri=uri, root=root)

    @classmethod
    def stored(cls, facts: Stored, *, uri: str | None, root: str | None) -> Activations:
        """Make a handle for a payload that is somewhere else.

        Args:
            facts: what is known of it.
            uri: of its file, relative to `root`.
            root: folder of the log.
        """
        # Not validated, and of few objects: each call of an eval makes one in the event loop, and
        # what lives as long as a sample does brings the next full garbage collection nearer.
        handle = cls.model_construct(
            _fields_set=_FIELDS,
            tensors={
                name: tensor_info(
                    tuple(shape),
                    dtype,
                    tuple(layers),
                    "none" if name == LENS_NAME else facts.reduce,
                )
                for name, (shape, dtype, layers) in facts.tensors.items()
            },
            sha256=facts.sha256,
            n_prompt=facts.n_prompt,
            n_completion=facts.n_completion,
            uri=uri,
            root=root,
        )
        handle._steered, handle._stamp = facts.steered, facts.stamp  # noqa: SLF001 - its own
        return handle

    @classmethod
    def _fields_of(cls, logged: dict[str, Any]) -> dict[str, Any]:
        infos = {name: read_info(info) for name, info in logged["tensors"].items()}
        return logged | {"tensors": infos}

    # -- tensors ---------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        """One tensor in the captured dtype, on the CPU, owning its memory."""
        return to_torch(self.data(name))

    def numpy(self, name: str = RESIDUAL_STREAM) -> NDArray[np.float32]:
        """One tensor as float32 (exact), of the same shape."""
        return self.data(name).to_float32()

    def data(self, name: str = RESIDUAL_STREAM) -> TensorData:
        """One tensor as numpy storage plus dtype, without a copy.

        Raises:
            KeyError: there is no tensor of that name.
            ArtifactError: it is neither in memory nor in a file that can be found.
        """
        if name not in self.tensors:
            raise KeyError(f"{name!r} was not captured; there is {', '.join(self.tensors)}")
        return self._load().tensors[name]

    def keys(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(self.tensors)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or `default` when it was not captured."""
        return self[name] if name in self.tensors else default

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors."""
        return ((name, self[name]) for name in self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self.tensors)

    def __bool__(self) -> bool:
        return True

    # -- facts -----------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the first axis, ascending."""
        info = self.tensors.get(RESIDUAL_STREAM) or next(iter(self.tensors.values()))
        return info.layers

    @property
    def receipt(self) -> Receipt | None:
        """What the engine says it did; None from a server that gives no receipts."""
        return self._load().receipt

    @property
    def was_steered(self) -> bool:
        """Whether the engine says that it steered the call; known live without the tensors."""
        if self._steered is None:
            self._steered = self.receipt is not None and self.receipt.steer is not None
        return self._steered

    @property
    def positions(self) -> tuple[int, ...]:
        """Absolute position of each token of the second axis, over prompt and completion.

        Of a `mean` or `max` those of all tokens that its one row is made of.
        """
        receipt = self.receipt
        capture = receipt.capture if receipt else None
        if capture is not None and capture.positions is not None:
            return capture.positions
        if capture is None and receipt is not None and receipt.lens is not None:
            return receipt.lens.positions
        info = self.tensors.get(RESIDUAL_STREAM) or next(iter(self.tensors.values()))
        first = (capture.first_position if capture else None) or 0
        count = capture.n_positions if capture else info.shape[1]
        return tuple(range(first, first + count))

    @property
    def lens(self) -> LensTable | None:
        """What a logit lens read, as arrays of tokens and layers; None where none was asked for."""
        if LENS_NAME not in self.tensors:
            return None
        receipt = self.receipt
        done = receipt.lens if receipt else None
        return None if done is None else done.result(self)

    def _load(self) -> Payload:
        payload: Payload = super()._load()
        return payload

    def _most(self) -> int:
        return sum(math.prod(i.shape) * _ITEMSIZE.get(i.dtype, 8) for i in self.tensors.values())

    def _decoded(self, content: bytes, where: str) -> Payload:
        payload = decode_file(content, where=where)
        path = join(self.root or "", self.uri or "")
        # Hashing takes longer than reading, and what this process wrote was hashed then.
        is_untouched = where == path and self._stamp is not None and stamp_of(path) == self._stamp
        if not is_untouched:
            judge_digest(where, payload.sha256, self.sha256)
        return payload

    def _encoded(self) -> bytes:
        return b"".join(encode_file(self._load()))

    def _contents(self) -> dict[str, Any]:
        return {"tensors": {name: write_info(info) for name, info in self.tensors.items()}}

    def __repr__(self) -> str:
        facts = ", ".join(f"{n}: {i.shape} {i.dtype}" for n, i in self.tensors.items())
        return f"Activations({facts})"

    __str__ = __repr__


_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
_FIELDS = set(Activations.model_fields)
"""What every handle is made with; nothing changes it, as handles are frozen."""


MESSAGES: MessageIndex[Activations] = MessageIndex()
"""Handles of this process, by message id."""
