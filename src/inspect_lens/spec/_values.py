"""Values of a request as they are written: numbers, names, keys, and how many there may be.

Pydantic takes `true` for 1 and `"2"` for 2. A request that is read so does something else than
it says, without a word.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import operator
import re
import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Final, Self, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictBool,
    StrictFloat,
    ValidationError,
)

from inspect_lens.errors import LensError, SpecError, did_you_mean

__all__ = [
    "CAPTURE_KEY",
    "ENVELOPE_KEY",
    "LENS_KEYS",
    "NATIVE_KEY",
    "OWN_WORDS",
    "PLACES",
    "STEER_KEY",
    "Value",
    "check_counts",
    "check_name",
    "check_size",
    "check_word",
    "explain",
    "judging",
    "plain_number",
    "read_as",
    "refuse_misspelled",
    "refuse_own_words",
    "several",
    "shown",
]

logger = logging.getLogger("vllm.inspect_lens")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 40
_short.maxlevel = 3


def shown(value: object) -> str:
    """A value for an error message; short, however large it is."""
    try:
        # Of a model of Inspect that would be an address in memory.
        return _short.repr(str(value) if type(value).__repr__ is object.__repr__ else value)
    except ValueError:  # an integer that Python does not write out
        return f"a number of more than {_short.maxlong} digits"


def check_word(name: str, value: object, allowed: Any, advice: str = "") -> None:
    """Refuse a word that is none of a `Literal` or of some names; one like it is named."""
    words = get_args(allowed) or tuple(allowed)
    if isinstance(value, str) and value in words:
        return
    short = isinstance(value, str) and len(value) <= _LONGEST
    if short and (near := _nearest(str(value), words, 0.6)):
        advice = f"did you mean {near[0]!r}?"
    end = f"; {advice}" if advice else ""
    raise SpecError(f"{name}={shown(value)}; allowed are {', '.join(words)}{end}")


def plain_number(value: Any) -> Any:
    """A number or flag of numpy or of torch as Python has it; what is none stays as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def integer(value: object) -> int:
    """An integer, also one of numpy; a boolean, a float and text are none."""
    if isinstance(value, bool | str | float) or type(value).__name__ in ("bool", "bool_"):
        raise ValueError(f"{shown(value)} is not an integer")
    try:
        return operator.index(cast("Any", value))
    except TypeError:
        raise ValueError(f"{shown(value)} is not an integer") from None


def integers(value: object) -> object:
    """One integer, or a list of them, as a tuple; what is neither stays as it is."""
    if isinstance(value, str | bool | dict | None):
        return value
    if not isinstance(value, Iterable):
        return (integer(value),)
    return tuple(integer(item) for item in cast("Iterable[object]", value))


def layer_numbers(value: object) -> object:
    """Layers, ascending and each once; what is no list of integers stays as it is."""
    layers = integers(value)
    if not isinstance(layers, tuple):
        return value
    if not layers:
        raise ValueError("is empty; name at least one layer")
    if (lowest := min(layers)) < 0:
        raise ValueError(f"{shown(lowest)} is no layer; they count from 0")
    return tuple(sorted(set(layers)))


def several(value: object) -> list[Any]:
    """A list of what may also be given alone; a text or a mapping is one, and no list of parts.

    Args:
        value: one thing, or several.

    Example:
        ```python
        from inspect_lens.spec import several

        assert several("all") == ["all"]
        assert several((2, 4)) == [2, 4]
        ```
    """
    alone = isinstance(value, str | bytes | Mapping | BaseModel) or not isinstance(value, Iterable)
    return [value] if alone else list(cast("Iterable[Any]", value))


def listed(value: object) -> object:
    """Texts or objects as `several` has them; what is neither, nor a list, is left to the field."""
    return several(value) if isinstance(value, Iterable | BaseModel) else value


