"""Files made from code and results: tables of pages, figures, notebooks, schema snapshots.

`python -m tests.kit.generated` writes them; `tests/text/test_generated.py` compares.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import IsInstanceSchema, ModelSchema

from benchmarks import plots
from gallery import replication_files, replications_markdown
from inspect_lens import LensRequest, Receipt
from inspect_lens._cli import app
from inspect_lens._engine.protocol.readouts import LAG
from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, PATCHES, SERVER_PATCHES
from inspect_lens._vllm.telemetry import ATTRIBUTES, METRICS
from inspect_lens.spec import EDITS, REDUCTIONS, SITE_TABLE, EditBase, Reduction, result_name

from .coverage import coverage_markdown
from .figures import figure_files
from .gallery import oracles_markdown, probes_markdown
from .model_results import architectures_markdown, quantised_markdown, real_models_markdown
from .notebooks import notebook_files
from .repository import ROOT
from .settings_table import settings_table
from .start_pages import findings_markdown, layouts_markdown, walks_markdown

COMMAND = "python -m tests.kit.generated"


class _Schema(GenerateJsonSchema):
    """JSON schema that shows a foreign class, such as an array, by its name."""

    def is_instance_schema(self, schema: IsInstanceSchema) -> JsonSchemaValue:
        """An instance of a class that pydantic cannot describe."""
        return {"type": "object", "title": schema["cls"].__name__}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """A model without the example in its docstring, which is no part of a wire format."""
        made = super().model_schema(schema)
        if "description" in made:
            made["description"] = made["description"].partition("\n\nExample:")[0]
        return made


def settings_markdown() -> str:
    """The table of settings."""
    rows = ["| variable, type, default | meaning |", "|---|---|"]
    rows += [
        f"| `{name}`<br>{kind}, `{default}` | {meaning} |"
        for name, kind, default, meaning in settings_table()
    ]
    return "\n".join(rows)


def patches_markdown() -> str:
    """The table of vLLM's names that are wrapped."""
    rows = ["| name in vLLM | process | why |", "|---|---|---|"]
    rows += [
        f"| `{patch.target.replace(':', '.')}` | {patch.process} | {patch.reason} |"
        for patch in (*PATCHES, *SERVER_PATCHES, *EAGER_PATCHES)
    ]
    return "\n".join(rows)


def reductions_markdown() -> str:
    """The table of reductions."""
    rows = ["| `reduce` | shape of the result | what it is |", "|---|---|---|"]
    rows += [f"| `{one.name}` | {one.shape} | {one.summary} |" for one in REDUCTIONS.values()]
    return "\n".join(rows)


def sent_markdown() -> str:
    """What leaves the device of each reduction, in bytes per tapped layer."""
    rows = [
        "| `reduce` | prompt tokens of a step | each sampled token | at the end of the request |",
        "|---|---|---|---|",
    ]
    for one in REDUCTIONS.values():

        def numbers(n: int, one: Reduction = one) -> str:
            n, is_sum = n * one.columns(1), one.combine == "sum"
            letters = " ".join(["c"] * (not is_sum) + ["h"] * (one.width is None))
            return f"{4 * n if is_sum else n} *{letters}*".removeprefix("1 ")

        each = numbers(1)
        is_one = one.combine is not None or one.picks_last
        prompt = each if one.combine else f"{each}, of the last token only" if is_one else ""
        grows = is_one and not one.makes_numbers
        sampled, end = (f"0, or {each}", numbers(LAG + 1)) if grows else (each, "nothing")
        rows.append(f"| `{one.name}` | {prompt or f'{each} per token'} | {sampled} | {end} |")
    return "\n".join(rows)


def sites_markdown() -> str:
    """The table of sites."""
    rows = ["| site | what it is | name of the result |", "|---|---|---|"]
    rows += [f"| `{s}` | {info.what} | `{result_name(s)}` |" for s, info in SITE_TABLE.items()]
    return "\n".join(rows)


