"""A page of a replication, made of its result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gallery._chart import draw
from gallery._replication import RESULTS, Replication, Table
from gallery.replications import REPLICATIONS
from tests.kit.figures._canvas import PALETTES

__all__ = ["PAGES", "page", "replication_files", "replication_link", "replications_markdown"]

PAGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "lies": ("Lies, and a judge of them", ("lies", "agent", "cascade")),
    "directions": ("Directions of truth, concepts, refusal and mood",
                   ("truth", "concepts", "refusal", "steering")),
    "mechanisms": ("Attention, languages and facts", ("injection", "languages", "fact")),
}  # fmt: skip
"""Pages of the documentation by file: the heading, and the replications on it."""


def page(name: str, about: Replication, result: dict[str, Any], *, figures: str, made: str) -> str:
    """The page as Markdown.

    Args:
        name: of the replication.
        about: it.
        result: what the command wrote.
        figures: folder of the figures, from where the page is.
        made: by which command, and of which file.
    """
    shown = about.show(result["numbers"])
    parts = [
        f"# {about.title}",
        f"<!-- Made by {made}. -->",
        f"**{result['model']}: {shown.verdict}**",
        *(
            f"![{shown.chart.title}]({figures}/replication-{name}-{p}.svg#only-{p})"
            for p in ("light", "dark")
        ),
        "## What the paper has",
        f"[{about.paper}](https://arxiv.org/abs/{about.arxiv}). {about.published}",
        "## What is done here",
        about.method,
        *(_table(table) for table in shown.tables),
        "## Run it",
        _command(about, result),
        "## What it does not show",
        about.limits,
        _origin(result),
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    head = f"| {' | '.join(table.columns)} |\n{'|---' * len(table.columns)}|"
    rows = "\n".join(f"| {' | '.join(row)} |" for row in table.rows)
    return f"{table.title}\n\n{head}\n{rows}"


def _command(about: Replication, result: dict[str, Any]) -> str:
    said = f"It took {result['seconds']} seconds."
    said += f" {result['note']}" if result.get("note") else ""
    text = f"In a clone, after `make env`:\n\n```text\n{result['command']}\n```\n\n{said}"
    if not about.files:
        return f"{text} Nothing but the model is downloaded."
    rows = [[f"`{f.name}`", f.source, f.licence] for f in about.files]
    need = "`FOLDER` has these files, at any depth; they are not part of this package:"
    return f"{text}\n\n" + _table(Table(need, ["file", "from", "licence"], rows))


def _origin(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result["environment"].items() if k != "machine")
    weights = f"The weights are {result['weights']} (fingerprint `{result['sha256']}`), "
    return f"{weights}so the original checkpoint may give other numbers. Made with {versions}."


def _results() -> dict[str, dict[str, Any]]:
    """What is committed, in the order of the gallery."""
    files = {name: RESULTS / f"{name}.json" for name in REPLICATIONS}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.is_file()
    }


def replication_files() -> dict[str, str]:
    """Pages and figures of the documentation, by path from the root."""
    made = {}
    results = _results()
    for file, (title, names) in PAGES.items():
        parts = [f"# {title}\n"]
        for name in names:
            text = page(
                name, REPLICATIONS[name], results[name], figures="../assets",
                made=f"`python -m tests.kit.generated` of gallery/results/{name}.json",
            )  # fmt: skip
            parts.append(re.sub(r"^#", "##", text, flags=re.MULTILINE))
        made[f"docs/replications/{file}.md"] = "\n".join(parts)
    for name, result in results.items():
        chart = REPLICATIONS[name].show(result["numbers"]).chart
        for palette in PALETTES:
            made[f"docs/assets/replication-{name}-{palette}.svg"] = draw(chart, palette)
    return made


def replication_link(name: str) -> str:
    """Where a replication is described, from the folder `docs`."""
    (file,) = (file for file, (_, names) in PAGES.items() if name in names)
    anchor = re.sub(r"[^\w\s-]", "", REPLICATIONS[name].title).lower().replace(" ", "-")
    return f"replications/{file}.md#{anchor}"


def replications_markdown() -> str:
    """The table of replications."""
    rows = ["| replication | model | what came out |", "|---|---|---|"]
    for name, result in _results().items():
        about = REPLICATIONS[name]
        said = about.show(result["numbers"]).verdict
        said = said[0].upper() + said[1:]
        rows.append(f"| [{about.title}]({replication_link(name)}) | {result['model']} | {said} |")
    return "\n".join(rows)
