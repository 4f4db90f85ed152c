"""Checking the shell commands of the documentation without running them.

A command has to exist and its options have to be known to it. Nothing is installed, started
or downloaded; what is worth running is marked `server` on its page.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import shlex
import tomllib
from collections.abc import Iterator

from .forks import run_python
from .repository import ROOT
from .settings_table import settings_table

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_SERVE = ["vllm", "serve"]
_ASSIGNMENT = re.compile(r"^([A-Z_][A-Z0-9_]*)=")


def commands(script: str) -> Iterator[list[str]]:
    """Words of each command of a script; comments dropped, continued lines joined."""
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check_command(words: list[str]) -> None:
    """Check one command.

    Args:
        words: what `commands` gives.

    Raises:
        AssertionError: program, target, setting, extra or option is not known.
    """
    words = [word for word in words if word != "&"]
    if words[0] == "export":
        words = words[1:]
    while words and (match := _ASSIGNMENT.match(words[0])):
        _check_variable(match[1])
        words = words[1:]
    if not words:
        return
    if words[0] == "make":
        _check_make(words[1:])
    elif words[:2] == ["pip", "install"]:
        _check_install(words[2:])
    elif words[0] == "inspect":
        _check_options(_inspect_help(words[1]), words[2:])
    elif words[0] == "inspect-lens":
        names = [word for word in words[1:3] if not word.startswith("-")]
        _check_options(_lens_help(*names), words[1 + len(names) :])
    elif words[:2] == ["python", "-m"] and words[2] != SERVER_MODULE:
        _check_options(_module_help(words[2]), words[3:])
    elif words[:2] != _SERVE and words[:3] != [
        "python",
        "-m",
        SERVER_MODULE,
    ]:  # its options need vLLM: see check_server
        raise AssertionError(f"{words[0]!r} is not a command that tests/kit/shell.py can check")


def check_server(words: list[str]) -> None:
    """Parse the options of a command that starts a server, with vLLM's own parser.

    Args:
        words: of a command; other commands are accepted.

    Raises:
        AssertionError: the parser refuses the options.
    """
    words = [word for word in words if word != "&"]
    if "serve" in words and words[words.index("serve") - 1 :][:2] == _SERVE:
        options = words[words.index("serve") + 1 :]
    elif SERVER_MODULE in words:
        options = words[words.index(SERVER_MODULE) + 1 :]
    else:
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _server_parser().parse_args(options)
    except SystemExit:
        raise AssertionError(said.getvalue()[-2000:]) from None


@functools.cache
def _server_parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before vLLM 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def _check_variable(name: str) -> None:
    ours = {row[0] for row in settings_table()}
    assert not name.startswith("INSPECT_LENS_") or name in ours, f"no setting {name}"


def make_targets() -> set[str]:
    """Names that `make` takes."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _check_make(words: list[str]) -> None:
    for word in words:
        assert _ASSIGNMENT.match(word) or word in make_targets(), f"make has no target {word!r}"


def _check_install(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        match = re.fullmatch(r"(?:inspect-lens|\.)(?:\[([\w,]+)\])?", word)
        assert match or word == "-e", f"pip install {word!r}: not this package"
        for extra in (match[1] if match and match[1] else "").split(","):
            assert not extra or extra in project["optional-dependencies"], f"no extra {extra!r}"


def _check_options(text: str, words: list[str]) -> None:
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
            known = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)
            assert known, f"option {option!r} is not in the help of the command"


def _inspect_help(command: str) -> str:
    return _module_help("inspect_ai", command)


def _lens_help(*names: str) -> str:
    return _module_help("inspect_lens._cli", *names)


@functools.cache
def _module_help(module: str, *words: str) -> str:
    run = run_python("-m", module, *words, "--help")
    assert run.returncode == 0, f"{module} {words}: {run.stdout[-2000:]}"
    return run.stdout
