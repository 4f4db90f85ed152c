"""What a call captured: from a choice of a response, decoded and checked, to a file and back.

Files lie on any fsspec path: reads are whole, and writes are there entirely or not at all. fsspec
is imported where a path is not a local one: the process beside an eval does without.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast, get_args
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import to_json

from inspect_lens._base.untrusted import judge_total, parse_json, parsing, read_regular
from inspect_lens.errors import ArtifactError, CaptureError, SpecError
from inspect_lens.spec import (
    LENS_NAME,
    QK_NAMES,
    REDUCTIONS,
    CaptureReceipt,
    CaptureSpec,
    DType,
    LensRequest,
    LogitLens,
    QKSpec,
    Receipt,
    TensorData,
    decode_tensor,
    explain,
)

__all__ = [
    "DTYPES",
    "STORAGE",
    "ChoiceFields",
    "FetchBytes",
    "Payload",
    "absolute",
    "decode_file",
    "decode_payload",
    "encode_file",
    "encode_tensors",
    "fetch_payload",
    "has_file",
    "is_local",
    "join",
    "parent",
    "qk_values",
    "read_file",
    "read_tensors",
    "read_vector",
    "remove_file",
    "stamp_of",
    "stem",
    "write_file",
]

logger = logging.getLogger(__name__)

_PARTS = 16
"""Of a file that go into one system call: the least that POSIX promises."""


def write_file(uri: str, parts: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Write a file so that a reader sees all of it or none."""
    try:
        if is_local(uri):
            # What nearly all calls write; asking fsspec costs half as much as the file.
            _replace(uri, parts, mode)
            return
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(uri)
        if "file" in filesystem.protocol:
            _replace(path, parts, mode)
        else:
            filesystem.makedirs(parent(path), exist_ok=True)
            # Object stores show an upload only when it is complete.
            filesystem.pipe_file(path, b"".join(parts))
    except (OSError, ImportError, ValueError) as error:
        raise CaptureError(
            f"{uri}: could not write captured activations ({error}); free space, choose another "
            "place with -M activations_dir= or INSPECT_LENS_DIR, or keep them in memory with "
            "-M activations=memory"
        ) from error


def read_file(uri: str, *, most: int | None = None) -> bytes | None:
    """Read a file; a local one has to be a regular file."""
    try:
        if is_local(uri):
            return read_regular(uri, most=most)
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(uri)
        if most is not None and (size := filesystem.size(path)) is not None and size > most:
            raise ValueError(f"it has {size} bytes, and should have {most} at most")
        data: bytes = filesystem.cat_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ImportError, ValueError) as error:
        raise ArtifactError(f"{uri}: could not be read ({error})") from error
    return data


class _Left:
    is_told = False
    """Whether this process has said that a file stays."""


def remove_file(uri: str) -> None:
    """Remove a file that nobody knows of, if it is there; that one stays is said once."""
    try:
        if is_local(uri):
            os.unlink(uri)
        else:
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(uri)
            filesystem.rm_file(path)
    except FileNotFoundError:
        return
    except Exception as error:  # noqa: BLE001 - each kind of bucket has errors of its own
        level, _Left.is_told = logging.DEBUG if _Left.is_told else logging.WARNING, True
        logger.log(
            level,
            "%s: activations of a call that failed or was cancelled stay, and no log names them: "
            "the file could not be removed (%s: %s); later ones are logged as DEBUG",
            uri, type(error).__name__, error,
        )  # fmt: skip


def has_file(uri: str) -> bool:
    """Whether a file is there and can be asked for."""
    if is_local(uri):
        return os.path.isfile(uri)
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(uri)
        return bool(filesystem.exists(path))
    except (OSError, ImportError, ValueError):
        return False


def is_local(uri: str) -> bool:
    """Whether a path needs no fsspec: absolute, and without a protocol."""
    return os.path.isabs(uri) and "::" not in uri and "://" not in uri


