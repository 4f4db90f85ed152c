"""Where the files of a log go, and where they are looked for.

A reference in a log names a file below the folder of the log (`uri`) and that folder as it was
(`root`). Every surface resolves references with `find`, `is_there` and `place_of`, and these look
in the folders of logs that this process wrote or read, wherever they were moved to.
`may_follow` is the policy: a log may be a stranger's, so what it names elsewhere is left alone.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from inspect_ai.log import EvalLog, read_eval_log

from inspect_lens._base.arguments import one_or_several
from inspect_lens._base.untrusted import refuse_irregular, why_unread
from inspect_lens._intake import absolute, has_file, join, parent, read_file, stem
from inspect_lens._settings import Settings, text
from inspect_lens.errors import ArtifactError, LensError

from ._host import active_call

__all__ = ["know_log"]

_roots: OrderedDict[str, None] = OrderedDict()
"""Folders of logs that this process wrote or read, latest last."""
_followed: set[str] = set()
"""Places that somebody allowed."""


@contextmanager
def judging_log(log: str | Path) -> Iterator[None]:
    """While a log is read, whatever Inspect raises says which log, and what can be read."""
    try:
        if "://" not in str(log):  # a pipe would never be read to its end
            refuse_irregular(log)
        yield
    except LensError:
        raise
    except FileNotFoundError:
        raise ArtifactError(f"{log}: there is no such log; check the path") from None
    except Exception as error:  # noqa: BLE001 - its decompressors have errors of their own
        raise ArtifactError(
            f"{log}: cannot be read as a log ({why_unread(error, log)}); allowed are .eval and "
            ".json files of Inspect; check the path"
        ) from None


def read_log(log: EvalLog | str | Path) -> EvalLog:
    """A log, or that of an address."""
    if isinstance(log, EvalLog):
        return log
    with judging_log(log):
        return read_eval_log(str(log))


def no_samples(log: EvalLog, location: str) -> ArtifactError:
    """What is said of a log in which no sample is, with what its eval was asked for."""
    asked = log.eval.config.sample_id
    only = "" if asked is None else f" (sample_id={asked!r} was asked)"
    of = f" over a dataset of {log.eval.dataset.samples or 0} samples"
    why = f" ({log.error.message})" if log.error else ""
    if log.eval.config.log_samples is False:
        why += " and ran with --no-log-samples, so its log has nothing to score or show"
    return ArtifactError(
        f"{location}: has no sample. Its eval{of}{only} has the status {log.status!r}{why}; "
        "allowed is a log in which at least one sample has ended"
    )


class Place(NamedTuple):
    """Where the files of one call go."""

    root: str
    """Folder of the log, or the one that was configured."""
    folder: str
    """Folder of this log's files, below the root."""


def place_for(directory: str | None) -> Place | None:
    """Choose the place for a call that happens now."""
    call = active_call()
    configured = directory or text("dir")
    if call is None:
        if not configured:
            return None
        know_root(absolute(configured))
        return Place(absolute(configured), "calls.lens")
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


