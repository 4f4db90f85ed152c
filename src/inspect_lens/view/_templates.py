"""The HTML of every page: templates in `assets/`, in which all text is escaped."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """Fill in a template of `assets/`; every value that it names has to be given."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    loader = PackageLoader("inspect_lens.view", "assets")
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    # Facts of a page; jinja2 writes "<" in them so that nothing can end their element.
    made.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"), "ensure_ascii": False, "allow_nan": False
    }  # fmt: skip
    # Style sheets and scripts of ours, as they are.
    made.globals["asset"] = lambda name: Markup(loader.get_source(made, name)[0])
    made.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return made