class Value(BaseModel):
    """A value that never changes; fields that it does not have are refused.

    What is wrong is a `SpecError`, where Python makes one as where a request is read.
    """

    # Only at a prompt: reading the sources would slow down each import.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=hasattr(sys, "ps1")
    )

    def __init__(self, /, *unnamed: object, **fields: Any) -> None:
        if unnamed:
            name, first = type(self).__name__, next(iter(type(self).model_fields), "field")
            raise SpecError(f"{name}: fields have names; write {name}({first}=…)")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            cls = type(self)
            raise SpecError(explain(error, root=cls.__name__, kind=cls)) from None

    def __deepcopy__(self, memo: object = None) -> Self:
        """Share what is in it, as Inspect copies the config of each call several times."""
        # An object of its own: older pydantic writes `model_copy(update=…)` into it.
        return self.__copy__()

    # Pydantic's mark: what is inside another value, or read, is validated without this one.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    # So that `help()` shows fields alone.
    __init__.__signature__ = inspect.signature(BaseModel.__init__)  # type: ignore[attr-defined]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Have `help()` show what each field is, as the pages of the reference do."""
        texts = {name: field.description for name, field in cls.model_fields.items()}
        if hasattr(sys, "ps1") and cls.__doc__ and any(texts.values()):
            lines = [
                f"    {name}: {' '.join(text.split())}" for name, text in texts.items() if text
            ]
            summary, example, rest = inspect.cleandoc(cls.__doc__).partition("\n\nExample:")
            cls.__doc__ = "\n".join([summary, "", "Attributes:", *lines]) + example + rest


Integer = Annotated[int, BeforeValidator(integer)]
"""An integer that was written as one."""

Number = StrictFloat
"""A number that was written as one; booleans and text are refused."""

Flag = Annotated[StrictBool, BeforeValidator(plain_number)]
"""`true` or `false`."""

Read = TypeVar("Read", bound=BaseModel)

_TEXT, _LIST, _OBJECT = "allowed is a text", "allowed is a list", "allowed is an object"
_NUMBER, _WHOLE = "allowed is a number", "allowed is an integer"
_FLAG = "allowed are true and false"
_ALLOWED: Final = {
    "literal_error": "allowed are {expected}",
    "string_type": _TEXT,
    "string_too_short": "allowed are texts of at least {min_length} characters",
    "string_too_long": "allowed are texts of at most {max_length} characters",
    "string_pattern_mismatch": "allowed are texts that match {pattern}",
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE,
    "float_type": _NUMBER, "float_parsing": _NUMBER, "finite_number": "allowed are finite numbers",
    "bool_type": _FLAG, "bool_parsing": _FLAG,
    "list_type": _LIST, "tuple_type": _LIST,
    "dict_type": _OBJECT, "mapping_type": _OBJECT, "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "too_short": "allowed are at least {min_length} entries",
    "too_long": "allowed are at most {max_length} entries",
    "greater_than": "allowed are numbers above {gt}",
    "greater_than_equal": "allowed are numbers of {ge} or more",
    "less_than": "allowed are numbers below {lt}",
    "less_than_equal": "allowed are numbers up to {le}",
}  # fmt: skip
"""By pydantic's name of a fault, what it says in its own words."""

_MEMBER = re.compile(
    r"(str|int|float|bool|dict|list|tuple|literal|nullable|constrained-\w+|function-[\w-]+)"
    r"(\[.*\])?"
)
"""What pydantic calls one of several types of a field, in the place of a finding."""


