"""Where sidecar files go, and where they are looked for."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from inspect_lens._intake import absolute, has_file, join, parent, read_file, stem
from inspect_lens._settings import text
from inspect_lens.errors import ArtifactError
from inspect_lens.model._host import active_call

__all__ = ["Place", "find", "is_there", "know_root", "place_for", "place_of"]

_roots: OrderedDict[str, None] = OrderedDict()
"""Folders of logs that this process wrote or read, latest last."""


class Place(NamedTuple):
    """Where the files of one call go."""

    root: str
    """Folder of the log, or the one that was configured."""
    folder: str
    """Folder of this log's files, below the root."""


def place_for(directory: str | None) -> Place | None:
    """Choose the place for a call that happens now.

    Args:
        directory: `-M activations_dir`; None means INSPECT_LENS_DIR, else beside the log.

    Returns:
        The place, or None outside an eval when no folder is configured.
    """
    call = active_call()
    configured = directory or text("dir")
    if call is None:
        return Place(absolute(configured), "calls.lens") if configured else None
    location = absolute(call.log_location)
    root = absolute(configured) if configured else parent(location)
    know_root(root)
    return Place(root, f"{stem(location)}.lens")


def know_root(root: str) -> None:
    """Remember a folder in which references may resolve."""
    _roots[root] = None
    _roots.move_to_end(root)
    while len(_roots) > 256:
        _roots.popitem(last=False)


def place_of(uri: str, root: str | None) -> str:
    """The folder below which a file that was written earlier lies now.

    Args:
        uri: as logged, relative.
        root: folder of the log when it was written.

    Returns:
        The first known folder in which the file is; where it is in none, the one it was in.
    """
    for candidate in _candidates(root):
        if has_file(join(candidate, uri)):
            return candidate
    return root or ""


def is_there(uri: str, root: str | None) -> bool:
    """Whether the file behind a reference can be found, without reading it.

    Args:
        uri: as for `find`.
        root: as for `find`.
    """
    return any(has_file(join(candidate, uri)) for candidate in _candidates(root))


def find(uri: str, root: str | None) -> tuple[str, bytes]:
    """Read the file that a reference in a log names.

    Args:
        uri: as logged; relative to the folder of the log, or absolute.
        root: that folder, as far as known.

    Returns:
        Address and content of the first file that is there.

    Raises:
        ArtifactError: there is none; the message says where it was looked for.
    """
    tried: list[str] = []
    for candidate in _candidates(root):
        where = join(candidate, uri)
        if where not in tried:
            tried.append(where)
            data = read_file(where)
            if data is not None:
                return where, data
    missing = f"{uri}: the file of these activations is missing"
    if absolute(uri) == uri:
        raise ArtifactError(
            f"{missing}. The answer came out of Inspect's cache, which has only the address of the "
            "file that the first eval wrote; put the .lens folder of that eval back, or run the "
            "eval with cache=False or behind `inspect cache clear`"
        )
    raise ArtifactError(
        f"{missing}; looked for {', '.join(tried)}. Keep the .lens folder beside its log, call "
        "read_activations(log) to say where the log is, or set INSPECT_LENS_DIR to the folder that "
        "holds the .lens folder. A log of eval_retry or eval_set needs the .lens folders of the "
        "logs before it, too"
    )


def _candidates(root: str | None) -> Iterator[str]:
    if root:
        yield root
    yield from reversed(_roots)
    configured = text("dir")
    if configured:
        yield absolute(configured)
    # `inspect score logs/x.eval` tells a scorer nothing of the path, but the command line has it.
    for argument in sys.argv[1:]:
        if argument.endswith((".eval", ".json")):
            yield parent(absolute(argument))
    if not root:
        yield ""
