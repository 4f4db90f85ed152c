"""Text for people, or one JSON object for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, NoReturn

import typer

from inspect_lens.errors import SpecError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Layers = Annotated[str, typer.Option(help="'all', or numbers such as 8,10-14.")]

_BOTH: Final = frozenset({"out", "recipe", "resamples", "memory", "as_json"})
_RENAMED: Final = (("any_model", "check_model"), ("probe", "probes"), ("max_mib", "max_bytes"))
"""Parameters of commands whose argument in Python has another name."""
_RECIPE: Final = frozenset({"work", "model", "base_url", "model_arg"})


def check_recipe_options(context: typer.Context, *, with_recipe: bool) -> None:
    """Refuse options that would be ignored: a recipe says what is made, and needs its own."""
    typed = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if str(getattr(context.get_parameter_source(parameter.name or ""), "name", ""))
        == "COMMANDLINE"
    }
    wrong = [o for n, o in typed.items() if n not in _BOTH and (n in _RECIPE) != with_recipe]
    if wrong:
        raise SpecError(
            f"{', '.join(wrong)}: {'not used with' if with_recipe else 'used with'} --recipe "
            f"{'' if with_recipe else 'only'}; a recipe says what is trained and on what, and "
            "--work, --model, --base-url and -M say where; edit the recipe, or leave the option out"
        )


def emit(result: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Write a result to standard output."""
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False, default=str) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines)


def in_shell_words(message: str, app: typer.Typer) -> str:
    """A message of the library with the flags of the command that runs, not Python's arguments."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    flags: dict[str, str] = {
        str(p.name): max(p.opts, key=len) for p in command.params if p.opts[0].startswith("-")
    }
    flags |= {name: flags[ours] for ours, name in _RENAMED if ours in flags}

    def in_words(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in flags:
            return found[0]
        # Of a switch the flag alone; else the value, where one stands there.
        return flags[name] + (f"={value}" if value not in ("", "True", "False") else "")

    return re.sub(r"(?<![-\w{'\"])([a-z]\w*)=(True|False|[^\s;,.()]*)", in_words, message)


def fail(error: Exception, code: int, message: str) -> NoReturn:
    """Write an error to standard error, as JSON where JSON was asked for, and end."""
    message = " ".join(message.split())
    if "--json" in sys.argv:
        sys.stderr.write(json.dumps({"error": type(error).__name__, "message": message}) + "\n")
    else:
        sys.stderr.write(f"{type(error).__name__}: {message}\n")
    sys.exit(code)


def parse_layers(value: str) -> Any:
    """`all`, or layer numbers and ranges such as `8,10-14`."""
    if value == "all":
        return value
    layers: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SpecError(f"layers={value!r}; allowed are 'all' and numbers such as 8,10-14")
        layers += range(int(first), int(last or first) + 1)
    return layers


def parse_settings(values: Iterable[str]) -> dict[str, Any]:
    """`key=value` pairs; values that are JSON are read as such."""
    made: dict[str, Any] = {}
    for pair in values:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise SpecError(f"{pair!r}: is no key=value; allowed is one such as C=0.01")
        try:
            made[key] = json.loads(text)
        except ValueError:
            made[key] = text
    return made


def parse_model_args(values: Iterable[str] | None, base_url: str) -> dict[str, Any]:
    """Arguments of the provider, as `-M` and `--base-url` give them."""
    return parse_settings(values or ()) | ({"base_url": base_url} if base_url else {})
