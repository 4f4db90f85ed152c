"""Code blocks of the documentation, and the marks above them that say how they are tested."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

from .repository import ROOT

Mode = Literal["run", "engine", "server", "agent", "skip"]
"""`run`: needs nothing; `engine`: uses the session's `LLM`; `server`: uses the session's
server; `agent`: uses the server of the agent in `tests/e2e/test_organism_agent.py`; `skip`: not
run, with a reason."""

LANGUAGES = ("python", "bash")
# Shown, not run: output, diagrams, configuration that another test reads.
INERT = ("console", "json", "mermaid", "text", "toml", "yaml")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>\S.*)?$")
_TITLE = re.compile(r'title="([^"]+)"')
_OUTPUT = "<!-- output -->"
_MARK = re.compile(r"^\s*<!-- test: (?P<mode>\w+)(?: (?P<reason>.+?))? -->\s*$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    code: str
    mode: Mode = "run"
    reason: str = ""
    title: str = ""
    """File that the block is the content of, as in ```` ```python title="task.py" ````."""
    output: str = ""
    """What it prints: the `text` block with the mark `<!-- output -->` behind it."""

    @property
    def where(self) -> str:
        """`page:line`, for messages."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README and the pages of the documentation, relative to the root."""
    return [Path("README.md"), *sorted(p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md"))]


def read_blocks(page: Path, *, root: Path = ROOT) -> list[Block]:
    """Blocks of a page that are code, in order.

    Args:
        page: Markdown file, relative to the root.
        root: root of the repository.

    Returns:
        Blocks in a language that is run.

    Raises:
        ValueError: a block without a language or in one that nobody checks, a mark that is
            not known, or a skip without a reason.
    """
    return parse_blocks((root / page).read_text(encoding="utf-8").splitlines(), page)


def parse_blocks(lines: list[str], page: Path, *, first_line: int = 1) -> list[Block]:
    """Blocks of some lines of a file, as `read_blocks` gives them.

    Args:
        lines: Markdown.
        page: the file, relative to the root.
        first_line: number of the first of the lines in the file.

    Returns:
        Blocks in a language that is run.

    Raises:
        ValueError: as for `read_blocks`.
    """
    blocks: list[Block] = []
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        start, indent = number, len(fence["indent"])
        while lines[number].strip() != "```":
            number += 1
        body = "\n".join(line[indent:] for line in lines[start:number])
        number += 1
        above = lines[start - 2] if start > 1 else ""
        if above.strip() == _OUTPUT:
            if not blocks:
                raise ValueError(f"{page}:{start}: an output without a block before it")
            blocks[-1] = replace(blocks[-1], output=body)
            continue
        block = _block(page, start + first_line - 1, fence["info"] or "", body, above)
        if block is not None:
            blocks.append(block)
    return blocks


def _block(page: Path, line: int, info: str, code: str, above: str) -> Block | None:
    language = info.split(" ")[0]
    mark = _MARK.match(above)
    if language in INERT and mark is None:
        return None
    if language not in LANGUAGES:
        raise ValueError(
            f"{page}:{line}: block in {language or 'no language'!r}; run are "
            f"{', '.join(LANGUAGES)}, only shown are {', '.join(INERT)}"
        )
    mode, reason = (mark["mode"], mark["reason"] or "") if mark else ("run", "")
    if mode not in get_args(Mode):
        raise ValueError(f"{page}:{line}: mark {mode!r}; known are {', '.join(get_args(Mode))}")
    if (mode == "skip") != bool(reason):
        raise ValueError(f"{page}:{line}: a skip has a reason, and nothing else has one")
    title = _TITLE.search(info)
    return Block(
        page=page, line=line, language=language, code=code + "\n", mode=cast("Mode", mode),
        reason=reason, title=title[1] if title else "",
    )  # fmt: skip
