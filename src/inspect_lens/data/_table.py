"""Rows as samples by a map of columns: the one reader of all sets that are a table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

from inspect_lens._base.untrusted import parse_json
from inspect_lens.errors import SpecError

from ._rows import FILE, Row
from ._sample import Message, ProbeSample

Part = Literal["prompt", "completion", "system"]
Names: TypeAlias = str | Sequence[str]
_SHOWN: Final = 60
_TRUE: Final = ("1", "true", "1.0", "yes")
_FALSE: Final = ("0", "false", "0.0", "no")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table are which part of a sample."""

    prompt: Names = "prompt"
    """What the user says; of several columns the first has to be there, and the texts are joined by
    an empty line. Not needed where a row has `messages`, or a pair stands for it."""
    messages: str = "messages"
    """Turns with `role` and `content`, or JSON of them, or one text."""
    reply: bool = False
    """Whether the last turn of `messages` is the completion."""
    system: str = "system"
    completion: str = "completion"
    label: str | bool | None = "label"
    """The column, or true (1) or false (0) for every row; None: what the model says decides."""
    true: Names = ()
    """Values of `label` that are positive; by default 1, true and yes."""
    false: Names = ()
    """Values that are negative, and others are left out; by default 0, false and no, or whatever is
    not in `true`."""
    positive: str = ""
    """Column of a text with label 1; with `negative`, a row is a pair of samples of one group."""
    negative: str = ""
    part: Part = "prompt"
    """Which part of a sample the texts of a pair are."""
    id: str = "id"
    group: str = "group"
    group_in_file: bool = False
    """Whether files number their groups, each from the beginning."""
    raw: bool = False
    """Read the prompt as it stands, without a chat template."""
    keep: Names = ()
    """Columns that stay with the sample."""
    where: Mapping[str, Any] | None = None
    """Values that rows must have, or lists of them, by column."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Columns:
        """A map of columns from options that a user gave."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise SpecError(
                f"{unknown[0]}={options[unknown[0]]!r}: no option of this set; allowed are "
                f"{', '.join(sorted(known))}"
            )
        made = cls(**options)
        if made.part not in get_args(Part):
            raise SpecError(f"part={made.part!r}; allowed are {', '.join(get_args(Part))}")
        if bool(made.positive) != bool(made.negative):
            raise SpecError("positive and negative: one is given; allowed are both, for pairs")
        if made.where is not None and not isinstance(made.where, Mapping):
            raise SpecError(f"where={made.where!r}; allowed is a mapping from columns to values")
        return made


def read_table(rows: Iterable[Row], **options: Any) -> Iterator[ProbeSample]:
    """Samples of a table; options are the fields of `Columns`."""
    columns = Columns.of(options)
    n_kept = 0
    first: Row | None = None
    for i, row in enumerate(rows):
        first = row if first is None else first
        if not _is_wanted(row, columns.where, i):
            continue
        n_kept += 1
        yield from _pair(row, i, columns) if columns.positive else _single(row, i, columns)
    if columns.where and not n_kept and first is not None:
        raise SpecError(f"where={dict(columns.where)!r}: no row has these values; {_shown(first)}")


def _is_wanted(row: Row, where: Mapping[str, Any] | None, index: int) -> bool:
    for key, value in (where or {}).items():
        allowed = value if isinstance(value, list | tuple) else [value]
        if str(get(row, key, index)) not in map(str, allowed):
            return False
    return True


def _single(row: Row, i: int, columns: Columns) -> Iterator[ProbeSample]:
    label = _label(row, i, columns)
    if label == "left out":
        return
    messages, completion = _turns(row, i, columns)
    if columns.completion and row.get(columns.completion) is not None:
        completion = str(row[columns.completion])
    own = digest(*(m.content for m in messages))
    name = row.get(columns.id)
    yield ProbeSample(
        id=f"{i}-{own}" if name in (None, "") else str(name), messages=messages, label=label,
        group=_group(row, columns, own), completion=completion, raw=columns.raw,
        columns=_kept(row, columns),
    )  # fmt: skip


def _pair(row: Row, i: int, columns: Columns) -> Iterator[ProbeSample]:
    texts = {True: _text(row, columns.positive, i), False: _text(row, columns.negative, i)}
    asked: tuple[Message, ...] = ()
    if columns.part != "prompt":
        asked, _ = _turns(row, i, columns)
    own = digest(*(m.content for m in asked), *texts.values())
    # Answers to one question, and answers under two instructions, are about what is asked.
    shared = digest(*(m.content for m in asked)) if asked else own
    for label, text in texts.items():
        messages, completion = asked, None
        if columns.part == "prompt":
            messages = (Message("user", text),)
        elif columns.part == "completion":
            completion = text
        else:
            messages = (Message("system", text), *asked)
        yield ProbeSample(
            id=f"{i}-{own}-{'positive' if label else 'negative'}", messages=messages, label=label,
            group=_group(row, columns, shared), completion=completion, raw=columns.raw,
            columns=_kept(row, columns),
        )  # fmt: skip


