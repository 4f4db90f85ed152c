"""Rows from files and from the hub."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import fsspec

from inspect_lens._untrusted import parse_json, read_regular
from inspect_lens.errors import ArtifactError

__all__ = ["read_hub", "read_path"]

_SUFFIXES: Final = (".csv", ".json", ".jsonl", ".parquet")
Row = Mapping[str, Any]


def read_path(path: str) -> Iterator[Row]:
    """Rows of a file, or of all files of a folder in the order of their names.

    Args:
        path: local path, glob pattern or fsspec URL; csv, json (a list, or an object with one
            list of rows), json lines or parquet.

    Yields:
        Rows; each has the stem of its file under `_file`.

    Raises:
        ArtifactError: there is no such file, or it does not parse.
    """
    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
        if filesystem.isdir(inner):
            names = [n for n in filesystem.find(inner) if n.endswith(_SUFFIXES)]
        else:
            names = filesystem.glob(inner) if "*" in inner else [inner]
        if not names:
            raise FileNotFoundError(f"no {', '.join(_SUFFIXES)} there")
        read = read_regular if "file" in filesystem.protocol else filesystem.cat_file
        for name in sorted(names):
            stem = name.rpartition("/")[2].rpartition(".")[0]
            for row in _rows(name, read(name)):
                yield {"_file": stem, **row}
    except (OSError, ValueError, ImportError, KeyError, TypeError, csv.Error) as error:
        raise ArtifactError(
            f"{path}: cannot be read as rows ({type(error).__name__}: {error}); allowed are files "
            f"{', '.join(_SUFFIXES)}, or a folder of them; check the path"
        ) from None


def _rows(name: str, data: bytes) -> Iterable[Row]:
    if name.endswith(".parquet"):
        table: Any = importlib.import_module("pyarrow.parquet").read_table(io.BytesIO(data))
        rows: list[Row] = table.to_pylist()
        return rows
    text = data.decode("utf-8-sig")
    if name.endswith(".csv"):
        # Python's limit of 128 KiB a field is one of the process, so it is put back.
        limit = csv.field_size_limit(max(len(text), 1))
        try:
            return list(csv.DictReader(io.StringIO(text, newline="")))
        finally:
            csv.field_size_limit(limit)
    if name.endswith(".jsonl"):
        # `splitlines` would also split at U+2028, which may stand in a JSON string as it is.
        return [parse_json(line) for line in text.split("\n") if line.strip()]
    content = parse_json(text)
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        shared = {k: v for k, v in content.items() if not isinstance(v, list | dict)}
        if len(lists) != 1:
            raise ValueError(f"an object with {len(lists)} lists; wanted is one list of rows")
        return [{**shared, **row} for row in lists[0]]
    if not isinstance(content, list):
        raise ValueError(f"a {type(content).__name__}; wanted is a list of rows")
    return content


def read_hub(
    repository: str, *, config: str | None, split: str, revision: str | None
) -> Iterator[Row]:
    """Rows of a data set of the hub.

    Args:
        repository: `owner/name`.
        config: of the set.
        split: of the set.
        revision: commit, tag or branch.

    Yields:
        Rows.

    Raises:
        ArtifactError: the package `datasets` is missing, or the set cannot be had.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ArtifactError(
            f"{repository}: needs the package datasets; install inspect-lens[train], or download "
            "the files and name them: path=, `--path` of probe collect, or `-T data=` of an eval"
        ) from None
    try:
        loaded = datasets.load_dataset(repository, config, split=split, revision=revision)
    except Exception as error:  # noqa: BLE001 (the hub raises errors of many packages)
        raise ArtifactError(
            f"{repository} (split {split!r}, revision {revision!r}): could not be loaded "
            f"({type(error).__name__}: {error}); check access and names, or download the files and "
            "name them: path=, `--path` of probe collect, or `-T data=` of an eval"
        ) from None
    yield from loaded
