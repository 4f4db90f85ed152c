"""The program: its commands, and what its exit codes mean."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from inspect_lens._settings import Settings
from inspect_lens.errors import ArtifactError, LensError, SpecError, UnsupportedError

from ._doctor import doctor
from ._lens import lens_app
from ._output import fail, in_shell_words
from ._probe import probe_app
from ._score import chat, score, view
from ._settings_of import settings
from ._vector import vector_app

EXIT_CODES = (
    "Exit codes: 0 done · 1 unexpected error · 2 wrong usage · 3 refused: a setting or a set is "
    "wrong · 4 a file is missing or damaged, or made for another model · 5 the server or a "
    "capture failed · 130 interrupted."
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
    name="inspect-lens",
    help="White-box Inspect evals at serving speed. Each command has its own --help.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(probe_app, name="probe")
app.add_typer(vector_app, name="vector")
app.add_typer(lens_app, name="lens")
app.command()(score)
app.command()(view)
app.command()(chat)
app.command()(doctor)
app.command()(settings)


def _show_version(asked: bool) -> None:
    if asked:
        from inspect_lens import __version__

        typer.echo(__version__)
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
    try:
        app(prog_name="inspect-lens")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what is finished is kept\n")
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:  # a fault of ours keeps its traceback
            raise
        told = _missing(error) if isinstance(error, ModuleNotFoundError) else error
        fail(told, code, in_shell_words(str(told), app))


def _exit_code(error: Exception) -> int | None:
    """By the kind of error; None for what no user can cause."""
    if isinstance(error, ModuleNotFoundError):
        from inspect_lens.agents._extras import is_installed

        package = (error.name or "").partition(".")[0]
        # Of a package that is there, a part that is not is another fault.
        return 3 if package in EXTRAS and not is_installed(package) else None
    if isinstance(error, OSError):
        return 4
    by_kind = ((SpecError, 3), (UnsupportedError, 3), (ArtifactError, 4), (LensError, 5))
    found = next((code for kind, code in by_kind if isinstance(error, kind)), None)
    # Inspect's error of a wrong argument; loaded by whoever raised it.
    return 3 if found is None and type(error).__name__ == "PrerequisiteError" else found


def _missing(error: ModuleNotFoundError) -> UnsupportedError:
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS[package]
    return UnsupportedError(
        f"this command needs the package {package!r}, which is not installed; the extra {extra!r} "
        f'brings it: give pip install ".[{extra}]" in a clone'
    )
