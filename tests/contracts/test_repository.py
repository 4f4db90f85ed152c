"""Facts about the repository as a whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import inspect_lens
from tests.kit.repository import ROOT, files

TEXT = (
    ".cfg", ".in", ".ini", ".json", ".jsonl", ".lock", ".md", ".py", ".sh", ".toml", ".txt",
    ".yaml", ".yml", "",
)  # fmt: skip

# A path of one machine. Written in pieces, so that this file does not match itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.~>/*-])/(?:work|root|tmp|home|Users|opt|mnt|farm|scratch)" + r"/\w"
)
REGISTRY_HOST = re.compile(
    "|".join(
        (
            "py" + r"pi\.org",
            "python" + r"hosted\.org",
            r"download\.py" + r"torch",
            "wheels\\." + "vllm",
        )
    )
)


def texts(*, tests: bool) -> list[tuple[str, str]]:
    found = []
    for path in files(*TEXT):
        if path.parts[0] == "tests" and not tests:
            continue
        try:
            found.append((str(path), (ROOT / path).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def test_no_path_of_one_machine() -> None:
    hits = [
        f"{name}:{content[: match.start()].count(chr(10)) + 1}: {match.group()}"
        for name, content in texts(tests=False)
        for match in MACHINE_PATH.finditer(content)
    ]
    assert not hits


def test_no_registry_host() -> None:
    hits = [name for name, content in texts(tests=True) if REGISTRY_HOST.search(content)]
    assert not hits


def test_version_is_stated_once_and_has_a_changelog_entry() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == inspect_lens.__version__
    own = tomllib.loads((ROOT / "organism/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert own["version"] == project["version"]
    assert own["dependencies"] == [f"inspect-lens=={project['version']}"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(inspect_lens.__version__)}\]", changelog, re.MULTILINE)


def test_lock_leaves_out_what_breaks_the_cpu_environment() -> None:
    lock = (ROOT / "requirements/cpu.lock").read_text(encoding="utf-8")
    names = {line.partition("==")[0] for line in lock.splitlines() if "==" in line}
    assert not names & {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert re.search(r"^torch==[\d.]+\+cpu$", lock, re.MULTILINE)


def test_every_skip_has_a_row_in_quarantine() -> None:
    listed = re.findall(r"`([^`]+)`", (ROOT / "tests/QUARANTINE.md").read_text(encoding="utf-8"))
    files_listed = {name for name in listed if not name.endswith("/")}
    folders_listed = tuple(name for name in listed if name.endswith("/"))
    markers = re.compile(r"pytest\.(?:mark\.(?:skip|skipif|xfail)|skip|xfail|importorskip)\b")
    missing = [
        str(path)
        for path in files(".py")
        if path.parts[0] == "tests"
        and path.name != "test_repository.py"
        and markers.search((ROOT / path).read_text(encoding="utf-8"))
        and str(path) not in files_listed
        and not str(path).startswith(folders_listed)
    ]
    assert not missing, f"give each a row with reason and exit in tests/QUARANTINE.md: {missing}"
    gone = [name for name in (*files_listed, *folders_listed) if not (ROOT / name).exists()]
    assert not [name for name in gone if name.startswith("tests/")], "rows without a test"


def test_scripts_of_tests_read_their_own_tree(tmp_path: Path) -> None:
    """Also in an environment that has another clone of the package."""
    (tmp_path / "inspect_lens").mkdir()
    (tmp_path / "inspect_lens" / "__init__.py").touch()
    command = "import tests.kit, inspect_lens, os; print(inspect_lens.__file__, os.environ)"
    found = subprocess.run(
        [sys.executable, "-c", command],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    own = ROOT / "src"
    assert found.stdout.startswith(str(own / "inspect_lens")), found.stderr
    assert f"'PYTHONPATH': '{own}:{ROOT}:{tmp_path}'" in found.stdout
