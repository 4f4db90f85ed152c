"""Lengths of sentences in the documentation: `python -m tests.kit.prose [PAGE …]`.

A page is judged by reading it aloud. This only points at pages to read first: those whose sentences
have fewer than 12 or more than 20 words on average, or of which more than a quarter are clipped.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .blocks import pages
from .repository import ROOT

MEAN_WORDS = (12.0, 20.0)
SHORT_WORDS, SHORT_SHARE = 7, 0.25
"""Sentences of fewer words are short; no more than this share of a page should be."""

_GENERATED = re.compile(r"<!-- (\w+): (?:generated|made) .*?<!-- /\1 -->", re.DOTALL)
_FENCE = re.compile(r"^ *```.*?^ *```[ \t]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])(?:\{[^}]*\})?")
_END = re.compile(
    r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*(?:[A-Z0-9`\[]|code\b|vLLM|inspect))|(?<=:)\s*$"
)
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|al|approx|no|Fig|Eq)\.$")


def sentences(markdown: str) -> Iterator[str]:
    """Sentences of the running text: no code, headings, tables, or text that a script made."""
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
    """Paragraphs and items of lists, each in one line."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        is_item = re.match(r"(?:[-*+]|\d+\.) ", bare) is not None
        is_apart = not bare or bare.startswith(("#", "|", ":::", "!!!", "<", "===", "---"))
        if (is_item or is_apart) and lines:
            yield " ".join(lines)
            lines = []
        if not is_apart:
            lines.append(re.sub(r"^(?:[-*+]|\d+\.) ", "", bare))


def main(arguments: Sequence[str] | None = None) -> None:
    """Report on the pages named, or on all; what to read first has a star."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.prose", description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; all without any")
    named = parser.parse_args(arguments).pages
    sys.stdout.write(f"  {'page':40} sentences  mean  below {SHORT_WORDS} words\n")
    for page in named or pages():
        found = list(sentences((ROOT / page).read_text(encoding="utf-8")))
        lengths = [len(sentence.split()) for sentence in found]
        if not lengths:
            continue
        mean = statistics.fmean(lengths)
        short = sum(n < SHORT_WORDS for n in lengths) / len(lengths)
        is_odd = not MEAN_WORDS[0] <= mean <= MEAN_WORDS[1] or short > SHORT_SHARE
        star = "*" if is_odd else " "
        sys.stdout.write(f"{star} {page!s:40} {len(lengths):9d} {mean:5.1f} {short:7.0%}\n")
        if named:
            sys.stdout.writelines(f"    {n:3d}  {s}\n" for n, s in zip(lengths, found, strict=True))


if __name__ == "__main__":
    main()
