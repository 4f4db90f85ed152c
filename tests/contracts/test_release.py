"""What releases need: workflows that ask a person and hold no secret, and one version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import inspect_lens
from tests.kit.repository import ROOT
from tests.kit.shell import make_targets

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_knows_no_secret(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "secrets." not in text
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    may_write = {
        (path.stem, name, right)
        for name, job in jobs(path).items()
        for right, level in (job.get("permissions") or {}).items()
        if level == "write"
    }
    assert may_write <= {("release", "publish", "id-token"), ("docs", "site", "contents")}


def test_a_person_approves_what_was_built_and_tested() -> None:
    found = jobs(ROOT / ".github/workflows/release.yml")
    publishing = [n for n, job in found.items() if "pypi-publish" in str(job["steps"])]
    assert publishing == ["publish"]
    assert found["publish"]["environment"] == "release"
    assert set(found["publish"]["needs"]) == {"build", "test"}
    assert not any("checkout" in str(step) for step in found["publish"]["steps"])


def test_files_that_a_workflow_runs_exist() -> None:
    for path in WORKFLOWS:
        for job in jobs(path).values():
            for step in job["steps"]:
                words = str(step.get("run", "")).split()
                named = [w for w in words if w.startswith(("tests/", ".ci/"))]
                assert [w for w in named if not (ROOT / w).exists()] == [], path.name
                if words[:1] == ["make"]:
                    assert set(words[1:]) <= make_targets()


def test_a_warning_fails_the_documentation() -> None:
    # MkDocs drops the warnings of a quiet build before `--strict` counts them; mike's is not quiet.
    assert yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["strict"]
    (command,) = re.findall(r"-m mkdocs build .*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert command.split()[3:] == ["--strict"]


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == inspect_lens.__version__
    assert citation["license"] == "MIT"
