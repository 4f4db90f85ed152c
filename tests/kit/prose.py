"""Sentence statistics of the documentation: `python -m tests.kit.prose [PAGE …]`.

A page should have sentences of 20 words on average, none of more than 40, and none of the words
that readers stumble over. The report lists pages, the worst first, and then what to change.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .blocks import pages
from .repository import ROOT

MEAN_WORDS = 20.0
LONGEST_WORDS = 40

# Not English, or a riddle to somebody new. `tap` is a term once a page has explained it, so it
# is not here; `arm` and `room` are, as this project used them for other things than arms and rooms.
WITHOUT = re.compile(
    r"\b(?:stands?|beside|nobody|of (?:its|their) own accord|arms?|rooms?|twins?)\b"
    r"|\bso it is(?= since|[.,;])|\belse(?=[.;:]|$)"
    r"|\b(?:without|needs?|has|have|with) leave\b"
    r"|(?-i:^What) [a-z ,]{1,80}\b(?:is|are|was|were|has|have|goes)\b[^?]*$",
    re.IGNORECASE,
)

_GENERATED = re.compile(r"<!-- (\w+): (?:generated|made) .*?<!-- /\1 -->", re.DOTALL)
_FENCE = re.compile(r"^ *```.*?^ *```[ \t]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])(?:\{[^}]*\})?")
_END = re.compile(
    r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*(?:[A-Z0-9`\[]|code\b|vLLM|inspect))|(?<=:)\s*$"
)
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|al|approx|no|Fig|Eq)\.$")


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Sentences of one page, without code, headings and table rules."""

    page: Path
    sentences: tuple[str, ...]

    @property
    def lengths(self) -> list[int]:
        """Words of each sentence."""
        return [len(sentence.split()) for sentence in self.sentences]

    @property
    def mean(self) -> float:
        """Words of a sentence on average; 0 for a page without any."""
        return statistics.fmean(self.lengths) if self.sentences else 0.0

    @property
    def long(self) -> list[str]:
        """Sentences that are too long."""
        return [s for s in self.sentences if len(s.split()) > LONGEST_WORDS]

    @property
    def words(self) -> list[tuple[str, str]]:
        """(word to do without, its sentence)."""
        return [(m.group(), s) for s in self.sentences for m in WITHOUT.finditer(s)]

    @property
    def faults(self) -> int:
        """How much there is to change; 0 is a page in the style of the project."""
        return (self.mean > MEAN_WORDS) * 10 + len(self.long) + len(self.words)


def read_prose(page: Path, *, root: Path = ROOT) -> Prose:
    """Sentences of a page.

    Args:
        page: Markdown file, relative to the root.
        root: root of the repository.
    """
    return Prose(page=page, sentences=tuple(sentences((root / page).read_text(encoding="utf-8"))))


def sentences(markdown: str) -> Iterator[str]:
    """Split Markdown into sentences; a cell of a table and an item of a list end one."""
    text = _FENCE.sub("\n\n", _GENERATED.sub("", markdown))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = _CODE.sub("code", _LINK.sub(r"\1", text))
    for paragraph in _paragraphs(text):
        found = ""
        for piece in _END.split(paragraph):
            found = f"{found} {piece}".strip()
            if not _ABBREVIATION.search(found):
                if len(found.split()) > 1:
                    yield found
                found = ""
        if found:
            yield found


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        is_item = re.match(r"(?:[-*+]|\d+\.) ", bare) is not None
        is_apart = not bare or bare.startswith(("#", "|", ":::", "!!!", "<", "===", "---"))
        if (is_item or is_apart) and lines:
            yield " ".join(lines)
            lines = []
        if bare.startswith("|"):
            yield from (cell.strip() for cell in bare.strip("|").split("|") if cell.strip(" -:"))
        elif not is_apart:
            lines.append(re.sub(r"^(?:[-*+]|\d+\.) ", "", bare))


def report(found: Sequence[Prose], *, in_full: bool = False) -> str:
    """A line per page, the worst first; and what to change, where `in_full`."""
    every = [n for prose in found for n in prose.lengths]
    lines = [f"{'page':40} mean  longest  over {LONGEST_WORDS}  words to do without"]
    for prose in sorted(found, key=lambda p: p.faults, reverse=True):
        if prose.sentences:
            lines.append(
                f"{prose.page!s:40} {prose.mean:4.1f} {max(prose.lengths):8d} {len(prose.long):8d}"
                f"  {len(prose.words)}"
            )
            if in_full:
                lines += [f"    {len(s.split())} words: {s}" for s in prose.long]
                lines += [f"    {word!r}: {s}" for word, s in prose.words]
    good = sum(prose.faults == 0 for prose in found)
    lines.append(
        f"{len(every)} sentences, {statistics.fmean(every or [0]):.1f} words on average; "
        f"{good} of {len(found)} pages have nothing to change"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Report on the pages named, with what to change, or on all."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.prose", description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; all without any")
    named = parser.parse_args(arguments).pages
    prose = [read_prose(page) for page in named or pages()]
    sys.stdout.write(report(prose, in_full=bool(named)) + "\n")


if __name__ == "__main__":
    main()
