"""The page of errors quotes messages that exist, and knows every setting that a message names."""

from __future__ import annotations

import ast
import re
from functools import cache

from inspect_lens import errors
from tests.kit.repository import ROOT
from tests.kit.settings_table import settings_table

PAGE = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
FIRST = re.findall(r"^\| ([^|]*`[^|]*) \|", PAGE, re.MULTILINE)
# Words of Inspect and of commands; everything else in the first column is part of a message.
NOT_MESSAGES = {
    "recall_at_fpr", "inspect score", "HookError", "No package metadata was found for vllm",
    "vllm serve",
}  # fmt: skip
QUOTES = sorted({q for cell in FIRST for q in re.findall(r"`([^`]+)`", cell)} - NOT_MESSAGES)


@cache
def source() -> str:
    """Every text of the package, without the quotes and line ends that cut a message in two."""
    texts = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts += [
            _text(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)
        ]
    return "\n".join(texts)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


def test_quoted_messages_exist() -> None:
    assert [quote for quote in QUOTES if quote not in source()] == []


def test_there_are_many_and_each_is_there_once() -> None:
    cells = re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)
    assert len(QUOTES) >= 35
    assert len(cells) == len(set(cells))


def test_every_kind_of_error_has_its_section() -> None:
    kinds = {name for name in errors.__all__ if name[0].isupper()} - {"LensError"}
    assert {kind for kind in kinds if f"`{kind}`" not in PAGE} == set()


def test_every_setting_on_the_page_exists() -> None:
    known = {name for name, *_ in settings_table()}
    assert set(re.findall(r"INSPECT_LENS_[A-Z_]+", PAGE)) <= known


def test_settings_that_messages_say_to_raise_are_on_the_page() -> None:
    told = set(re.findall(r"\b(?:raise|set|with|lower) (INSPECT_LENS_[A-Z_]+)", source()))
    assert len(told) >= 8
    assert {name for name in told if name not in PAGE} == set()
