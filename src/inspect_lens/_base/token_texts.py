"""Texts of tokens, from the checkpoint's tokenizer where there is one."""

from __future__ import annotations

import importlib
import importlib.util
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from inspect_lens._base.shipped import model_path
from inspect_lens.errors import ArtifactError

_BROKEN = "\ufffd"


class _Tokenizer(NamedTuple):
    """What is needed of a tokenizer, of whichever package."""

    decode: Callable[[Sequence[int]], str]
    piece: Callable[[int], str]
    """As it stands in the vocabulary."""
    marks: frozenset[int]
    """Special and added tokens; some templates mark roles with tokens not declared special."""


class TokenTexts:
    """Turns token ids into the texts that a page shows.

    Args:
        tokenizer: of a checkpoint, or None.
        note: why there is none, for the page.

    Example:
        ```python
        from inspect_lens.view import TokenTexts

        texts = TokenTexts.of("vllm-lens/organism/checkpoint")
        assert not texts.note, "without a tokenizer on this machine it says so"
        ```
    """

    def __init__(self, tokenizer: _Tokenizer | None = None, note: str = "") -> None:
        self._tokenizer = tokenizer
        self.note = note
        self._known: dict[int, str] = {}
        self._special = tokenizer.marks if tokenizer else frozenset()

    @classmethod
    def of(cls, model: str, *, tokenizer: str | None = None) -> TokenTexts:
        """Find the tokenizer of a model on this machine; nothing is downloaded.

        Args:
            model: as Inspect names it, such as `vllm-lens/organism/checkpoint:adapter`.
            tokenizer: folder or name to take instead.

        Returns:
            The texts; without a tokenizer they are ids, and `note` says so.

        Raises:
            ArtifactError: a tokenizer was named and cannot be loaded.
        """
        name = tokenizer or model.partition("/")[2].partition(":")[0]
        try:
            loaded = _load(name)
        except (ImportError, OSError, ValueError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            if tokenizer and Path(tokenizer).is_absolute() and not Path(tokenizer).exists():
                reason = "there is no such folder"
            if tokenizer:
                raise ArtifactError(
                    f"tokenizer={tokenizer!r}: cannot be loaded ({reason}); allowed are the "
                    "folder of a checkpoint, or a name that the hub's cache on this machine has"
                ) from None
            return cls(
                note=f"No tokenizer was found for {name!r} on this machine, so tokens are shown "
                "as their ids, or as the pieces that the log has; --tokenizer names one."
            )
        return cls(loaded)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenTexts:
        """Texts of a tokenizer that is loaded, of transformers or like one; None knows only ids."""
        return cls(None if tokenizer is None else _of_transformers(tokenizer))

    @property
    def is_known(self) -> bool:
        return self._tokenizer is not None

    def special(self, ids: Iterable[int]) -> list[bool]:
        """Which ids are marks of the template rather than text."""
        return [token in self._special for token in ids]

    def texts(self, ids: Sequence[int], logged: Sequence[str] | None = None) -> list[str]:
        """Text of each token.

        Args:
            ids: of the tokens.
            logged: pieces that the log has for them, used without a tokenizer.

        Returns:
            As many texts; joined they are the text. Tokens that are only together a character
            share it: the first has it and the others are empty.
        """
        if self._tokenizer is None:
            if logged is not None and len(logged) == len(ids):
                return list(logged)
            return [f"⟨{token}⟩" for token in ids]
        made = [self._one(token) for token in ids]
        start = 0
        while start < len(made):
            if _BROKEN not in made[start]:
                start += 1
                continue
            stop = start + 1
            while stop < len(made) and _BROKEN in made[stop]:
                stop += 1
            whole = self._tokenizer.decode(list(ids[start:stop]))
            if _BROKEN not in whole:
                made[start:stop] = [whole, *[""] * (stop - start - 1)]
            start = stop
        return made

    def _one(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            assert self._tokenizer is not None
            text = self._tokenizer.decode([token])
            # SentencePiece drops the space that a piece begins with when it stands alone.
            if self._tokenizer.piece(token).startswith("▁") and not text.startswith(" "):
                text = f" {text}"
            self._known[token] = text
        return text


def tokens_at(pieces: Sequence[str], start: int, stop: int) -> tuple[int, int]:
    """(first, behind the last) token that holds a part of the characters from start to stop."""
    ends = list(accumulate(map(len, pieces)))
    return bisect_right(ends, start), bisect_left(ends, stop) + 1


@lru_cache(maxsize=8)
def _from_file(path: str, _changed: int) -> _Tokenizer:
    """The same tokens without transformers, whose import takes seconds; so does a large file."""
    fast: Any = importlib.import_module("tokenizers")
    try:
        loaded = fast.Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - tokenizers has no error of its own
        raise ValueError(str(error)) from None
    return _Tokenizer(
        decode=lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False)),
        piece=lambda token: loaded.id_to_token(token) or "",
        marks=frozenset(loaded.get_added_tokens_decoder()),
    )


def _load(name: str) -> _Tokenizer:
    name = model_path(name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _cached(name)
    if (folder / "tokenizer.json").is_file() and importlib.util.find_spec("tokenizers"):
        file = folder / "tokenizer.json"
        return _from_file(str(file.resolve()), file.stat().st_mtime_ns)
    transformers: Any = importlib.import_module("transformers")
    return _of_transformers(
        transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    )


def _of_transformers(auto: Any) -> _Tokenizer:
    return _Tokenizer(
        decode=lambda ids: str(auto.decode(list(ids))),
        piece=lambda token: str(auto.convert_ids_to_tokens(token) or ""),
        marks=frozenset({*auto.all_special_ids, *auto.get_added_vocab().values()}),
    )


def _cached(name: str) -> Path:
    """The folder in the hub's cache on this machine that has the tokenizer of `owner/name`."""
    if name.count("/") != 1:
        raise OSError(f"{name} is no folder here, and no owner/name of the hub")
    hub: Any = importlib.import_module("huggingface_hub")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        found = hub.try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found).parent
    raise OSError(f"the hub's cache on this machine has no tokenizer of {name}")
