"""Every eval has the files of inspect_evals' layout, and the catalogue says the same as they."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.generated import evals_markdown
from tests.kit.repository import ROOT

FOLDERS = sorted(p.parent for p in (ROOT / "evals").glob("*/eval.yaml"))


def facts(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / "eval.yaml").read_text(encoding="utf-8"))
    return loaded


def tasks_of(folder: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((folder / "task.py").read_text(encoding="utf-8"))
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "task" for d in node.decorator_list)
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_yaml_tasks_and_readme_agree(folder: Path) -> None:
    said, tasks = facts(folder), tasks_of(folder)
    assert {"title", "description", "group", "contributors", "version", "tasks"} <= said.keys()
    assert re.fullmatch(r"\d+-[A-Z]", said["version"])
    assert [t["name"] for t in said["tasks"]] == list(tasks)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for name, function in tasks.items():
        assert f"inspect eval inspect_lens/{name}" in readme
        arguments = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
        missing = [a for a in arguments if f"`{a}`" not in readme]
        assert not missing, f"README.md of {name} does not explain {missing}"
    assert "limits" in readme.lower() or folder.name == "organism_deception"
    twin = (said.get("metadata") or {}).get("offline_twin")
    assert twin is None or (ROOT / "evals" / twin).is_dir()


def test_each_folder_is_an_eval() -> None:
    folders = {p.name for p in (ROOT / "evals").iterdir() if p.is_dir() and p.name[0] not in "_."}
    assert folders == {p.name for p in FOLDERS} | {"kit"}


def test_the_catalogue_is_current() -> None:
    assert evals_markdown() in (ROOT / "docs/evals.md").read_text(encoding="utf-8")