def _turns(row: Row, i: int, columns: Columns) -> tuple[tuple[Message, ...], str | None]:
    """The prompt, and the completion that ends the conversation, where it does."""
    completion = None
    if columns.messages and row.get(columns.messages) is not None:
        messages = _messages_or_text(row[columns.messages], i)
        if columns.reply:
            messages, completion = split_reply(messages, i)
    else:
        names = [columns.prompt] if isinstance(columns.prompt, str) else list(columns.prompt)
        parts = [_text(row, names[0], i)]
        parts += [str(row[n]).strip() for n in names[1:] if str(row.get(n) or "").strip()]
        messages = (Message("user", "\n\n".join(parts)),)
    if columns.system and row.get(columns.system) and columns.part != "system":
        messages = (Message("system", str(row[columns.system])), *messages)
    return messages, completion


def _text(row: Row, key: str, index: int) -> str:
    value = get(row, key, index)
    if not isinstance(value, str | int | float):
        raise SpecError(f"row {index}: {key!r} is no text; {_shown(row)}")
    return str(value).strip()


def _label(row: Row, i: int, columns: Columns) -> bool | Literal["left out"] | None:
    if columns.label is None or isinstance(columns.label, int):
        return columns.label if columns.label is None else bool(columns.label)
    value = get(row, columns.label, i)
    true, false = (_lower(named) for named in (columns.true, columns.false))
    if not true:
        return truth(value, i)
    text = str(value).strip().lower()
    if text in true:
        return True
    return False if not false or text in false else "left out"


def _lower(names: Names) -> list[str]:
    return [str(n).lower() for n in ([names] if isinstance(names, str | int) else names)]


def _group(row: Row, columns: Columns, own: str) -> str:
    group = row.get(columns.group) if columns.group else None
    if group in (None, ""):
        return own
    return f"{row.get(FILE, '')}-{group}" if columns.group_in_file else str(group)


def _kept(row: Row, columns: Columns) -> dict[str, str]:
    keep = [columns.keep] if isinstance(columns.keep, str) else columns.keep
    return {key.lstrip("_"): str(row[key]) for key in keep if row.get(key) not in (None, "")}


def _shown(row: Row) -> str:
    """A row as its file has it, short enough for a message."""
    told = {key: value for key, value in row.items() if key != FILE}
    short = {k: v if len(str(v)) <= _SHOWN else f"{str(v)[:_SHOWN]}…" for k, v in told.items()}
    try:
        return f"the row is {json.dumps(short, ensure_ascii=False)}"
    except TypeError:
        return f"the row is {short}"


def get(row: Row, key: str, index: int) -> Any:
    """A value that has to be there."""
    if row.get(key) is None:
        has = sorted(k for k in row if k != FILE)
        raise SpecError(
            f"row {index}: has no {key!r}, only {has}; allowed are rows of the schema of this set; "
            "check that the file is the right one, or say which column it is, as in "
            f"prompt='question' (--option prompt=question); {_shown(row)}"
        )
    return row[key]


def truth(value: Any, index: int) -> bool:
    """A label of 0, 1, true or false."""
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise SpecError(
        f"row {index}: label {value!r}; allowed are 0, 1, true and false; of a table say which "
        "values are positive, as in true='harmful'"
    )


def messages_of(value: Any, index: int) -> tuple[Message, ...]:
    """Turns with role and content, or JSON of them."""
    turns = parse_json(value) if isinstance(value, str) else value
    try:
        return tuple(Message(str(t["role"]), str(t["content"])) for t in turns)
    except (KeyError, TypeError) as error:
        raise SpecError(
            f"row {index}: messages are not a list of role and content ({error!r}); check the file"
        ) from None


def _messages_or_text(value: Any, index: int) -> tuple[Message, ...]:
    turns = value
    if isinstance(value, str):
        try:
            turns = parse_json(value)
        except ValueError:
            turns = None
        if not isinstance(turns, list):
            return (Message("user", value),)
    return messages_of(turns, index)


def split_reply(messages: Sequence[Message], index: int) -> tuple[tuple[Message, ...], str]:
    """Prompt and the assistant's last turn, which has to end the conversation."""
    if not messages or messages[-1].role != "assistant":
        raise SpecError(
            f"row {index}: the conversation does not end with the assistant; allowed are those "
            "that do, as that turn is what is read"
        )
    return tuple(messages[:-1]), messages[-1].content


def digest(*texts: str) -> str:
    """Short hash of texts.

    It stands where a row has no name of its own: row numbers of two sets are the same, and would
    make samples that have nothing in common look like one.
    """
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
