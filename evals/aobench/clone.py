"""A user's clone of AObench: where its files are, and the texts that its scripts ask with.

Questions and judges' instructions are read from the scripts of the clone, which are parsed and
never run, so that an eval asks what that clone asks.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from inspect_lens.model._host import PrerequisiteError

__all__ = ["ADVICE", "COMMIT", "Clone", "open_clone", "read_constants", "read_texts"]

COMMIT: Final = "ec7e788884593d3971e060461588c8ca65eb6fa9"
ADVICE: Final = (
    f"pass -T data= a clone of github.com/ceselder/cot-oracle at {COMMIT}, which has the whole "
    "suite in AObench/, or one of github.com/japhba/activation_oracles at bf74e64"
)


class Clone(NamedTuple):
    """Folders of one clone."""

    scripts: Path
    """One script for each task."""
    data: tuple[Path, ...]
    """Folders below which its data sets are."""
    subject: str
    """Folder of the model that gave the recorded answers, where there is one for each model."""

    def entries(self, name: str, *fields: str, own: bool = False) -> list[dict[str, Any]]:
        """Entries of a data set.

        Args:
            name: of the file, below one of the folders.
            fields: that every entry has to have.
            own: what is right depends on the subject's own answers, so they have to be its.

        Returns:
            The entries, in the order of the file.

        Raises:
            PrerequisiteError: no such file, answers of another model, or an entry without one of
                the fields.
        """
        path, model = self.find(name), ""
        found: Any
        if path.suffix == ".jsonl":
            # A line separator of Unicode stands in JSON as it is.
            found = [_json(line, path) for line in _read(path).split("\n") if line.strip()]
        else:
            read = _json(_read(path), path)
            found = read.get("entries") if isinstance(read, dict) else None
            about = read.get("metadata") if found else None
            model = str(about.get("model", "")) if isinstance(about, dict) else ""
        if own and model.rpartition("/")[2] not in ("", self.subject):
            raise PrerequisiteError(
                f"{path}: has the answers of {model}, and -T subject={self.subject} says that "
                "another model is read; what is right here are the model's own answers"
            )
        if not isinstance(found, list) or not found:
            raise PrerequisiteError(f"{path}: has no list of entries; {ADVICE}")
        for number, entry in enumerate(found):
            if not isinstance(entry, dict):
                raise PrerequisiteError(f"{path}: entry {number} is no record; {ADVICE}")
            if missing := [field for field in fields if field not in entry]:
                raise PrerequisiteError(
                    f"{path}: entry {number} has no {missing[0]!r}, which is read; {ADVICE}"
                )
        return found

    def find(self, name: str) -> Path:
        """A file of the data: that of the subject, or the one that all models share."""
        folder, _, file = name.rpartition("/")
        tried = [
            place
            for base in self.data
            for place in (base / folder / self.subject / file, base / folder / file)
        ]
        for path in tried:
            if path.is_file():
                return path
        raise PrerequisiteError(
            f"{name} is in none of {', '.join(map(str, dict.fromkeys(p.parent for p in tried)))}; "
            f"{ADVICE}, and -T subject= names the model whose answers are read"
        )

    def text(self, name: str) -> Any:
        """A JSON file of the data."""
        path = self.find(name)
        return _json(_read(path), path)

    def constants(self, script: str, *names: str) -> dict[str, Any]:
        """Constants of a script.

        Args:
            script: name of the file, without `.py`.
            names: constants that are needed; `A|B` takes the first of both that there is.

        Returns:
            Them by name, under the last of several.

        Raises:
            PrerequisiteError: no such script, or it has no such constant.
        """
        path = self.script(script)
        known = read_constants(path)
        found = {}
        for name in names:
            spelt = name.split("|")
            first = next((one for one in spelt if one in known), None)
            if first is None:
                raise PrerequisiteError(
                    f"{path}: assigns no {' and no '.join(spelt)}, whose text this task asks with; "
                    f"{ADVICE}"
                )
            found[spelt[-1]] = known[first]
        return found

    def wording(self, script: str, pattern: str) -> str:
        """The text with which a script asks, wherever in it that stands.

        Recorded answers are answers to exactly that prompt.

        Args:
            script: name of the file, without `.py`.
            pattern: regular expression that one of its texts has a match of.

        Returns:
            The text; what an f-string fills in stands in it as its expression in braces.

        Raises:
            PrerequisiteError: no such script, or not one such text.
        """
        path = self.script(script)
        found = {text for text in read_texts(path) if re.search(pattern, text)}
        if len(found) != 1:
            raise PrerequisiteError(
                f"{path}: has {len(found)} texts that match {pattern!r}, and one is what recorded "
                f"answers were asked with; {ADVICE}"
            )
        return found.pop()

    def script(self, name: str) -> Path:
        """The script of a task."""
        path = self.scripts / f"{name}.py"
        if not path.is_file():
            raise PrerequisiteError(f"{path} is missing, so this task cannot be asked; {ADVICE}")
        return path


def open_clone(data: str, subject: str) -> Clone:
    """Find the suite in a clone.

    Args:
        data: the clone, or the folder `AObench` of one.
        subject: model whose recorded answers are read, such as `Qwen3-8B`.

    Returns:
        Its folders.

    Raises:
        PrerequisiteError: the folder is no such clone.
    """
    root = Path(os.path.expanduser(data))  # whose unknown users stay as they are
    for scripts, folders in (
        ("AObench/open_ended_eval", ("AObench/datasets",)),
        ("open_ended_eval", ("datasets",)),
        ("nl_probes/open_ended_eval", ("data_pipelines", "datasets")),
    ):
        if (root / scripts).is_dir():
            return Clone(root / scripts, tuple(root / f for f in folders), subject)
    raise PrerequisiteError(
        f"-T data={data}: has neither AObench/open_ended_eval nor nl_probes/open_ended_eval; "
        f"{ADVICE}"
    )


def read_constants(path: Path) -> Mapping[str, Any]:
    """Texts, numbers, lists and maps that a script assigns at its top level.

    Args:
        path: the script, which is parsed and not run.

    Returns:
        By name; what is not made of such values alone is left out.
    """
    found: dict[str, Any] = {}
    for node in _parse(path).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.expr):
            try:
                found[target.id] = _evaluate(value, found)
            except (KeyError, TypeError, ValueError):
                continue
    return found


def read_texts(path: Path) -> tuple[str, ...]:
    """Every text in a script, which is parsed and not run; f-strings keep their expressions."""
    return tuple(
        "".join(map(_text, node.values)) if isinstance(node, ast.JoinedStr) else _text(node)
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(_read(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PrerequisiteError(f"{path}: is no Python script ({error}); {ADVICE}") from None


def _evaluate(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """A literal, in which names, f-strings and sums of what is known may stand."""
    match node:
        case ast.Name(id=name):
            return known[name]
        case ast.JoinedStr(values=parts):
            return "".join(str(_evaluate(part, known)) for part in parts)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return _evaluate(value, known)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left, known) + _evaluate(right, known)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_evaluate(part, known) for part in parts]
        case ast.Dict(keys=keys, values=values):
            made: dict[Any, Any] = {}
            for key, value in zip(keys, values, strict=True):
                one = _evaluate(value, known)
                made |= one if key is None else {_evaluate(key, known): one}
            return made
        case _:
            return ast.literal_eval(node)


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PrerequisiteError(f"{path}: is no JSON ({error}); {ADVICE}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PrerequisiteError(f"{path}: cannot be read ({error}); {ADVICE}") from None
