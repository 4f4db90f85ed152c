"""The program: its commands, and what its exit codes mean."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from pydantic import ValidationError

from inspect_lens._base.installed import install_extra
from inspect_lens._settings import Settings
from inspect_lens.errors import ArtifactError, LensError, SpecError, UnsupportedError

from ._doctor import doctor
from ._lens import lens_app
from ._output import (
    CommandGroup,
    Interrupted,
    Json,
    emit,
    examples,
    fail,
    found,
    in_shell_words,
    libraries_last,
    running,
)
from ._probe import probe_app
from ._score import chat, score, view
from ._vector import vector_app

if TYPE_CHECKING:
    from inspect_lens import PublishedSetting


def settings(
    model: Annotated[
        str,
        typer.Argument(
            help="Model on the hub, such as Qwen/Qwen2-1.5B-Instruct; those of all by default."
        ),
    ] = "all",
    as_json: Json = False,
) -> None:
    """List heads, layers, vectors and verbalisers that were published for a model.

    They are what the authors published, with source and licence; they were not measured again here.
    """
    from inspect_lens import published_settings
    from inspect_lens._base.published import PUBLISHED

    found = PUBLISHED if model == "all" else published_settings(model)
    lines = [line for one in found for line in _lines(one)]
    emit({"settings": [one.model_dump(mode="json") for one in found]}, lines, as_json=as_json)


def _lines(one: PublishedSetting) -> Iterator[str]:
    said = f"revision {one.revision}" if one.revision else "revision not stated"
    yield f"{one.model} ({said}): {one.kind}"
    if one.heads:
        yield f"  heads {' '.join(f'{layer}.{head}' for layer, head in one.heads)} (layer.head)"
    if one.layer is not None:
        yield f"  layer {one.layer}"
    yield from (f"  file {file}" for file in one.files)
    if one.note:
        yield f"  {one.note}"
    yield f"  source: {one.source}; licence: {one.licence}"


EXIT_CODES = (
    "Exit codes: 0 done · 1 unexpected error · 2 wrong usage · 3 refused: a setting or a set is "
    "wrong · 4 a file is missing or damaged, or made for another model · 5 the server or a "
    "capture failed · 130 interrupted · 141 nobody reads the output, as after | head."
)

EXTRAS: Final = {
    "cloudpickle": "hooks",
    "datasets": "train",
    "matplotlib": "train",
    "torch": "train",
    "vllm": "vllm",
}
"""By package that a command may lack: the extra of this distribution that brings it."""

app = typer.Typer(
    cls=CommandGroup,
    name="inspect-lens",
    help="White-box Inspect evals at serving speed. Each command has its own --help.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
    add_completion=False,
)
app.add_typer(probe_app, name="probe")
app.add_typer(vector_app, name="vector")
app.add_typer(lens_app, name="lens")
app.command(
    epilog=examples(
        "inspect-lens score logs/task.eval --probe my-probes/lies",
        "inspect-lens score logs/task.eval --probe my-probes/lies --over all --out scored.eval",
    )
)(score)
app.command(epilog=examples("inspect-lens view logs/task.eval --probe my-probes/lies"))(view)
app.command(
    epilog=examples("inspect-lens chat --base-url http://localhost:8000 --probe my-probes/lies")
)(chat)
app.command(
    epilog=examples(
        "inspect-lens doctor",
        "inspect-lens doctor --model models/my-model --max-num-seqs 64",
        "inspect-lens doctor --base-url http://localhost:8000",
    )
)(doctor)
app.command(
    epilog=examples("inspect-lens settings Qwen/Qwen2-1.5B-Instruct", "inspect-lens settings all")
)(settings)


def _show_version(asked: bool) -> None:
    if asked:
        from inspect_lens import __version__

        typer.echo(f"inspect-lens {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand != "doctor":  # which shows it
        Settings.load()


def main() -> None:
    """Run the program: what a user can cause becomes one line and an exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as >&- does
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        with libraries_last():
            code = app(prog_name="inspect-lens", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as ended:  # of typer, whose code for a closed pipe is 1
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        _leave_closed()
    except BrokenPipeError:
        _leave_closed()
    except Exception as error:
        if type(error).__name__ == "Abort":  # of an input that ended
            fail(Interrupted("the command was ended while it asked for input"), _INTERRUPTED)
        # Newer typers have the parser of options under a name of their own.
        if any(base.__name__ == "ClickException" for base in type(error).__mro__):
            _fail_usage(error)
        told = _told(error)
        code = _exit_code(told)
        if code is None:  # a fault of ours keeps its traceback
            raise
        fail(told, code, in_shell_words(str(told), found(app)[1]))
    if code == _INTERRUPTED:
        fail(Interrupted("Ctrl-C ended it; results are written at the end, so there is none"), code)
    sys.exit(code if isinstance(code, int) else 0)


def _leave_closed() -> NoReturn:
    """End as a program of the shell whose reader has gone, such as head: silently."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python writes out when it ends
    sys.exit(_CLOSED)


_INTERRUPTED: Final = 130
_CLOSED: Final = 141


def _fail_usage(error: Any) -> NoReturn:
    """What is wrong with the words of a command, in one line, and where its help is."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    said = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    said += " " if said.endswith("?") else "; "
    fail(error, error.exit_code, f"{said}{running(app)} --help shows what it takes", "UsageError")


def _told(error: Exception) -> Exception:
    """An error of another library as one of ours; any other as it is."""
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and _exit_code(error) is not None:
        package = (error.name or "").partition(".")[0]
        return UnsupportedError(
            f"this command needs the package {package!r}, which is not installed; the extra "
            f"{EXTRAS[package]!r} brings it: {install_extra(EXTRAS[package])}"
        )
    if isinstance(error, ValidationError):  # of a card or a recipe that options make
        from inspect_lens.spec import explain

        return SpecError(explain(error, root=error.title))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OSError(f"{error}: what was to be written has no room; free some, or go elsewhere")
    if isinstance(error, OSError) and error.filename and error.strerror:
        return ArtifactError(f"{error.filename}: {error.strerror.lower()}; check the path")
    if kind == "InvalidParameterError":  # of scikit-learn, about a setting of a family
        return SpecError(f"--setting: {error}")
    if kind == "PrerequisiteError":  # of Inspect, which prints its markup in colours
        from rich.text import Text

        return UnsupportedError(Text.from_markup(str(getattr(error, "message", error))).plain)
    return error


def _exit_code(error: Exception) -> int | None:
    """By the kind of error; None for what no user can cause."""
    if isinstance(error, ModuleNotFoundError):
        from inspect_lens.agents._extras import is_installed

        package = (error.name or "").partition(".")[0]
        # Of a package that is there, a part that is not is another fault.
        return 3 if package in EXTRAS and not is_installed(package) else None
    if isinstance(error, OSError):
        return 4
    by_kind = (
        (SpecError, 3), (UnsupportedError, 3), (ArtifactError, 4), (LensError, 5),
        (Interrupted, _INTERRUPTED),
    )  # fmt: skip
    return next((code for kind, code in by_kind if isinstance(error, kind)), None)