def explain(
    error: ValidationError, *, at: str = "", root: str = "",
    kind: type[BaseModel] | None = None, labels: Mapping[str, str] = MappingProxyType({}),
) -> str:  # fmt: skip
    """What pydantic found wrong, in a few lines that name each field.

    Values are shown, but not those inside a class with `hide_input_in_errors`: one may be a secret.

    Args:
        error: the finding.
        at: field that holds what was judged.
        root: what a finding about all of it is said of, where nothing holds it; nothing by default.
        kind: what was to be read, so that the nearest of its fields can be named.
        labels: what a user knows them by.
    """
    start = [at] if at else []
    lines: list[str] = []
    chosen: dict[str, str] = {}
    for item in error.errors(include_url=False)[:_MOST_LINES]:
        parts = [str(part)[:80] for part in item["loc"]]
        # The name of a field that is too much is somebody's own, whatever it is.
        own = parts[-1:] if item["type"] == "extra_forbidden" else []
        loc = [p for p in parts[: len(parts) - len(own)] if not _MEMBER.fullmatch(p)] + own
        names = [f"[{part}]" if part.isdigit() else f".{labels.get(part, part)}" for part in loc]
        field = "".join([*start, *names]).removeprefix(".") or root
        fault, said = item["type"], item["msg"].removeprefix("Value error, ")[:1000]
        if fault in _ALLOWED:
            allowed = _ALLOWED[fault].format(**item.get("ctx", {}))
            along = chain.from_iterable(_models_along(kind, loc))
            is_secret = any(one.model_config.get("hide_input_in_errors") for one in along)
            value = f"{field}: " if is_secret else f"{field}={shown(item['input'])}; "
            value = value if field else f"{shown(item['input'])}; "
            if value in chosen:  # what else may stand there
                also = allowed.removeprefix("allowed is ").removeprefix("allowed are ")
                if also not in chosen[value]:
                    chosen[value] += f", or {also}"
            else:
                chosen[value] = allowed
            continue
        if fault == "missing":
            said = "is needed"
        elif fault == "extra_forbidden":
            known = _known(kind, loc[:-1])
            said = f"no such field; {did_you_mean(loc[-1], known) if known else 'leave it out'}"
        is_named = said.startswith(field) and said[len(field) :][:1] in ("=", ".", "[", ":")
        lines.append(said if is_named or not field else f"{field}: {said}")
    lines = [value + allowed for value, allowed in chosen.items()] + lines
    more = error.error_count() - _MOST_LINES
    lines += [f"and {more} more"] if more > 0 else []
    # Text of the request may hold what no response can: half of a surrogate pair.
    return "; ".join(lines).encode("utf-8", "backslashreplace").decode("utf-8")


def _known(kind: Any, path: Sequence[str]) -> set[str]:
    """Names of the fields that are read where a path leads."""
    *_, models = _models_along(kind, path)
    return {name for model in models for name in model.model_fields}


def _models_along(kind: Any, path: Sequence[str]) -> Iterator[list[type[BaseModel]]]:
    """Classes that may be read at the start of a path, and behind each of its fields."""
    models = _models(kind)
    yield models
    for part in path:
        if not part.isdigit():
            at = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [model for field in at for model in _models(field.annotation)]
            yield models


def _models(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in _models(part)]


def read_as(
    kind: type[Read], value: object, *, at: str = "", context: Mapping[str, Any] | None = None
) -> Read:
    """Read a value as a model says; what does not fit is a `SpecError`."""
    try:
        return kind.model_validate(value, context=context)
    except ValidationError as error:
        raise SpecError(explain(error, at=at, kind=kind)) from None


class judging:
    """While a request is judged, whatever is raised is an error of the request."""

    # No generator, which takes five times as long: each request enters several.
    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValidationError):
            raise SpecError(explain(error, at=self._field)) from None
        if isinstance(error, Exception) and not isinstance(error, LensError):
            # It may be a fault of ours, whose place is to be found.
            logger.warning("inspect_lens: %s cannot be read", self._field, exc_info=True)
            raise SpecError(
                f"{self._field}: cannot be read ({type(error).__name__}: {shown(str(error))})"
            ) from None


