"""Files and functions stay readable in one sitting; the largest are printed (`pytest -s`)."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.kit.repository import ROOT, files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

# Larger by decision; each entry has its reason. The list only shrinks.
FILES: dict[str, str] = {}
FUNCTIONS: dict[str, str] = {
    "src/inspect_lens/_engine/tap/kernels/tap_triton.py:_tap": "a kernel is one function",
}


def sources() -> list[Path]:
    rooms = ("src", "benchmarks", "conformance", "evals", "organism", "tests")
    return [p for p in files(".py") if p.parts[0] in rooms]


def file_lines() -> dict[str, int]:
    return {str(p): len((ROOT / p).read_text(encoding="utf-8").splitlines()) for p in sources()}


def function_lines() -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path in sources():
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                # The body, without its docstring: documentation is not size.
                has_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                start = (first.end_lineno or 0) + 1 if has_doc else node.lineno
                sizes[f"{path}:{node.name}"] = (node.end_lineno or 0) - start + 1
    return sizes


def check(sizes: dict[str, int], limit: int, allowed: dict[str, str]) -> None:
    for name in sorted(sizes, key=lambda n: -sizes[n])[:10]:
        print(f"{sizes[name]:5d}  {name}")  # noqa: T201 (growth is to be seen in review)
    over = {name: n for name, n in sizes.items() if n > limit and name not in allowed}
    assert not over, f"more than {limit} lines; split, or allow with a reason: {over}"
    stale = {name for name in allowed if sizes.get(name, 0) <= limit}
    assert not stale, f"no longer over {limit} lines, drop from the list: {stale}"


def test_files() -> None:
    check(file_lines(), MAX_FILE_LINES, FILES)


def test_functions() -> None:
    check(function_lines(), MAX_FUNCTION_LINES, FUNCTIONS)
