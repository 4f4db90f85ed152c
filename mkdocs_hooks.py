"""Hooks of MkDocs: repository links, the changelog, where code breaks, labels, and `llms.txt`.

`llms.txt` lists the pages in the order of the navigation, in the form of llmstxt.org.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

from inspect_lens.reading._shared import complete_arguments

_LOG = logging.getLogger("mkdocs.hooks.inspect_lens")
_PAGES: list[tuple[str, str]] = []
# Characters up to which the value of a constant is shown.
_SHORT_VALUE = 400
# Characters up to which a word of code stays on one line; a telephone shows about 40.
_ONE_LINE = 30

# A page that is heavier is slow on a telephone; it fails a strict build.
_MOST_BYTES = 700_000
# Where names are used; coverage names everything once, and so says nothing of use.
_SHOWN_IN = ("README.md", "docs/*.md", "docs/how-to/*.md", "evals/*/*.py")
_NOT_USE = {"coverage.md", "changelog.md"}
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z`*])")


class PublicObjects(griffe.Extension):
    """What pages of the reference show of objects: their text, their summary, their order."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the whole first sentence on the first line, which is all that a summary shows."""
        if obj.docstring is not None:
            first, gap, rest = obj.docstring.value.partition("\n\n")
            if not first.startswith(("    ", "- ", "|")):
                sentences = _SENTENCE_END.split(" ".join(first.split()))
                obj.docstring.value = "\n".join(sentences) + gap + rest

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Show what the description of a field says, and no value of a table, which is source."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "Field":
            given = {
                one.name: one.value
                for one in attr.value.arguments
                if isinstance(one, griffe.ExprKeyword)
            }
            if attr.docstring is None and "description" in given:
                attr.docstring = griffe.Docstring(_description(attr), parent=attr)
            if "default_factory" not in given:
                attr.value = given.get("default")
        if len(str(attr.value)) > _SHORT_VALUE:
            attr.value = None
        attr.labels -= {"instance-attribute", "class-attribute", "module-attribute"}

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Order what packages export by use: names that more pages and evals use come first."""
        root = Path(__file__).parent
        pages = [page for pattern in _SHOWN_IN for page in root.glob(pattern)]
        uses = Counter(
            word
            for page in pages
            if page.name not in _NOT_USE
            for word in set(re.findall(r"\w+", page.read_text(encoding="utf-8")))
        )
        for module in (pkg, *_modules_below(pkg)):
            if module.exports == []:  # made of those of its files, when it is imported
                module.exports = list(import_module(module.path).__all__)
            if module.exports:
                module.exports = sorted(map(str, module.exports), key=lambda n: (-uses[n], n))

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Put in the text of shared parameters, as `shared_parameters` does at run time."""
        names = [str(one.value).rpartition(".")[2] for one in func.decorators]
        if "shared_parameters" in names and func.docstring is not None:
            parameters = [one.name for one in func.parameters]
            func.docstring.value = complete_arguments(func.docstring.value, parameters)


def _description(attr: griffe.Attribute) -> str:
    """Of a field, which may be worked out; see `pydantic.Field`."""
    owner = getattr(import_module(attr.module.path), attr.path.split(".")[-2])
    return str(owner.model_fields[attr.name].description)


def _modules_below(module: griffe.Module) -> Iterator[griffe.Module]:
    for below in module.modules.values():
        if isinstance(below, griffe.Module):
            yield below
            yield from _modules_below(below)


def on_config(config: Any) -> Any:
    """Link repository and issues, where the build was told where they are."""
    _PAGES.clear()
    if config.repo_url:
        config.extra["social"] = [
            {"icon": "fontawesome/brands/github", "link": config.repo_url, "name": "Repository"},
            {"icon": "material/bug", "link": f"{config.repo_url}/issues", "name": "Report a bug"},
        ]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fill in the changelog, and keep the source of each page for its Markdown copy."""
    if page.file.src_uri == "changelog.md":
        changelog = Path(config.config_file_path).with_name("CHANGELOG.md")
        markdown = changelog.read_text(encoding="utf-8").replace("](docs/", "](")
    _PAGES.append((page.file.src_uri, markdown))
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Say where inline code may break: not inside an option, and in a table inside a long name."""
    # A column without a name has no header to read out.
    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)
    parts = re.split(r"(<pre.*?</pre>|<td.*?</td>)", html, flags=re.DOTALL)
    return "".join(
        part
        if part.startswith("<pre")
        else re.sub(r"(?<=<code>)[^<]+(?=</code>)", _breaks_of(part.startswith("<td")), part)
        for part in parts
    )


def _breaks_of(in_table: bool) -> Callable[[re.Match[str]], str]:
    def word(found: re.Match[str]) -> str:
        text = found[0]
        if in_table and text.startswith("INSPECT_LENS_"):
            return text.replace("INSPECT_LENS_", 'INSPECT_LENS_<wbr class="phone">', 1)
        if len(unescape(text)) <= _ONE_LINE:
            return f'<span class="nb">{text}</span>' if re.search("[-/]", text) else text
        return re.sub(r"(::|[/_.])(?=\w)", r"\1<wbr>", text) if in_table else text

    return lambda found: re.sub(r"\S+", word, found[0])


def on_post_page(output: str, **_: Any) -> str:
    """Name the path to a page, which the theme calls as the list of pages; leave out idle marks."""
    output = output.replace(
        '<nav class="md-path" aria-label="Navigation"', '<nav class="md-path" aria-label="Path"'
    )
    output = output.replace('class="autorefs autorefs-internal" ', "")
    output = re.sub(r'(<a) title="[^"]*" (?=href="[^"]*#inspect_lens)', r"\1 ", output)
    output = re.sub(r'<span title="[^"]*">([^<]*)</span>', r"\1", output)
    parts = re.split(r"(<pre.*?</pre>|<script.*?</script>)", output, flags=re.DOTALL)
    return "".join(map(_lean, parts))


def _lean(part: str) -> str:
    if part.startswith("<pre"):
        # Marks of what looks like plain text are half of a signature.
        return re.sub(r'<span class="[nopw]">([^<]*)</span>', r"\1", part)
    return part if part.startswith("<script") else re.sub(r"\s*\n\s*", "\n", part)


def on_post_build(*, config: Any) -> None:
    """Write the copies and the list, and judge the weight of pages."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        if "live" not in page.parts and (size := page.stat().st_size) > _MOST_BYTES:
            _LOG.warning(
                "%s has %d bytes, more than %d.", page.relative_to(site), size, _MOST_BYTES
            )
    found = dict(_PAGES)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section, uris in _sections(config.nav):
        lines += ["", f"## {section}", ""]
        for uri in uris:
            text = found[uri]
            target = site / uri
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            lines.append(f"- [{_heading(text)}]({uri}){_first_sentence(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(nav: Any) -> list[tuple[str, list[str]]]:
    return [(name, list(_uris(items))) for part in nav for name, items in part.items()]


def _uris(items: Any) -> Any:
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            for below in item.values():
                yield from _uris(below)


def _heading(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("# "))[2:].replace("`", "")


def _first_sentence(text: str) -> str:
    plain = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in plain.split("\n\n"):
        line = " ".join(paragraph.split())
        if line and line[0].isalpha():
            return f": {line.partition('. ')[0].rstrip('.:')}."
    return ""