def edits_markdown() -> str:
    """The table of edits: first sentences of their docstrings, and their fields."""
    rows = ["| operation | what becomes of `h` | fields |", "|---|---|---|"]
    for kind in sorted(EDITS.values(), key=lambda kind: kind.__module__):
        own = [name for name in kind.model_fields if name not in {"op", *EditBase.model_fields}]
        link = f"[`{kind.__name__}`](../reference/requests.md#inspect_lens.spec.{kind.__name__})"
        fields = ", ".join(f"`{name}`" for name in own)
        rows.append(f"| {link} | {_first_sentence(kind)} | {fields} |".replace("|  |", "| |"))
    return "\n".join(rows)


def _first_sentence(kind: type) -> str:
    """Of a docstring."""
    text = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", text)[0].rstrip(".")


def metrics_markdown() -> str:
    """The table of metrics."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.doc} |"
        for m in METRICS
    ]
    return "\n".join(rows)


def traces_markdown() -> str:
    """The table of attributes of spans."""
    rows = ["| attribute | meaning |", "|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {meaning} |" for name, meaning in ATTRIBUTES.items()])


def evals_markdown() -> str:
    """The table of evals."""
    rows = [
        "| eval | what it asks | data | source | try it offline with |",
        "|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "evals").glob("*/eval.yaml")):
        facts = yaml.safe_load(path.read_text(encoding="utf-8"))
        extra = facts.get("metadata") or {}
        name = path.parent.name
        own = name.startswith("organism_")
        source = f"[paper]({facts['arxiv']})" if facts.get("arxiv") else "this repository"
        twin = extra.get("offline_twin")
        rows.append(
            f"| `{name}` | {facts['title'].rstrip('.')} | "
            f"{'built in' if own else extra.get('data', 'built in')} | "
            f"{source} | {f'`{twin}`' if twin else 'runs offline' if own else 'none'} |"
        )
    return "\n".join(rows)


def cli_markdown() -> str:
    """The commands, with the options that their parser knows."""
    return "\n\n".join(_commands(typer.main.get_command(app), "inspect-lens"))


def _commands(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for below, found in command.commands.items():
            yield from _commands(found, f"{name} {below}")
        return
    shown = " ".join(_cell(p) for p in command.params if p.param_type_name == "argument")
    yield f"## {name.removeprefix('inspect-lens ')}\n\n{(command.help or '').strip()}"
    yield f"```text\n{name} {shown} [OPTIONS]".replace("  ", " ") + "\n```"
    rows = ["| option | default | meaning |", "|---|---|---|"]
    kinds = get_type_hints(inspect.unwrap(command.callback))
    for option in command.params:
        if option.param_type_name == "option":
            default = "required" if option.required else _default(option.default)
            # The help of some options lists their words, because the shell does not.
            words = "" if option.metavar else _choices(kinds[option.name])
            rows.append(f"| `{option.opts[0]}` | {default} | {option.help}{words} |")
    yield "\n".join(rows)
    lines = command.epilog.splitlines()[2:]
    yield "\n".join(["```bash", *(line.removeprefix("  ") for line in lines), "```"])


def _choices(kind: Any) -> str:
    """The words that an option takes, where its type lists them."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        words = [one.value for one in kind]
    elif get_origin(kind) is Literal:
        words = [str(one) for one in get_args(kind)]
    else:
        return next(filter(None, map(_choices, get_args(kind))), "")
    return f" One of {', '.join(f'`{word}`' for word in words)}."


def _cell(argument: Any) -> str:
    return f"{argument.name.upper()}{' ...' if argument.nargs == -1 else ''}"


def _default(value: Any) -> str:
    return "" if value in ("", None, False, True) else f"`{value}`"