def stamp_of(path: str) -> str | None:
    """What changes when a local file is written again; None where there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def parent(uri: str) -> str:
    """Everything before the last slash; `/` for what lies at the root of the disk."""
    folder = uri.rpartition("/")[0]
    return folder or "/" * uri.startswith("/")


def stem(uri: str) -> str:
    """The last part without its last extension."""
    return uri.rpartition("/")[2].rpartition(".")[0] or uri.rpartition("/")[2]


def join(root: str, relative: str) -> str:
    """Put a relative URI below a root; an absolute one stays as it is."""
    if "://" in relative or relative.startswith("/") or not root:
        return relative
    return f"{root.rstrip('/')}/{relative}"


def absolute(uri: str) -> str:
    """A local path made absolute; URLs stay as they are, without `file://`."""
    if uri.startswith("file://"):
        uri = uri.removeprefix("file://")
    return uri if "://" in uri else os.path.abspath(uri)


def _replace(path: str, parts: Iterable[bytes | memoryview], mode: int) -> None:
    """Write a local file in few system calls."""
    # Each gives the interpreter away, and a thread that wants it back from a busy event loop waits
    # 5 ms, so this counts more than the bytes. The disk is not waited for: an agent's calls write
    # faster than disks are. A machine that loses its power may lose files of the last half minute;
    # their hashes in the log tell.
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".{uuid4().hex}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        file = os.open(temporary, flags, mode)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
        file = os.open(temporary, flags, mode)
    try:
        try:
            _write_all(file, parts)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_all(file: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write parts one behind the other; a system call need not take all that it is given."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        many = hasattr(os, "writev")
        done = os.writev(file, left[:_PARTS]) if many else os.write(file, left[0])
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]


DTYPES: Final = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "F64": "float64",
    "I64": "int64",
}  # fmt: skip
"""As the format names them, and as we do."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
STORAGE: Final = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "F64": "<f8", "I64": "<i8",
}  # fmt: skip
"""As numpy reads them; bfloat16 comes as 16 bits."""


