"""Notebooks of the tutorials: their cells are the blocks that `test_pages` runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.kit.blocks import read_blocks
from tests.kit.notebooks import FOLDER, NOTEBOOKS, read_cells
from tests.kit.repository import ROOT


def sources(name: str, kind: str) -> list[str]:
    return ["".join(c["source"]) for c in read_cells(name) if c["cell_type"] == kind]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_are_the_blocks_of_the_page_in_order(name: str) -> None:
    _setup, *cells = sources(name, "code")
    ran = [
        block.code.strip() if block.language == "python" else f"%%bash\n{block.code.strip()}"
        for block in read_blocks(Path(NOTEBOOKS[name]))
        if block.language == "python" or block.mode != "run"
    ]
    assert cells == ran
    assert len(ran) >= 3
    assert not [b.where for b in read_blocks(Path(NOTEBOOKS[name])) if b.mode == "skip"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_one_of_jupyter(name: str) -> None:
    made = json.loads((ROOT / FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    for cell in made["cells"]:
        fields = {"id", "cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            fields |= {"outputs", "execution_count"}
        assert set(cell) == fields
    assert any(cell.get("outputs") for cell in made["cells"])
    assert made["cells"][0]["source"][0].startswith("# ")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_and_pictures_are_there(name: str) -> None:
    for text in sources(name, "markdown"):
        assert "<!--" not in text
        assert "#only-" not in text
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (ROOT / FOLDER / target).resolve().exists(), target


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_page_offers_its_notebook(name: str) -> None:
    page = Path(NOTEBOOKS[name])
    link = os.path.relpath(f"{FOLDER}/{name}.ipynb", page.parent)
    assert f"]({link})" in (ROOT / page).read_text(encoding="utf-8")


def test_the_first_cell_goes_to_the_root_of_the_clone(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / FOLDER).mkdir(parents=True)
    monkeypatch.chdir(workdir / FOLDER)
    monkeypatch.setenv("INSPECT_LENS_SITES", "")
    exec(sources("steer-with-controls", "code")[0], {})
    assert Path.cwd() == workdir
    assert os.environ["INSPECT_LENS_SITES"] == "all"
