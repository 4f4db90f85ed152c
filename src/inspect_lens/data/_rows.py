"""Rows of files and of the hub, whatever shape the file has."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import fsspec

from inspect_lens._base.installed import install_extra
from inspect_lens._base.untrusted import judge_parquet, parse_json, read_regular, why_unread
from inspect_lens.errors import ArtifactError

__all__ = ["read_rows"]

Row = Mapping[str, Any]
_SUFFIXES: Final = (".csv", ".json", ".jsonl", ".parquet")
_LINES: Final = ".txt"
TEXT: Final = "text"
"""Column of a line, and of a text in a list of texts."""
FILE: Final = "_file"
"""Column with the name of the file, without its ending."""
LIST: Final = "_list"
"""Column with the name of the list, where a file is an object that has some."""
_CELLS: Final = 8 << 20
"""Cells that any file may have; a larger one has a cell for each byte at most."""


def read_rows(path: str) -> Iterator[Row]:
    """Read the rows of a file, or of all files of a folder in the order of their names.

    Read are csv, parquet, json lines, lines of text (`.txt`), and json in one of these shapes: a
    list of objects or of texts, an object with one list or several, and an object whose keys are
    the ids of its objects. A folder is read for its `.txt` files only where it has no others.

    Args:
        path: file, folder, pattern or fsspec URL.

    Yields:
        Each row as a mapping. A line, or a text of a list, stands under `text`. `_file` is the name
        of the file without its ending, `_list` that of the list of an object that has some, and
        `id` the key of an object.

    Raises:
        ArtifactError: there is no such file, or it has none of these shapes.

    Example:
        ```python
        from pathlib import Path

        from inspect_lens.data import read_rows

        Path("hints.json").write_text('["Give me a hint.", "Is it large?"]')
        assert [row["text"] for row in read_rows("hints.json")][1] == "Is it large?"
        ```
    """
    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
        if filesystem.isdir(inner):
            there = filesystem.find(inner)
            names = [n for n in there if _ending(n) in _SUFFIXES]
            names = names or [n for n in there if _ending(n) == _LINES]
        else:
            names = filesystem.glob(inner) if "*" in inner else [inner]
        if not names:
            raise OSError(f"no {', '.join((*_SUFFIXES, _LINES))} there")
        # Judged before a file is read, as a wrong one may be the weights of a model.
        for ending in map(_ending, names):
            if ending not in (*_SUFFIXES, _LINES):
                raise ValueError(f"no such ending: {ending or 'none'}")
        read = read_regular if "file" in filesystem.protocol else filesystem.cat_file
        for name in sorted(names):
            stem = name.rpartition("/")[2].rpartition(".")[0]
            for row in _rows(name, read(name)):
                yield {FILE: stem, **row}
    except (OSError, ValueError, ImportError, KeyError, TypeError, csv.Error) as error:
        raise ArtifactError(
            f"{path}: cannot be read as rows ({why_unread(error, path)}); allowed are files "
            f"{', '.join((*_SUFFIXES, _LINES))}, or a folder of them; check the path"
        ) from None


def _ending(name: str) -> str:
    """With its dot and in small letters; what a URL asks for behind its path is no part of it."""
    return PurePosixPath(name.partition("?")[0]).suffix.lower()


def _rows(name: str, data: bytes) -> Iterable[Row]:
    ending = _ending(name)
    if ending == ".parquet":
        file: Any = importlib.import_module("pyarrow.parquet").ParquetFile(io.BytesIO(data))
        judge_parquet(file.metadata, len(data))
        rows: list[Row] = file.read().to_pylist()
        return rows
    text = data.decode("utf-8-sig")
    if ending == ".csv":
        # Python's limit of 128 KiB a field is one of the process, so it is put back.
        limit = csv.field_size_limit(max(len(text), 1))
        try:
            reader = csv.DictReader(io.StringIO(text, newline=""))
            return _bounded(map(_row, reader), len(data))
        finally:
            csv.field_size_limit(limit)
    # `splitlines` would also split at U+2028, which may stand in a JSON string as it is.
    lines = (line for line in text.split("\n") if line.strip())
    if ending == _LINES:
        return [{TEXT: line.strip()} for line in lines]
    if ending == ".jsonl":
        return [_row(parse_json(line)) for line in lines]
    return _bounded(_of_json(parse_json(text)), len(data))


def _bounded(rows: Iterable[Row], size: int) -> list[Row]:
    """The rows; short ones are filled up, so a small file could have cells without end."""
    found: list[Row] = []
    most, cells = max(size, _CELLS), 0
    for row in rows:
        cells += len(row)
        if cells > most:
            raise ValueError(f"its rows have more than {most} cells, in {size} bytes")
        found.append(row)
    return found


def _of_json(content: Any) -> Iterable[Row]:
    """Rows of a json file: a list, or an object with lists, or one whose keys are ids."""
    if isinstance(content, list):
        return [_row(item) for item in content]
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}; wanted is a list or an object of rows")
    lists = {key: value for key, value in content.items() if isinstance(value, list)}
    if not lists:
        if not content or not all(isinstance(value, dict) for value in content.values()):
            raise ValueError(
                "an object without a list, whose values are no objects; wanted is a list of rows, "
                "an object that has one, or rows by their ids"
            )
        return [{"id": key, **row} for key, row in content.items()]
    shared = {k: v for k, v in content.items() if not isinstance(v, list | dict)}
    return ({**shared, LIST: name, **_row(item)} for name, items in lists.items() for item in items)


def _row(item: Any) -> Row:
    if isinstance(item, dict):
        if None in item:
            raise ValueError(f"a row with more cells than columns: {str(item[None])[:80]}")
        return item
    if isinstance(item, str):
        return {TEXT: item}
    raise ValueError(f"a row that is a {type(item).__name__}; wanted are objects, or texts")


_DOWNLOAD: Final = (
    "download the files and name them (`path` in Python, --path in the shell, -T data=… of an eval)"
)


def read_hub(
    repository: str, *, config: str | None, split: str, revision: str | None
) -> Iterator[Row]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ArtifactError(
            f"{repository}: needs the package datasets: {install_extra('train')}; or {_DOWNLOAD}"
        ) from None
    try:
        loaded = datasets.load_dataset(repository, config, split=split, revision=revision)
    except Exception as error:  # noqa: BLE001 (the hub raises errors of many packages)
        raise ArtifactError(
            f"{repository} (split {split!r}, revision {revision!r}): could not be loaded "
            f"({type(error).__name__}: {error}); check access and names, or {_DOWNLOAD}"
        ) from None
    yield from loaded
