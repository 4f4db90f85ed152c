"""The program: its commands, and what its exit codes mean."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from inspect_lens._settings import Settings
from inspect_lens.errors import ArtifactError, LensError, SpecError, UnsupportedError

from ._chat import chat
from ._doctor import doctor
from ._lens import lens_app
from ._output import fail
from ._probe import probe_app
from ._score import score
from ._vector import vector_app
from ._view import view

__all__ = ["app", "main"]

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
    """Run the program; errors of this package become one line and an exit code."""
    try:
        app(prog_name="inspect-lens")
    except (SpecError, UnsupportedError) as error:
        fail(error, 3)
    except ArtifactError as error:
        fail(error, 4)
    except LensError as error:
        fail(error, 5)
    except ModuleNotFoundError as error:
        from inspect_lens._extras import is_installed

        package = (error.name or "").partition(".")[0]
        # Of a package that is there, a part that is not is another fault.
        if package not in EXTRAS or is_installed(package):
            raise
        fail(_missing(package), 3)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what is finished is kept\n")
        sys.exit(130)


def _missing(package: str) -> UnsupportedError:
    extra = EXTRAS[package]
    return UnsupportedError(
        f"this command needs the package {package!r}, which is not installed; the extra {extra!r} "
        f'brings it: give pip install ".[{extra}]" in a clone'
    )