_MOST_LINES = 8

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: object, *, field: str = "name") -> str:
    """Judge a name under which a probe or a vector is, or is to be, registered."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise SpecError(
        f"{field}={shown(name)}; allowed are 1 to 128 letters (a-z, A-Z), digits, '.', '_' and "
        "'-', with a letter or a digit first; choose another name"
    )


Name = Annotated[str, BeforeValidator(check_name)]
"""A name under which something is registered."""

MOST_GATES: Final = 8
"""Gates that one rule may join."""

MOST_OF: Final[dict[str, int]] = {
    "apply_steering_vectors": 256, "edits": 256, "edits_named": 256, "hooks": 256,
    "apply_hooks": 256, "probes": 1024, "layers": 1024, "layer_indices": 1024, "heads": 1024,
    "experts": 1024, "neurons": 1 << 16, "site": 64, "sites": 64, "positions": 1 << 19,
    "threshold_positions": 1 << 19, "position_indices": 1 << 19, "token_ids": 4096, "tokens": 1024,
    "prefetch_params": 4096, "params": 4096, "configs": 16,
    "open_gates": 256 * MOST_GATES, "all": MOST_GATES, "any": MOST_GATES, "none": MOST_GATES,
    "points": 1024, "latents": 4096,
    # Prompts of a sweep, in token ids or messages.
    "clean": 1 << 19, "corrupted": 1 << 19,
    "tensors": 16, "columns": 256, "shape": 8,
}  # fmt: skip
"""Entries of a list or mapping, by the name of its field; `_MOST_OTHERS` of any other."""

TENSORS: Final = {
    "activations", "direction", "weight", "bias", "w1", "b1", "w2", "b2", "query", "matrix",
}  # fmt: skip
"""Fields that may be lists of numbers: an engine knows how many it has a use for. Edits add theirs.
"""

MOST_ENTRIES: Final = 1 << 19
"""Of all lists and mappings of a body together, tensors as lists included: more take Python half a
second to parse, in which nobody else is served."""
_MOST_OTHERS: Final = 1024
_MOST_DEPTH: Final = 32


def check_size(body: bytes) -> None:
    """Refuse JSON that would hold the interpreter while it is parsed."""
    # Commas of texts count too; a prompt that has a million is none.
    if len(body) > MOST_ENTRIES and (n := body.count(b",")) > MOST_ENTRIES:
        raise SpecError(
            f"the body has {n} entries, and {MOST_ENTRIES} is the most; send tensors in their JSON "
            "form (encode_tensor), not as lists of numbers, and prompts in several requests"
        )


MOST_PATTERNS: Final = 16
"""Different regular expressions in a request."""
MOST_CHARACTERS: Final = 2000
"""Of all of them."""


def judge_patterns(distinct: Set[str]) -> None:
    """Refuse more regular expressions than a request may have: compiling one takes milliseconds."""
    n = sum(map(len, distinct))
    if len(distinct) > MOST_PATTERNS or (n > MOST_CHARACTERS and len(distinct) > 1):
        raise SpecError(
            f"positions.pattern: {len(distinct)} different patterns of {n} characters together; a "
            f"request has at most {MOST_PATTERNS}, of {MOST_CHARACTERS} characters; join them with "
            "|, or give token_ids or positions"
        )


def check_counts(value: object, *, field: str = "") -> None:
    """Refuse lists with more entries than anybody can use, before one of them is read."""
    total = 0
    patterns = set[str]()
    waiting: list[tuple[str, str, object, int]] = [(field, field.rpartition(".")[2], value, 0)]
    while waiting:
        path, name, item, depth = waiting.pop()
        # Other containers are Python objects of a user's own.
        if not isinstance(item, list | tuple | dict):
            continue
        if name in TENSORS and not isinstance(item, dict):
            continue
        most = MOST_OF.get(name, _MOST_OTHERS)
        if len(item) > most:
            raise SpecError(f"{path or 'inspect_lens'}: has {len(item)} entries; {most} at most")
        rows = None if depth + 1 >= _MOST_DEPTH else _rows_of_plain(item, most)
        total += len(item) + (rows or 0)
        if total > MOST_ENTRIES:
            raise SpecError(
                f"{field or 'inspect_lens'}: has more than {MOST_ENTRIES} entries in all its lists"
            )
        if depth >= _MOST_DEPTH:
            raise SpecError(f"{path[:200]}: is nested more than {_MOST_DEPTH} deep")
        if isinstance(item, dict):
            if isinstance(pattern := item.get("pattern"), str):
                patterns.add(pattern)
            pairs = cast("Mapping[Any, object]", item).items()
            waiting += [
                (f"{path}.{key}" if path else str(key)[:80], str(key)[:80], inner, depth + 1)
                for key, inner in pairs
                if isinstance(inner, list | tuple | dict)
            ]
        elif rows is None:
            waiting += [
                (f"{path}[{i}]", name if isinstance(inner, list | tuple) else "", inner, depth + 1)
                for i, inner in enumerate(item)
                if isinstance(inner, list | tuple | dict) and inner
            ]
    judge_patterns(patterns)


def _rows_of_plain(
    item: list[object] | tuple[object, ...] | dict[Any, object], most: int
) -> int | None:
    """Entries of the lists in a list, at most `most` in each; None where it needs a closer look."""
    # Pairs, such as the points of a schedule, come in great numbers and hold only plain values.
    if isinstance(item, dict):
        return None
    kinds = set(map(type, item))
    if kinds <= _PLAIN:
        return 0
    if not kinds <= {list, tuple}:
        return None
    rows = cast("Sequence[Sequence[object]]", item)
    is_plain = set(map(type, chain.from_iterable(rows))) <= _PLAIN
    return sum(map(len, rows)) if is_plain and max(map(len, rows)) <= most else None


_PLAIN: Final[set[type]] = {int, bool, float, str}

NATIVE_KEY = "inspect_lens"
"""Key of `extra_args` that takes a whole `LensRequest`."""
ENVELOPE_KEY = "_inspect_lens"
"""Where the front-end puts what the worker reads; users may not set it."""
CAPTURE_KEY = "output_residual_stream"
STEER_KEY = "apply_steering_vectors"
LENS_KEYS = (
    NATIVE_KEY,
    CAPTURE_KEY,
    STEER_KEY,
    "skip_reading_prefix_cache",
    "activations_transport",
    "apply_hooks",
    "output_qk",
)
"""Keys of a request that belong to the lens."""
PLACES = ("vllm_xargs", "extra_args")
"""Fields of a request body that may hold lens keys, beside its top level."""
VLLM_KEYS = ("kv_transfer_params", "ec_transfer_params")

_FIELDS = (
    "capture", "edits", "edits_named", "probes", "hooks", "qk", "lens", "sink", "configs",
    "open_gates", "edits_meet", "server", "stream_results",
)  # fmt: skip
OWN_WORDS = {name: f'put it into {{"{NATIVE_KEY}": {{"{name}": ...}}}}' for name in _FIELDS} | {
    "steer": "it is an argument of clients; the key is 'apply_steering_vectors'",
    "steer_named": "the names of vectors stand in 'edits_named', as those of other edits do",
    "capture_layers": "it is an argument of clients; the key is 'output_residual_stream'",
    "steering_vectors": "it is an argument of clients; the key is 'apply_steering_vectors'",
    "capture_qk": "it is an argument of clients; the key is 'output_qk'",
    "extra_body": "it is an argument of clients, which send its content at the top of the body",
}
"""Words that are no keys of a request, and what to use instead."""

FIELDS_INSTEAD = {
    CAPTURE_KEY: "capture", "capture_layers": "capture", "activations_transport": "capture",
    STEER_KEY: "edits", "steer": "edits", "steering_vectors": "edits", "vectors": "edits",
    "steer_named": "edits_named", "capture_qk": "qk", "output_qk": "qk", "apply_hooks": "hooks",
}  # fmt: skip
"""Words that are no fields of a `LensRequest`, and the field that says the same."""

PEER_NAMES = frozenset({"activations", "layer_indices", "position_indices"})
"""Fields by which vllm-lens spells a vector."""

_LONGEST = 64


def refuse_own_words(keys: Iterable[object], where: str) -> None:
    """Raise an error for a lens key in a place where it has no effect."""
    if not _OWN.isdisjoint(keys):
        key = next(key for key in keys if key in _OWN)
        if key == ENVELOPE_KEY:
            raise SpecError(f"{where}: {ENVELOPE_KEY!r} is reserved for the engine")
        raise SpecError(f"{where}.{key}: nobody reads it there; {OWN_WORDS[str(key)]}")


_OWN = frozenset({ENVELOPE_KEY, *OWN_WORDS})


def refuse_misspelled(
    keys: Collection[object],
    where: str,
    *,
    known: Sequence[str] = (*LENS_KEYS, *PLACES),
    cutoff: float = 0.8,
) -> None:
    """Raise an error for a key that looks like a misspelled lens key."""
    if len(keys) > _MOST_OTHERS:
        raise SpecError(f"{where}: has {len(keys)} keys; {_MOST_OTHERS} at most")
    for key in keys:
        if not isinstance(key, str) or len(key) > _LONGEST:
            continue
        if near := _nearest(key, tuple(known), cutoff):
            raise SpecError(f"{where}: unknown key {shown(key)}; did you mean {near[0]!r}?")


@lru_cache(maxsize=1024)  # of short keys: clients send the same ones again and again
def _nearest(key: str, known: tuple[str, ...], cutoff: float) -> list[str]:
    return difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
