"""One HTML file with everything in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

__all__ = ["fill", "json_of", "render_page", "script_of", "style_of"]

# In the order in which they build on each other; joined into one script.
_SCRIPTS: Final = ("parts.js", "data.js", "scale.js", "list.js", "tokens.js", "strip.js", "app.js")


def render_page(facts: Mapping[str, Any], blocks: Sequence[str]) -> str:
    """Render a page.

    Args:
        facts: what stands in the page as JSON: log, series, samples, table of tokens.
        blocks: of the samples, in the same order.

    Returns:
        HTML that needs no other file and no network.
    """
    parts = {
        "title": escape(str(facts["log"]["task"])),
        "style": _asset("page.css"),
        "facts": json_of(facts),
        "blocks": "\n".join(blocks),
        "script": script_of(_SCRIPTS),
    }
    return fill("page.html", parts)


def fill(name: str, parts: Mapping[str, str]) -> str:
    """An HTML file of the assets with its marks filled in.

    Args:
        name: of the file.
        parts: text by mark.
    """
    page = _asset(name)
    for mark, text in parts.items():
        before, found, after = page.partition(f"<!--{mark}-->")
        if not found:
            raise ValueError(f"{name}: the mark <!--{mark}--> is gone")
        page = before + text + after
    return page


def json_of(facts: Mapping[str, Any]) -> str:
    """Facts as JSON inside a script element, where only "<" can end it."""
    data = json.dumps(facts, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return data.replace("<", "\\u003c")


def script_of(names: Sequence[str]) -> str:
    """Scripts that build on each other, as one."""
    code = "\n".join(_asset(name) for name in names)
    return f'"use strict";\n(() => {{\n{code}\n}})();'


def style_of(names: Sequence[str]) -> str:
    """Style sheets, one behind the other."""
    return "\n".join(_asset(name) for name in names)


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
