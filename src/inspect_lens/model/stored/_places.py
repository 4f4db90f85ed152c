"""Where the files of a log go, and where they are looked for.

A reference in a log names a file below the folder of the log (`uri`) and that folder as it was
(`root`). Every surface resolves references with `find`, `is_there` and `place_of`, and these look
in the folders of logs that this process wrote or read, wherever they were moved to.
`may_follow` is the policy: it is asked before a file is looked for.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from inspect_lens._intake import absolute, has_file, join, parent, read_file, stem
from inspect_lens._settings import text
from inspect_lens.errors import ArtifactError
from inspect_lens.model._host import active_call, when_log_is_read

__all__ = [
    "Place",
    "find",
    "is_there",
    "know_log",
    "know_root",
    "may_follow",
    "place_for",
    "place_of",
]

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


def know_log(location: str) -> None:
    """Tell where a log file is, so that activations next to it are found.

    A log that Inspect reads in this process, once `inspect_lens` is imported, is known already.

    Args:
        location: path or fsspec URL of the log.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.model import activations, know_log

        know_log("logs/honesty.eval")
        output = read_eval_log("logs/honesty.eval").samples[0].output
        assert activations(output).numpy().shape[0] == 3
        ```
    """
    know_root(parent(absolute(location)))


when_log_is_read(know_log)


def may_follow(address: str, *, known: bool) -> bool:
    """Whether a file that a log refers to may be looked for at an address.

    Args:
        address: absolute path, or URL.
        known: whether it lies in the folder of a log that this process wrote or read, or in the
            one that was configured; False where only the log itself names it.
    """
    return True


def place_of(uri: str, root: str | None) -> str:
    """The folder below which a file that was written earlier lies now.

    Args:
        uri: as logged, relative.
        root: folder of the log when it was written.

    Returns:
        The first known folder in which the file is; where it is in none, the one it was in.
    """
    found = (folder for folder, where in _addresses(uri, root) if has_file(where))
    return next(found, root or "")


def is_there(uri: str, root: str | None) -> bool:
    """Whether the file behind a reference can be found, without reading it.

    Args:
        uri: as for `find`.
        root: as for `find`.
    """
    return any(has_file(where) for _, where in _addresses(uri, root))


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
    for _, where in _addresses(uri, root):
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


def _addresses(uri: str, root: str | None) -> Iterator[tuple[str, str]]:
    """Where a file may be, each folder with the file's address, as far as the policy allows."""
    is_absolute = absolute(uri) == uri
    seen = set()
    for folder, known in _folders(root):
        where = join(folder, uri)
        if where not in seen and may_follow(where, known=known and not is_absolute):
            seen.add(where)
            yield folder, where


def _folders(root: str | None) -> Iterator[tuple[str, bool]]:
    """Folders in which to look, and whether anything but the log itself names them."""
    if root:
        yield root, root in _roots
    for folder in reversed(_roots):
        yield folder, True
    if configured := text("dir"):
        yield absolute(configured), True
    # `inspect score logs/x.eval` tells a scorer nothing of the path, but the command line has it.
    for argument in sys.argv[1:]:
        if argument.endswith((".eval", ".json")):
            yield parent(absolute(argument)), True
    if not root:
        yield "", False
