"""The commands of `inspect-lens`, found in the program itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import click
import typer.main

from inspect_lens._cli._main import app, main

__all__ = ["commands", "run_command"]


def commands() -> dict[str, click.Command]:
    """Every command that does something, by its words."""
    program: Any = typer.main.get_command(app)
    return dict(_leaves(program, ""))


def run_command(words: str, *arguments: str) -> int:
    """Run a command in this process as the program does; its exit code."""
    with patch.object(sys, "argv", ["inspect-lens", *words.split(), *arguments]):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def _leaves(command: click.Command, words: str) -> Iterator[tuple[str, click.Command]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, one in inner.items():
        yield from _leaves(one, f"{words} {name}".strip())