def encode_tensors(
    tensors: Mapping[str, tuple[str, NDArray[Any]]], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """The parts of a file, of tensors with their dtypes; large ones are not copied."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, array) in tensors.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": _NAMES[dtype], "shape": list(array.shape), "data_offsets": span}
        offset = span[1]
    text = to_json(header)
    # The data have to begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    parts = [np.ascontiguousarray(array).data for _, array in tensors.values() if array.size]
    return [len(text).to_bytes(8, "little") + text, *(part.cast("B") for part in parts)]


def read_tensors(data: bytes) -> tuple[dict[str, tuple[str, NDArray[Any]]], dict[str, str]]:
    """Dtypes and views of the tensors of a file, and its metadata."""
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = parse_json(data[8:start])
        metadata = header.pop("__metadata__", {})
        spans = (entry["data_offsets"] for entry in header.values())
        judge_total((end - begin for begin, end in spans), len(data) - start)
        tensors = {}
        for name, entry in header.items():
            dtype = np.dtype(STORAGE[entry["dtype"]])
            begin, end = entry["data_offsets"]
            count = math.prod(entry["shape"])
            if end - begin != count * dtype.itemsize or start + end > len(data):
                raise ValueError(f"{name} is not whole")
            array = np.frombuffer(data, dtype, count=count, offset=start + begin)
            tensors[name] = DTYPES[entry["dtype"]], array.reshape(entry["shape"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return tensors, metadata


FORMAT = "activations/1"
_PROMPT, _COMPLETION = "prompt_token_ids", "token_ids"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Everything that one choice of one call brought back."""

    tensors: Mapping[str, TensorData]
    """(layers, tokens, hidden) by name."""
    layers: Mapping[str, tuple[int, ...]]
    """Layers of the first axis, ascending, by name."""
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    receipt: Receipt | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Model, sample and message that this belongs to."""

    def with_origin(self, origin: Mapping[str, Any]) -> Payload:
        """The same payload, said to belong to something."""
        return replace(self, origin=origin)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def sha256(self) -> str:
        """Hash over names, dtypes, shapes and contents of the tensors, 16 hex digits of it.

        It guards against mix-ups and damage. Inspect logs an output three times per sample, so
        each digit counts.
        """
        lines = [f"{name}:{self.tensors[name].sha256}" for name in sorted(self.tensors)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def encode_file(payload: Payload) -> list[bytes | memoryview]:
    """Lay a payload out as a safetensors file."""
    tensors: dict[str, tuple[str, NDArray[Any]]] = {
        name: (tensor.dtype, tensor.storage) for name, tensor in payload.tensors.items()
    }
    for name, ids in ((_PROMPT, payload.prompt_token_ids), (_COMPLETION, payload.token_ids)):
        tensors[name] = "int32", np.asarray(ids, dtype=np.int32)
    receipt = payload.receipt
    meta = {
        "format": FORMAT,
        "layers": {name: list(layers) for name, layers in payload.layers.items()},
        "receipt": None if receipt is None else receipt.model_dump(mode="json", exclude_none=True),
        "origin": dict(payload.origin),
    }
    return encode_tensors(tensors, {"inspect_lens": to_json(meta).decode()})


def decode_file(data: bytes, *, where: str) -> Payload:
    """Read what `encode_file` laid out."""
    tensors, metadata = _read(data, where)
    with parsing(where, "an activation file of this release", f"wanted is {FORMAT}"):
        meta = parse_json(metadata["inspect_lens"])
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']!r}")
        receipt = meta.get("receipt")
        return Payload(
            tensors={name: _as_tensor(where, *tensors[name]) for name in meta["layers"]},
            layers={name: tuple(layers) for name, layers in meta["layers"].items()},
            prompt_token_ids=tuple(tensors[_PROMPT][1].tolist()),
            token_ids=tuple(tensors[_COMPLETION][1].tolist()),
            receipt=None if receipt is None else Receipt.model_validate(receipt),
            origin=meta.get("origin") or {},
        )


def read_vector(data: bytes, *, where: str) -> TensorData:
    """Read the tensor `activations` of a steering vector's file.

    Args:
        data: the whole file.
        where: its address, for error messages.

    Raises:
        ArtifactError: the file is damaged or holds no such tensor.

    Example:
        ```python
        import numpy as np
        from safetensors.numpy import save

        from inspect_lens.model import read_vector

        data = save({"activations": np.ones((1, 256), dtype=np.float32)})
        assert read_vector(data, where="mine.safetensors").shape == (1, 256)
        ```
    """
    tensors, _ = _read(data, where)
    if "activations" not in tensors:
        raise ArtifactError(f"{where}: holds {sorted(tensors)}; wanted is the tensor 'activations'")
    return _as_tensor(where, *tensors["activations"])


def _read(data: bytes, where: str) -> tuple[dict[str, tuple[str, NDArray[Any]]], dict[str, str]]:
    try:
        return read_tensors(data)
    except ValueError as error:
        raise ArtifactError(f"{where}: not a safetensors file, or damaged ({error})") from None


def _as_tensor(where: str, dtype: str, array: NDArray[Any]) -> TensorData:
    if dtype not in get_args(DType):
        allowed = ", ".join(get_args(DType))
        raise ArtifactError(f"{where}: has a tensor of {dtype}; allowed are {allowed}")
    return TensorData(array, cast("DType", dtype))


FetchBytes = Callable[[str], bytes | memoryview]
"""Gets the bytes behind a handle, in the calling thread."""


@dataclass(kw_only=True)
class ChoiceFields:
    """Lens fields of one choice."""

    activations: Mapping[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    receipt: Mapping[str, Any] | None = None
    hook_results: Mapping[str, Any] | None = None


def fetch_payload(
    choice: ChoiceFields, prompt_token_ids: list[int], request: LensRequest, fetch: FetchBytes
) -> Payload:
    """Fetch what came beside the response, and decode it; not for an event loop."""
    raw = {
        name: fetch(str(entry["handle"]))
        for name, entry in (choice.activations or {}).items()
        if isinstance(entry, Mapping) and "handle" in entry
    }
    return decode_payload(choice, prompt_token_ids, request, raw)


def decode_payload(
    choice: ChoiceFields,
    prompt_token_ids: list[int],
    request: LensRequest,
    raw: Mapping[str, bytes | memoryview],
) -> Payload:
    """Decode one choice and check that its rows are the tokens that were asked for."""
    try:
        tensors = {
            name: decode_tensor(entry, field=f"activations.{name}", raw=raw.get(name))
            for name, entry in (choice.activations or {}).items()
            if "__json__" not in entry
        }
        receipt = None if choice.receipt is None else Receipt.model_validate(choice.receipt)
    except (SpecError, ValidationError, AttributeError) as error:
        why = explain(error) if isinstance(error, ValidationError) else error
        raise CaptureError(
            f"activations: the server sent something that cannot be read ({why}); the versions "
            "of client and server may differ"
        ) from None
    capture = request.capture
    n_tokens = len(prompt_token_ids) + len(choice.token_ids)
    wanted = {name for names in request.tensor_names.values() for name in names}
    if absent := sorted(wanted - tensors.keys()):
        raise CaptureError(
            f"activations: {', '.join(absent)} asked for, and the response has "
            f"{', '.join(tensors) or 'none'}; this server does not serve that site"
        )
    layers: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if name in QK_NAMES:
            layers[name] = _check_qk(name, tensor, qk_values(choice), request.qk)
        elif name == LENS_NAME:
            layers[name] = _check_lens(tensor, receipt, request.lens)
        else:
            layers[name] = _check(name, tensor, capture, receipt, n_tokens)
    return Payload(
        tensors=tensors,
        layers=layers,
        prompt_token_ids=tuple(prompt_token_ids),
        token_ids=tuple(choice.token_ids),
        receipt=receipt,
    )


def qk_values(choice: ChoiceFields) -> dict[str, Any]:
    """Plain values beside the queries and keys of a choice, such as `qk_meta`."""
    entries = choice.activations or {}
    return {n: entry["__json__"] for n, entry in entries.items() if "__json__" in entry}


def _check_qk(
    name: str, tensor: TensorData, values: Mapping[str, Any], asked: QKSpec | None
) -> tuple[int, ...]:
    """Layers of queries or keys, once their shape is known to fit."""
    if asked is not None and asked.heads is not None:
        found = values.get("qk_heads" if name == QK_NAMES[0] else "qk_key_heads")
        if not isinstance(found, list) or (len(tensor.shape), tensor.shape[0]) != (3, len(found)):
            raise CaptureError(
                f"activations.{name}: shape {tensor.shape} for the heads {found}; qk.heads asks "
                "for (heads, tokens, head size). This server returns all heads of a layer; leave "
                "heads out, and name layers"
            )
        wanted = asked.heads if name == QK_NAMES[0] else _key_heads(asked.heads, values)
        if found != [[*head] for head in wanted]:
            raise _other(name, f"the heads {found}", f"heads {[[*head] for head in wanted]}")
        return tuple(layer for layer, _ in wanted)
    layers = values.get("qk_layers")
    if not isinstance(layers, list) or len(tensor.shape) != 4 or tensor.shape[0] != len(layers):
        raise CaptureError(
            f"activations.{name}: shape {tensor.shape} for the layers {layers}; wanted is "
            "(layers, tokens, heads, head size)"
        )
    if asked is not None and asked.layers not in ("all", tuple(layers)):
        raise _other(name, f"layers {layers}", f"layers {list(asked.layers)}")
    return tuple(int(layer) for layer in layers)


def _key_heads(
    heads: Sequence[tuple[int, int]], values: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Key heads that query heads read, by what the answer says of its layers."""
    try:
        each = {
            layer: meta["num_heads"] // meta["num_kv_heads"]
            for layer, meta in zip(values["qk_layers"], values["qk_meta"], strict=True)
        }
        return sorted({(layer, head // each[layer]) for layer, head in heads})
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CaptureError(
            f"activations.{QK_NAMES[1]}: which key heads belong to the asked ones cannot be read "
            f"out of qk_layers and qk_meta ({type(error).__name__}: {error}); the versions of "
            "client and server may differ"
        ) from None


def _other(name: str, came: str, asked: str) -> CaptureError:
    return CaptureError(
        f"activations.{name}: {came} came, and asked were {asked}. The server returned something "
        "else than it was asked for"
    )


def _check_lens(
    tensor: TensorData, receipt: Receipt | None, asked: LogitLens | None
) -> tuple[int, ...]:
    """Layers of what a logit lens read, once its shape is known to fit."""
    done = receipt.lens if receipt else None
    if done is None or tensor.shape != (len(done.layers), done.n_positions, done.columns):
        raise CaptureError(
            f"activations.{LENS_NAME}: shape {tensor.shape}, and the receipt says {done}; the "
            "versions of client and server may differ"
        )
    if asked is not None and asked.layers not in ("all", done.layers):
        raise _other(LENS_NAME, f"layers {list(done.layers)}", f"layers {list(asked.layers)}")
    return done.layers


def _check(
    name: str,
    tensor: TensorData,
    capture: CaptureSpec | None,
    receipt: Receipt | None,
    n_tokens: int,
) -> tuple[int, ...]:
    """Layers of a tensor, once its shape is known to fit."""
    shape = tensor.shape
    if len(shape) != 3:
        raise CaptureError(f"activations.{name}: shape {shape}; wanted is (layers, tokens, hidden)")
    done = receipt.capture if receipt else None
    if capture is not None:
        _check_form(name, tensor, capture, done)
    asked = None if capture is None or capture.layers == "all" else capture.layers
    layers = (done.layers if done else asked) or tuple(range(shape[0]))
    rows = done.n_rows if done else shape[1]
    if done is None and n_tokens and capture is not None and capture.is_plain:
        # Without a receipt the tokens are the only witness.
        rows = n_tokens - 1
    if (asked and layers != asked) or shape[:2] != (len(layers), rows):
        raise CaptureError(
            f"activations.{name}: shape {shape} for layers {list(layers)} and {rows} tokens; "
            f"asked were {'all layers' if asked is None else list(asked)}. The server returned "
            "something else than it was asked for"
        )
    return layers


def _check_form(
    name: str, tensor: TensorData, capture: CaptureSpec, done: CaptureReceipt | None
) -> None:
    """See that a server which does not know a form did not pass over it in silence."""
    reduced = done.reduce if done else "none"
    width = REDUCTIONS[reduced].width
    if reduced != capture.reduce or (width is not None and tensor.shape[2] != width):
        raise CaptureError(
            f"activations.{name}: reduce={capture.reduce!r} was asked for, and shape "
            f"{tensor.shape} came with reduce={reduced!r}; this server does not reduce so"
        )
    if capture.heads is not None and (done is None or done.heads != capture.heads):
        raise CaptureError(
            f"activations.{name}: heads={list(capture.heads)} were asked for, and shape "
            f"{tensor.shape} came without word of them; this server returns whole rows"
        )
    if capture.dtype not in ("model", tensor.dtype):
        raise CaptureError(
            f"activations.{name}: dtype={capture.dtype!r} was asked for, and {tensor.dtype} came; "
            "this server does not convert"
        )