@functools.cache
def generated_files() -> dict[str, str]:
    """What each generated file should hold, by path from the root."""
    content: dict[str, str] = {}
    for path, part, text in (
        ("README.md", "costs", plots.costs_markdown(short=True)),
        ("README.md", "findings", findings_markdown()),
        ("docs/first-model.md", "walk", plots.walk_markdown()),
        ("docs/compare.md", "peers", plots.peers_markdown()),
        ("docs/install.md", "walks", walks_markdown()),
        ("docs/benchmarks.md", "costs", plots.costs_markdown()),
        ("docs/measurements.md", "evals", plots.evals_markdown()),
        ("docs/measurements.md", "techniques", plots.techniques_markdown()),
        ("docs/measurements.md", "large", plots.large_models_markdown()),
        ("docs/how-to/settings.md", "settings", settings_markdown()),
        ("docs/reference/compatibility.md", "monkeypatches", patches_markdown()),
        ("docs/models.md", "architectures", architectures_markdown()),
        ("docs/models.md", "quantised", quantised_markdown()),
        ("docs/models.md", "real-models", real_models_markdown()),
        ("docs/models.md", "layouts", layouts_markdown()),
        ("docs/how-to/capture.md", "sites", sites_markdown()),
        ("docs/how-to/capture.md", "reductions", reductions_markdown()),
        ("docs/how-to/capture.md", "sent", sent_markdown()),
        ("docs/how-to/steer.md", "edits", edits_markdown()),
        ("docs/how-to/serve.md", "metrics", metrics_markdown()),
        ("docs/how-to/serve.md", "traces", traces_markdown()),
        ("docs/evals.md", "evals", evals_markdown()),
        ("docs/reference/cli.md", "cli", cli_markdown()),
        ("docs/evals.md", "probes", probes_markdown()),
        ("docs/evals.md", "oracles", oracles_markdown()),
        ("docs/replications.md", "replications", replications_markdown()),
        ("docs/coverage.md", "coverage", coverage_markdown()),
    ):
        page = content.get(path) or (ROOT / path).read_text(encoding="utf-8")
        content[path] = _between(page, path, part, text)
    content |= {str(path.relative_to(ROOT)): text for path, text in _packages()}
    for model in (LensRequest, Receipt):
        schema = json.dumps(
            model.model_json_schema(schema_generator=_Schema), indent=2, sort_keys=True
        )
        content[f"tests/contracts/schema/{model.__name__}.json"] = schema + "\n"
    figures = {f"docs/assets/{name}": made for name, made in plots.figure_files().items()}
    replications = replication_files()
    return content | figures | figure_files() | notebook_files() | replications


def _packages() -> Iterator[tuple[Path, str]]:
    """Packages that export what their files list, with a line for each such file."""
    for path in sorted((ROOT / "src").glob("*/*/__init__.py")):
        text = path.read_text(encoding="utf-8")
        if "import *\n" in text:
            lines = [
                f"from .{'.'.join(file.relative_to(path.parent).with_suffix('').parts)} import *\n"
                for file in sorted(path.parent.rglob("_[a-z]*.py"))
                if file.name != "_host.py"  # which lists names of Inspect
                and "\n__all__ = [" in file.read_text(encoding="utf-8")
            ]
            yield path, re.sub(r"(?:from \.\S+ import \*\n)+", "".join(lines), text)


def _between(page: str, path: str, part: str, text: str) -> str:
    """The page with what is between `<!-- part: … -->` and `<!-- /part -->` replaced."""
    made, n = re.subn(
        rf"(<!-- {part}: [^\n]*-->\n).*?(<!-- /{part} -->)",
        lambda match: f"{match[1]}{text}\n{match[2]}",
        page,
        flags=re.DOTALL,
    )
    if n != 1:
        raise ValueError(f"{path}: the marks around the generated part {part!r} are gone")
    return made


def main() -> None:
    """Write what is not current."""
    for path, content in generated_files().items():
        target = ROOT / path
        if not target.exists() or target.read_text(encoding="utf-8") != content:
            target.parent.mkdir(exist_ok=True)
            target.write_text(content, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
