"""A page of a replication, made of its result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gallery._chart import draw
from gallery._replication import RESULTS, Replication, Table, stem
from gallery.replications import REPLICATIONS
from inspect_lens._base.artifact import markdown_cell
from tests.kit.figures._canvas import PALETTES

__all__ = ["PAGES", "page", "replication_files", "replication_link", "replications_markdown"]

PAGES: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "lies": (
        "Lies, and a judge of them",
        "This page shows how far a probe for lies carries. You see whether one that learned lies "
        "told under orders also finds lies told in a role and denials of a secret. Then a probe "
        "has to stop false tool calls before the tool runs, and at the end a second model judges "
        "the cases that a probe is unsure of.",
        ("lies", "agent", "cascade"),
    ),
    "directions": (
        "Directions of truth, concepts, refusal and mood",
        "Many papers find that a model keeps a property, such as the truth of a statement or the "
        "wish to refuse, as one direction of its activations. This page shows which of their "
        "results appear in models that are small enough for a laptop.",
        ("truth", "concepts", "refusal", "steering"),
    ),
    "mechanisms": (
        "Attention, languages and facts",
        "This page repeats three results about how a model works: what attention shows of a prompt "
        "injection, which language a model passes through in its middle layers, and where it "
        "keeps a fact. So it also shows what reading attention, a lens and patching can tell you "
        "about a small model.",
        ("injection", "languages", "fact"),
    ),
}
"""Pages of the documentation by file: the heading, what one reads it for, and its replications."""


def page(
    name: str, about: Replication, results: Mapping[str, dict[str, Any]], *, figures: str, made: str
) -> str:
    """The page as Markdown.

    Args:
        name: of the replication.
        about: it.
        results: what the command wrote, by model.
        figures: folder of the figures, from where the page is.
        made: by which command, and of which file.
    """
    shown = {model: about.show(result["numbers"]) for model, result in results.items()}
    parts = [f"# {about.title}", f"<!-- Made by {made}. -->"]
    for model, result in results.items():
        parts.append(f"**{result['model']}.** {_sentence(shown[model].verdict)}")
        parts += [
            f"![{shown[model].chart.title}, {result['model']}]"
            f"({figures}/replication-{stem(name, about, model)}-{p}.svg#only-{p})"
            for p in ("light", "dark")
        ]
    parts += [
        "## What the paper has",
        f"[{about.paper}](https://arxiv.org/abs/{about.arxiv}). {about.published}",
        "## What is done here",
        about.method,
    ]
    tables = {model: [_table(table) for table in shown[model].tables] for model in results}
    if about.compare and len(results) > 1:
        by_title = {result["model"]: result["numbers"] for result in results.values()}
        parts += [_table(table) for table in about.compare(by_title)]
        parts += [_folded(f"All tables of {results[m]['model']}", own) for m, own in tables.items()]
    else:
        parts += [table for own in tables.values() for table in own]
    parts += [
        "## Run it",
        _command(about, list(results.values())),
        "## What it does not show",
        about.limits,
        *map(_origin, results.values()),
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    head = f"| {' | '.join(table.columns)} |\n{'|---' * len(table.columns)}|"
    rows = "\n".join(f"| {' | '.join(map(markdown_cell, row))} |" for row in table.rows)
    return f"{table.title}\n\n{head}\n{rows}"


def _folded(summary: str, parts: Sequence[str]) -> str:
    inside = "\n\n".join(parts)
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{inside}\n\n</details>'


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _command(about: Replication, results: Sequence[dict[str, Any]]) -> str:
    text = "In a clone, after `make env`:"
    for result in results:
        text += f"\n\n```text\n{result['command']}\n```\n\nIt took {result['seconds']} seconds."
        text += f" {result['note']}" if result.get("note") else ""
    if not about.files:
        return f"{text} Nothing but the model is downloaded."
    rows = [[f"`{f.name}`", f.source, f.licence] for f in about.files]
    need = "`FOLDER` has these files, at any depth; they are not part of this package:"
    return f"{text}\n\n" + _table(Table(need, ["file", "from", "licence"], rows))


def _origin(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result["environment"].items() if k != "machine")
    weights = f"The weights of {result['model']} are {result['weights']} (fingerprint "
    weights += f"`{result['sha256']}`), "
    return f"{weights}so the original checkpoint may give other numbers. Made with {versions}."


def _results() -> dict[str, dict[str, dict[str, Any]]]:
    """What is committed, by replication and model, in the order of the gallery."""
    return {
        name: {
            model: json.loads(file.read_text(encoding="utf-8"))
            for model in sorted(about.models, key=lambda one: one != about.model)
            if (file := RESULTS / f"{stem(name, about, model)}.json").is_file()
        }
        for name, about in REPLICATIONS.items()
    }


def replication_files() -> dict[str, str]:
    """Pages and figures of the documentation, by path from the root."""
    made = {}
    results = _results()
    for file, (title, opening, names) in PAGES.items():
        parts = [f"# {title}\n\n{opening}\n"]
        for name in names:
            about, own = REPLICATIONS[name], results[name]
            files = " and ".join(f"gallery/results/{stem(name, about, m)}.json" for m in own)
            text = page(
                name, about, own, figures="../assets",
                made=f"`python -m tests.kit.generated` of {files}",
            )  # fmt: skip
            parts.append(re.sub(r"^#", "##", text, flags=re.MULTILINE))
        made[f"docs/replications/{file}.md"] = "\n".join(parts)
    for name, own in results.items():
        about = REPLICATIONS[name]
        for model, result in own.items():
            chart = about.show(result["numbers"]).chart
            for palette in PALETTES:
                figure = f"replication-{stem(name, about, model)}-{palette}.svg"
                made[f"docs/assets/{figure}"] = draw(chart, palette)
    return made


def replication_link(name: str) -> str:
    """Where a replication is described, from the folder `docs`."""
    (file,) = (file for file, (*_, names) in PAGES.items() if name in names)
    anchor = re.sub(r"[^\w\s-]", "", REPLICATIONS[name].title).lower().replace(" ", "-")
    return f"replications/{file}.md#{anchor}"


def replications_markdown() -> str:
    """The table of replications."""
    rows = ["| replication | model | what came out |", "|---|---|---|"]
    for name, results in _results().items():
        about = REPLICATIONS[name]
        for result in results.values():
            said = _sentence(about.show(result["numbers"]).verdict)
            link = f"[{about.title}]({replication_link(name)})"
            rows.append(f"| {link} | {result['model']} | {said} |")
    return "\n".join(rows)
