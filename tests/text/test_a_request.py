"""The walk of a request names files that are there, at the stage that it says."""

from __future__ import annotations

import re

from tests.kit.repository import ROOT

_, _, PAGE = (
    (ROOT / "docs" / "architecture.md")
    .read_text(encoding="utf-8")
    .partition("## Caches on the way")[0]
    .partition("## The way of a request")
)
SOURCE = ROOT / "src" / "inspect_lens"


def test_every_file_of_the_walk_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(named) > 25
    assert [name for name in named if not (SOURCE / name).is_file()] == []


def test_every_folder_of_the_engine_and_the_glue_is_met() -> None:
    named = " ".join(re.findall(r"`([\w/]+\.py)`", PAGE))
    folders = [
        f"{room}/{path.name}/"
        for room in ("_engine", "_vllm")
        for path in (SOURCE / room).iterdir()
        if (path / "__init__.py").is_file()
    ]
    # Where layers are found is no stage of a request.
    aside = {"_vllm/model/"}
    assert {folder for folder in folders if folder not in named} == aside


def test_the_picture_names_folders_that_exist() -> None:
    picture = (ROOT / "docs" / "assets" / "a-request.svg").read_text(encoding="utf-8")
    named = re.findall(r"_(?:engine|vllm)/[\w/]+(?:\.py)?", picture)
    assert len(named) > 8
    assert [name for name in named if not (SOURCE / name).exists()] == []
