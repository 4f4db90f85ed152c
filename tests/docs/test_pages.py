"""Every code block of README and documentation runs, or says why not.

The blocks of a page share one namespace and run in order. All pages together start one engine and
one server, see `tests.kit.runner`.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from tests.kit.blocks import pages, read_blocks
from tests.kit.repository import ROOT
from tests.kit.runner import Runner, check_output, stand_in_for_llm
from tests.kit.shell import check_command, commands

BLOCKS = {page: read_blocks(page) for page in pages()}


AT_NIGHT = pytest.mark.nightly(
    held_by=(
        "tests/e2e/test_recipe.py::test_a_recipe_finds_what_was_planted",
        "tests/unit/cli/test_cli.py::test_from_a_data_set_to_a_report",
    ),
    why="2,160 answers of the organism, and a probe trained on them",
)


def pages_with(mode: str) -> list[Any]:
    return [
        pytest.param(
            page,
            id=str(page),
            marks=[AT_NIGHT] if (page.name, mode) == ("probe.md", "server") else [],
        )
        for page, blocks in BLOCKS.items()
        if any(block.mode == mode for block in blocks)
    ]


def runs_elsewhere(page: Path) -> bool:
    """Whether a test of the day with an engine runs all blocks that need none as well."""
    modes = {block.mode for block in BLOCKS[page]}
    return "engine" in modes or ("server" in modes and page.name != "probe.md")


@pytest.mark.parametrize("page", [p for p in pages_with("run") if not runs_elsewhere(p.values[0])])
def test_page(page: Path, workdir: Path) -> None:
    """Blocks of a page that needs no engine."""
    runner = Runner(workdir, modes=("run",))
    with runner.importable():
        for block in BLOCKS[page]:
            runner.run(block)


@pytest.mark.engine
@pytest.mark.parametrize("page", pages_with("engine"))
def test_page_offline(
    page: Path, workdir: Path, offline_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that use `LLM` in this process, with the other blocks of the page before them."""
    monkeypatch.setattr("vllm.LLM", stand_in_for_llm(offline_llm))
    runner = Runner(workdir, modes=("run", "engine"))
    with runner.importable():
        for block in BLOCKS[page]:
            runner.run(block)


@pytest.mark.engine
@pytest.mark.parametrize("page", pages_with("server"))
def test_page_server(
    page: Path,
    workdir: Path,
    lens_server_url: str,
    recorded_folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that speak to a server, with the other blocks of the page before them."""
    if page.name == "collect.md":
        # It reads a log that an eval has left.
        example_files: Path = request.getfixturevalue("example_files")
        shutil.copytree(example_files / "logs", workdir / "logs")
    (workdir / "acts").mkdir(exist_ok=True)
    (workdir / "acts/recorded").symlink_to(recorded_folder)
    monkeypatch.setenv("VLLM_BASE_URL", f"{lens_server_url}/v1")
    monkeypatch.setenv("VLLM_API_KEY", "none")
    runner = Runner(workdir, modes=("run", "server"), server_url=lens_server_url)
    with runner.importable():
        for block in BLOCKS[page]:
            runner.run(block)


def test_every_skip_is_listed() -> None:
    listed = (ROOT / "tests/QUARANTINE.md").read_text(encoding="utf-8")
    skipped = [block for blocks in BLOCKS.values() for block in blocks if block.mode == "skip"]
    missing = [b.where for b in skipped if f"{b.page}: {b.reason}" not in listed]
    assert not missing, f"give each a row in tests/QUARANTINE.md: {missing}"


def test_no_file_that_a_page_has_one_save_hides_a_module() -> None:
    titles = {block.title for blocks in BLOCKS.values() for block in blocks if block.title}
    stems = {title.removesuffix(".py") for title in titles}
    assert "ask_server" in stems
    assert not stems & (sys.stdlib_module_names | packages_distributions().keys())


def test_a_block_that_is_not_run_is_still_python() -> None:
    for block in (b for blocks in BLOCKS.values() for b in blocks if b.mode == "skip"):
        if block.language == "python":
            compile(block.code, block.where, "exec")


def test_an_output_is_that_of_the_block_before_it(tmp_path: Path) -> None:
    text = "```python\nprint(shape, seconds)\n```\n<!-- output -->\n```text\n(2, 3)\n… s\n```\n"
    (tmp_path / "page.md").write_text(text)
    (block,) = read_blocks(Path("page.md"), root=tmp_path)
    check_output(block, "(2, 3) 0.1 s\n")
    with pytest.raises(AssertionError, match=r"page\.md:1 prints other"):
        check_output(block, "(2, 4) 0.1 s\n")
    (tmp_path / "page.md").write_text("<!-- output -->\n```text\n1\n```\n")
    with pytest.raises(ValueError, match="without a block"):
        read_blocks(Path("page.md"), root=tmp_path)


def test_reader_sees_marks_titles_and_indented_blocks(tmp_path: Path) -> None:
    page = Path("page.md")
    (tmp_path / page).write_text(
        '<!-- test: server -->\n```python title="task.py"\nx = 1\n```\n'
        "- item\n\n    ```bash\n    make test\n    ```\n```text\nout\n```\n"
    )
    python, bash = read_blocks(page, root=tmp_path)
    assert (python.mode, python.title, python.code) == ("server", "task.py", "x = 1\n")
    assert (bash.mode, bash.code) == ("run", "make test\n")


@pytest.mark.parametrize(
    "text", ["```\nx\n```", "```ruby\nx\n```", "<!-- test: skip -->\n```python\nx\n```"]
)
def test_reader_refuses_what_nobody_checks(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md:[12]"):
        read_blocks(Path("page.md"), root=tmp_path)


@pytest.mark.parametrize(
    "command",
    ["make nothing", "pip install inspect-lens[nothing]", "rm -rf x", "INSPECT_LENS_NO=1 make env"],
)
def test_unknown_command_is_refused(command: str) -> None:
    with pytest.raises(AssertionError):
        check_command(next(commands(command)))