def know_log(location: str, *, follow: str | Sequence[str] = ()) -> None:
    """Tell where a log file is, so that activations next to it are found.

    A log that Inspect reads in this process, once `inspect_lens.model` is imported, is known
    already.

    Args:
        location: path or fsspec URL of the log.
        follow: folders and URLs below which files may be read, too, where the log names them, or
            `all`. Else only files in the folder of a log are read, and those in INSPECT_LENS_DIR
            and INSPECT_LENS_FOLLOW. It holds for this process.

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
    _followed.update(one_or_several(follow))


def may_follow(address: str) -> bool:
    """Whether what a log names may be read: next to a log, or where somebody allowed it."""
    places = [*_followed, *filter(None, text("follow").split(","))]
    return "all" in places or any(
        _lies_in(address, place) for place in (*_known_folders(), *places)
    )


def _lies_in(address: str, place: str) -> bool:
    folder = absolute(place).rstrip("/")
    whole = absolute(address)
    return ".." not in whole.split("/") and (whole == folder or whole.startswith(f"{folder}/"))


def place_of(uri: str, root: str | None) -> str:
    """The folder below which a file that was written earlier lies now."""
    found = (folder for folder, where in _addresses(uri, root) if has_file(where))
    return next(found, root or "")


def is_there(uri: str, root: str | None) -> bool:
    """Whether the file behind a reference can be found, without reading it."""
    return any(has_file(where) for _, where in _addresses(uri, root))


def find(uri: str, root: str | None, *, most: int | None = None) -> tuple[str, bytes]:
    """Read the file that a reference in a log names."""
    tried: list[str] = []
    for _, where in _addresses(uri, root):
        tried.append(where)
        data = read_file(where, most=most)
        if data is not None:
            return where, data
    named = join(root or "", uri)
    if not may_follow(named):
        raise ArtifactError(
            f"{named}: the log names this file, which does not lie next to it, and looked for were "
            f"{_list(tried)}; put the .lens folder beside the log or, if you trust the log, allow "
            f"the place: INSPECT_LENS_FOLLOW={parent(named)}, or --follow {parent(named)} of "
            "inspect-lens"
        )
    missing = f"{uri}: the file of these activations is missing"
    if absolute(uri) == uri:
        raise ArtifactError(
            f"{missing}. The answer came out of Inspect's cache, which has only the address of the "
            "file that the first eval wrote; put the .lens folder of that eval back, or run the "
            "eval with cache=False or behind `inspect cache clear`"
        )
    raise ArtifactError(
        f"{missing}; looked for {_list(tried)}. Keep the .lens folder beside its log, call "
        "read_activations(log) to say where the log is, or set INSPECT_LENS_DIR to the folder that "
        "holds the .lens folder. A log of eval_retry or eval_set needs the .lens folders of the "
        "logs before it, too"
    )


def judge_digest(where: str, digest: str, wanted: object) -> None:
    """Refuse a file that is not the one that was written."""
    if digest != wanted:
        raise ArtifactError(
            f"{where}: has sha256 {digest}…, the log refers to {wanted}…; restore the file that "
            "was written with this log"
        )


def _addresses(uri: str, root: str | None) -> Iterator[tuple[str, str]]:
    """Where a file may be, each folder with the file's address, as far as the policy allows."""
    seen = set()
    # A copy of a log has its files next to it: the log that was read last comes first.
    known = [*_known_folders()]
    for folder in (*known[:1], *([root] if root else []), *known[1:], *([] if root else [""])):
        where = join(folder, uri)
        if where not in seen and may_follow(where):
            seen.add(where)
            yield folder, where


def _known_folders() -> Iterator[str]:
    """Folders that not only a log itself names."""
    yield from reversed(_roots)
    if (call := active_call()) is not None:
        yield parent(absolute(call.log_location))
    if configured := text("dir"):
        yield absolute(configured)
    # `inspect score logs/x.eval` tells a scorer nothing of the path, but the command line has it.
    for argument in sys.argv[1:]:
        if argument.endswith((".eval", ".json")):
            yield parent(absolute(argument))


def _list(tried: Sequence[str]) -> str:
    more = len(tried) - 3
    shown = ", ".join(tried[:3]) or "no others"
    return f"{shown} and {more} more" if more > 0 else shown


Held = TypeVar("Held")
Handle = TypeVar("Handle")


class MemoryStore(Generic[Held]):
    """Payloads by key; the least recently used ones leave when bytes run out.

    The newest payload stays whatever its size, so that what a call just returned can be read.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._items: OrderedDict[str, Held] = OrderedDict()
        self._bytes = 0
        # Put from worker threads, read from the event loop.
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """Bytes that may be held."""
        if self._limit_bytes is None:
            self._limit_bytes = Settings.load().memory_bytes
        return self._limit_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._bytes

    def put(self, key: str, payload: Held) -> None:
        """Hold a payload."""
        with self._lock:
            old = self._items.pop(key, None)
            self._bytes += self._size(payload) - (0 if old is None else self._size(old))
            self._items[key] = payload
            while self._bytes > self.limit_bytes and len(self._items) > 1:
                _, gone = self._items.popitem(last=False)
                self._bytes -= self._size(gone)

    def get(self, key: str) -> Held | None:
        """The payload, if it is still here."""
        with self._lock:
            payload = self._items.get(key)
            if payload is not None:
                self._items.move_to_end(key)
            return payload

    def _size(self, item: Held) -> int:
        nbytes: int = cast("Any", item).nbytes
        return nbytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._items.clear()
            self._bytes = 0


class MessageIndex(MemoryStore[Handle]):
    """Handles by the id of the assistant message that they belong to."""

    def __init__(self, limit: int = 1 << 16) -> None:
        super().__init__(limit)

    def _size(self, item: Handle) -> int:
        return 1
