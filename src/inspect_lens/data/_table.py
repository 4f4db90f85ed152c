"""Rows as samples by a map of columns: the one reader of all sets that are a table."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inspect_lens._base.untrusted import parse_json
from inspect_lens.errors import SpecError
from inspect_lens.spec import explain

from ._rows import FILE, LIST, Row
from ._sample import Message, ProbeSample

Part = Literal["prompt", "completion", "system"]
Names: TypeAlias = str | list[str] | tuple[str, ...]
Value: TypeAlias = str | bool | int | float
Values: TypeAlias = Value | list[Value] | tuple[Value, ...]
_SHOWN: Final = 60
_SEEN: Final = 8
_WHOLE: Final = re.compile(r"-?\d+\.0")
_OF_ONE: Final = ("prompt", "messages", "reply", "completion", "label", "true", "false")
"""Options that say what a row is that stands for one sample."""
_NOT_OF_PAIRS: Final[dict[Part, tuple[str, ...]]] = {
    "prompt": _OF_ONE,
    "completion": _OF_ONE[2:],
    "system": ("system", *_OF_ONE[2:]),
}
"""Options that a pair does not read, by which part of a sample its texts are."""


class Columns(BaseModel):
    """Which columns of a table are which part of a sample."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    prompt: Annotated[Names, Field(min_length=1)] = "prompt"
    """What the user says; of several columns the first has to be there, and the texts are joined by
    an empty line. Not needed where a row has `messages`, or a pair stands for it."""
    messages: str = "messages"
    """Turns with `role` and `content`, or JSON of them, or one text."""
    reply: bool = False
    """Whether the last turn of `messages` is the completion."""
    system: str = "system"
    completion: str = "completion"
    label: str | bool | Literal[0, 1] | None = "label"
    """The column, or true (1) or false (0) for every row; None: what the model says decides."""
    true: Values = ()
    """Values of `label` that are positive; by default 1, true and yes."""
    false: Values = ()
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
    """Values that rows must have, or lists of them, by column; `1`, `1.0` and `true` are one, as
    are upper and lower case."""

    @classmethod
    def of(cls, base: Columns, options: Mapping[str, Any]) -> Columns:
        """The map of a set, with the options that a user gave."""
        if unknown := sorted(set(options) - set(cls.model_fields)):
            raise SpecError(
                f"{unknown[0]}={options[unknown[0]]!r}: no option of this set; allowed are "
                f"{', '.join(sorted(cls.model_fields))}"
            )
        try:
            given = cls(**options)
        except ValidationError as error:
            raise SpecError(explain(error)) from None
        made = base.model_copy(update={name: getattr(given, name) for name in options})
        if bool(made.positive) != bool(made.negative):
            raise SpecError("positive and negative: one is given; allowed are both, for pairs")
        unread = _NOT_OF_PAIRS[made.part] if made.positive else ("part",)
        if refused := [name for name in unread if name in options]:
            raise SpecError(
                f"{refused[0]}={options[refused[0]]!r}: "
                + (
                    f"is not read of pairs with part={made.part!r}; leave it out"
                    if made.positive
                    else "is of pairs; name positive= and negative= too"
                )
            )
        if listed(made.false) and not listed(made.true):
            raise SpecError(f"false={made.false!r}: needs true=, the values that are positive")
        return made

    def named(self) -> dict[str, list[str]]:
        """The columns that each option names."""
        found = {
            name: listed(getattr(self, name))
            for name in ("prompt", "messages", "system", "completion", "positive", "negative", "id",
                         "group", "keep")
        }  # fmt: skip
        found["label"] = [self.label] if isinstance(self.label, str) else []
        return found | {"where": list(self.where or ())}


