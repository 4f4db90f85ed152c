"""Files that a stranger may have made: judged by what they declare, before they cost memory.

Every loader of a probe, vector, lens, autoencoder, store or log reads JSON and archives through
here. safetensors files need no more: their library refuses ranges that overlap or leave the file.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from inspect_lens._base.installed import install_extra
from inspect_lens.errors import ArtifactError, LensError, SpecError

_RATIO: Final = 8
"""Of what an archive unpacks to, by its size: floats that were learnt hardly shrink."""
_FLOOR: Final = 64 << 20
"""Bytes that any archive may unpack to."""


def parse_json(text: str | bytes) -> Any:
    """Read JSON; what is nested deeper than Python can follow is a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def parse_yaml(text: str | bytes) -> Any:
    """Read YAML; whatever is wrong with it is a ValueError.

    It says what and where, and not the line itself, which may have a secret.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("YAML is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise ValueError(f"{problem or 'it is not YAML'}{where}") from None


@contextmanager
def parsing(
    file: object, what: str, advice: str, *, unread: str = "check the path",
    but: tuple[type[Exception], ...] = (ArtifactError,),
) -> Iterator[None]:  # fmt: skip
    """Read a file in this block: what cannot be read, or does not fit its format, is its fault."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read ({error}); {unread}") from None
    except _MISFITS as error:
        reason = " ".join(str(error).split())[:500]
        raise ArtifactError(
            f"{file}: not {what} ({type(error).__name__}: {reason}); {advice}"
        ) from None


_MISFITS: Final = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
    SafetensorError,
)  # fmt: skip


def metadata_of(content: bytes) -> Any:
    """The metadata of a safetensors file, which its library does not give."""
    return parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def at_start(problem: str, detail: str) -> SpecError:
    """An error of a server's settings; its detail, which names files, is not for clients.

    It is a note, which a traceback shows and `str` does not.
    """
    error = SpecError(f"{problem}; whoever started this finds more in its log")
    error.add_note(detail)
    return error


def refuse_irregular(path: str | Path) -> None:
    """Refuse what is no regular file; reading a pipe or a device may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        kind = "a folder" if os.path.isdir(path) else "no regular file"
        raise OSError(f"{path}: it is {kind}")


def why_unread(error: Exception, path: str | Path) -> str:
    """Why a file cannot be read, in a few words without its name."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    said = (str(error).strip().splitlines() or [""])[0].removeprefix(f"{path}: ")
    return said if type(error) is OSError else f"{type(error).__name__}: {said}".rstrip(": ")


def read_regular(path: str | Path, *, most: int | None = None) -> bytes:
    """Read a regular file whole; raises OSError, and ValueError where it is larger than allowed."""
    refuse_irregular(path)
    size = os.stat(path).st_size
    if most is not None and size > most:
        raise ValueError(f"it has {size} bytes, and should have {most} at most")
    return Path(path).read_bytes()


def judge_total(sizes: Iterable[int], available: int) -> None:
    """Refuse entries that together declare more bytes than there are: they overlap, or lie."""
    declared = 0
    for size in sizes:
        declared += size
        if size < 0 or declared > available:
            raise ValueError(f"its entries declare more than the {available} bytes that it has")


def judge_archive(content: bytes | IO[bytes], size: int) -> None:
    """Refuse a zip archive that unpacks to many times its size."""
    try:
        with zipfile.ZipFile(io.BytesIO(content) if isinstance(content, bytes) else content) as z:
            judge_total((entry.file_size for entry in z.infolist()), max(_RATIO * size, _FLOOR))
    except zipfile.BadZipFile as error:
        raise ValueError(f"a damaged archive ({error})") from None


def judge_parquet(metadata: Any, size: int) -> None:
    """Refuse a Parquet file that unpacks to many times its size."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    most = max(_RATIO * size, _FLOOR)
    judge_total((group.total_byte_size for group in groups), most)
    # Runs of a value are stored as one, and become an object each.
    judge_total([metadata.num_rows * metadata.num_columns], most // _RATIO)


def read_npz(path: Path) -> dict[str, NDArray[np.float32]]:
    """Arrays of numbers by name, as float32, judged by the shapes in their headers."""
    refuse_irregular(path)
    with path.open("rb") as file:
        judge_archive(file, path.stat().st_size)
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as member:
                form: Any = np.lib.format
                version = form.read_magic(member)
                read = getattr(form, f"read_array_header_{version[0]}_{version[1]}")
                shape, _, dtype = read(member)
            if dtype.hasobject or math.prod(shape) * dtype.itemsize > entry.file_size:
                raise ValueError(f"{entry.filename} is {shape} of {dtype} in {entry.file_size} B")
    with np.load(path, allow_pickle=False) as arrays:
        return {key: np.asarray(arrays[key], dtype=np.float32) for key in arrays}


def load_torch(content: bytes, where: str, *, plain: Iterable[str] = ()) -> Any:
    """What a `.pt` file holds: tensors and plain values, and never code.

    Classes named in `plain`, such as enumerations of text, are read as the text itself.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise LensError(
            f"{where}: a .pt file needs the package torch: {install_extra('train')}"
        ) from None
    try:
        if content.startswith(b"PK"):
            judge_archive(content, len(content))
        with torch.serialization.safe_globals([(str, name) for name in plain]):
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        # A view may repeat few numbers as many, and tensors may share them.
        judge_total((t.numel() * t.element_size() for t in _tensors(loaded)), len(content))
        return loaded
    except Exception as error:  # noqa: BLE001 (torch raises errors of many kinds)
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(
            f"{where}: holds more than tensors and plain values, or is damaged ({reason}); to run "
            "code from a file is not allowed; load it where you trust it, and save the tensors"
        ) from None


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "element_size"):
        if str(value.layout) != "torch.strided":
            raise ValueError(f"a tensor of layout {value.layout}; allowed are dense ones")
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)