def read_table(base: Columns, rows: Iterable[Row], /, **options: Any) -> Iterator[ProbeSample]:
    """Samples of a table; options are the fields of `Columns`, and what a user named must be there.

    Pairs of texts that share one are of one group, where the file has no groups.
    """
    columns = Columns.of(base, options)
    found = list(rows)
    wanted = [(i, row) for i, row in enumerate(found) if _is_wanted(row, columns.where, i)]
    if columns.where and found and not wanted:
        raise SpecError(
            f"where={dict(columns.where)!r}: no row has these values; {_shown(found[0])}"
        )
    made: list[ProbeSample] = []
    for i, row in wanted:
        if "prompt" in options and "messages" not in options and _has(row, columns.messages):
            raise SpecError(
                f"row {i}: prompt={options['prompt']!r}, and the row has {columns.messages!r} too; "
                "to read the prompt pass messages='' as well, or leave prompt= out"
            )
        made += _pair(row, i, columns) if columns.positive else _single(row, i, columns)
    _judge_named(columns, options, found)
    _judge_values(columns, options, [row for _, row in wanted])
    is_grouped = any(_has(row, columns.group) for _, row in wanted)
    texts = columns.positive and columns.part == "prompt" and not is_grouped
    yield from _joined(made) if texts else made


def _judge_named(columns: Columns, options: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Refuse a column that a user named and no row has."""
    there = {key for row in rows for key in row}
    for option, names in columns.named().items():
        if option in options and rows and (absent := [n for n in names if n and n not in there]):
            raise SpecError(
                f"{option}={options[option]!r}: no row has {absent[0]!r}; allowed are "
                f"{', '.join(sorted(there - {FILE}))}"
            )


def _judge_values(columns: Columns, options: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Refuse values of a label that a user named and no row has."""
    if not isinstance(columns.label, str):
        return
    seen = list(dict.fromkeys(_value(row.get(columns.label)) for row in rows))
    for option in ("true", "false"):
        named = [_value(value) for value in listed(options.get(option, ()))]
        if named and not set(named) & set(seen):
            raise SpecError(
                f"{option}={options[option]!r}: no row has it; values of {columns.label!r} are "
                f"{', '.join(seen[:_SEEN])}{', …' if len(seen) > _SEEN else ''}; for a set of one "
                "label say label=True or label=False"
            )


def _joined(samples: Sequence[ProbeSample]) -> Iterator[ProbeSample]:
    """Samples in groups that share no text with each other."""
    above: dict[str, str] = {}

    def first(group: str) -> str:
        root = group
        while root in above:
            root = above[root]
        # All on the way lead there at once from now on: a long chain is walked only one time.
        while group != root:
            above[group], group = root, above[group]
        return root

    of_text: dict[str, str] = {}
    for sample in samples:
        text = sample.messages[-1].content  # behind the system turn
        one, other = first(of_text.setdefault(text, sample.group)), first(sample.group)
        if one != other:
            above[other] = one
    for sample in samples:
        yield replace(sample, group=first(sample.group))


def _is_wanted(row: Row, where: Mapping[str, Any] | None, index: int) -> bool:
    for key, value in (where or {}).items():
        allowed = value if isinstance(value, list | tuple) else [value]
        there = row[key] if key in row else get(row, key, index)
        if _value(there) not in map(_value, allowed):
            return False
    return True


def _single(row: Row, i: int, columns: Columns) -> Iterator[ProbeSample]:
    label = _label(row, i, columns)
    if label == "left out":
        return
    messages, completion = _turns(row, i, columns)
    if _has(row, columns.completion):
        completion = _string(row, columns.completion, i)
    own = digest(*(m.content for m in messages))
    yield _sample(row, i, columns, messages, completion, label, own, own)


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
            messages = (*_system(row, i, columns), Message("user", text))
        elif columns.part == "completion":
            completion = text
        else:
            messages = (Message("system", text), *asked)
        end = "-positive" if label else "-negative"
        yield _sample(row, i, columns, messages, completion, label, own, shared, end)


def _sample(
    row: Row, i: int, columns: Columns, messages: tuple[Message, ...], completion: str | None,
    label: bool | None, own: str, shared: str, end: str = "",
) -> ProbeSample:  # fmt: skip
    if not messages:
        raise SpecError(f"row {i}: has no turn but the answer; {_shown(row)}")
    if columns.raw and (len(messages) > 1 or completion is not None):
        raise SpecError(
            f"row {i}: raw=True reads one text, and this row has a completion, a system message or "
            f"several turns; leave them out, as in completion='' or system=''; {_shown(row)}"
        )
    name = str(row[columns.id]) if _has(row, columns.id) else f"{i}-{own}"
    group = str(row[columns.group]) if _has(row, columns.group) else ""
    if group and columns.group_in_file:
        group = f"{row.get(FILE, '')}-{group}"
    return ProbeSample(
        id=name + end, messages=messages, label=label, group=group or shared,
        completion=completion, raw=columns.raw,
        columns={k.lstrip("_"): str(row[k]) for k in listed(columns.keep) if _has(row, k)},
    )  # fmt: skip


def _turns(row: Row, i: int, columns: Columns) -> tuple[tuple[Message, ...], str | None]:
    """The prompt, and the completion that ends the conversation, where it does."""
    completion = None
    if _has(row, columns.messages):
        messages = _messages_or_text(row[columns.messages], i)
        if columns.reply:
            messages, completion = split_reply(messages, i)
    else:
        names = listed(columns.prompt)
        parts = [_text(row, names[0], i)]
        parts += [_text(row, name, i) for name in names[1:] if _has(row, name)]
        messages = (Message("user", "\n\n".join(parts)),)
    if columns.part != "system":
        messages = (*_system(row, i, columns), *messages)
    return messages, completion


def _system(row: Row, i: int, columns: Columns) -> tuple[Message, ...]:
    if not _has(row, columns.system):
        return ()
    return (Message("system", _string(row, columns.system, i)),)


def _has(row: Row, key: str) -> bool:
    """Whether there is something in a cell; an empty one of a table counts as none."""
    value = row.get(key) if key else None
    return value is not None and value != [] and not (isinstance(value, str) and not value.strip())


def _string(row: Row, key: str, index: int) -> str:
    value = get(row, key, index)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise SpecError(f"row {index}: {key!r} is no text; {_shown(row)}")
    return str(value)


def _text(row: Row, key: str, index: int) -> str:
    return _string(row, key, index).strip()


def _label(row: Row, i: int, columns: Columns) -> bool | Literal["left out"] | None:
    if not isinstance(columns.label, str):
        return None if columns.label is None else bool(columns.label)
    value = get(row, columns.label, i)
    true, false = ([_value(v) for v in listed(named)] for named in (columns.true, columns.false))
    if not true:
        return truth(value, i)
    if _value(value) in true:
        return True
    return False if not false or _value(value) in false else "left out"


def listed(values: Any) -> list[Any]:
    """Values of an option that takes one or several; an empty text is none."""
    if isinstance(values, list | tuple):
        return list(values)
    return [] if values == "" else [values]


def _value(value: Any) -> str:
    """One text for what says the same: 1, 1.0, true, and these as text."""
    text = str(value).strip().lower()
    text = text[:-2] if _WHOLE.fullmatch(text) else text
    return {"true": "1", "false": "0"}.get(text, text)


def _shown(row: Row) -> str:
    """A row as its file has it, short enough for a message."""
    told = {key: value for key, value in row.items() if key != FILE}
    short = {k: v if len(str(v)) <= _SHOWN else f"{str(v)[:_SHOWN]}…" for k, v in told.items()}
    try:
        return f"the row is {json.dumps(short, ensure_ascii=False)}"
    except TypeError:
        return f"the row is {short}"


def get(row: Row, key: str, index: int) -> Any:
    if row.get(key) is None and key in row:
        raise SpecError(f"row {index}: {key!r} is empty; fill it, or leave it out; {_shown(row)}")
    if key not in row:
        has = sorted(k for k in row if k not in (FILE, LIST))
        raise SpecError(
            f"row {index}: has no {key!r}, only {has}; allowed are rows of the schema of this set; "
            "check that the file is the right one, or, where the set is a table, say which column "
            f"it is, as in prompt='question'; {_shown(row)}"
        )
    return row[key]


def truth(value: Any, index: int) -> bool:
    """A label of 0, 1, true or false."""
    text = _value(value)
    if text in ("1", "yes"):
        return True
    if text in ("0", "no"):
        return False
    raise SpecError(
        f"row {index}: label {value!r}; allowed are 0, 1, true and false; of a table say which "
        "values are positive, as in true='harmful'"
    )


def messages_of(value: Any, index: int) -> tuple[Message, ...]:
    """Turns with role and content, or JSON of them."""
    try:
        turns = parse_json(value) if isinstance(value, str) else value
        return tuple(Message(t["role"], t["content"]) for t in turns)
    except (KeyError, TypeError, ValueError) as error:
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
    text = "\n".join(texts)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
