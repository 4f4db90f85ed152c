"""A wheel alone, in an empty folder: tasks, names and an eval, without a clone."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path

import pytest
import yaml
from inspect_ai.log import list_eval_logs, read_eval_log

from inspect_lens._base.shipped import EVALS
from tests.kit.blocks import read_blocks
from tests.kit.fake_server import FakeLensServer
from tests.kit.forks import run_python
from tests.kit.repository import ROOT

Run = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has both wheels and nothing else of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    # By the name of the folder Inspect knows that what is in it belongs to a package.
    target = folder / "site-packages"
    wheels = [_build(ROOT, folder), _build(ROOT / "organism", folder)]
    assert wheels[0].stat().st_size < 2_500_000
    for wheel in wheels:
        _unpack(wheel, target)
    return target


def _build(source: Path, folder: Path) -> Path:
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, text=True, capture_output=True,
        check=True,
    )  # fmt: skip
    return folder / done.stdout.strip().splitlines()[-1]


def _unpack(wheel: Path, target: Path) -> None:
    """What pip does with a wheel of Python alone, `RECORD` and scripts apart."""
    with zipfile.ZipFile(wheel) as archive:
        twice = [n for n in archive.namelist() if (target / n).exists()]
        assert not twice, "two packages have one file"
        archive.extractall(target)


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Runs Python in an empty folder, on the wheel."""

    def call(*command: str) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("INSPECT", "PYTHON"))}
        env = kept | {"PYTHONPATH": str(installed), "INSPECT_LOG_DIR": str(tmp_path / "logs")}
        done = run_python(*command, cwd=tmp_path, environment=env)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    return call


def test_the_table_of_evals_is_that_of_their_files() -> None:
    said = {
        task["name"]
        for path in (ROOT / "evals").glob("*/eval.yaml")
        for task in yaml.safe_load(path.read_text(encoding="utf-8"))["tasks"]
    }
    assert {n for names in EVALS.values() for kind, n in names if kind == "task"} == said
    found = {
        (kind, function.name)
        for path in (ROOT / "evals").rglob("*.py")
        for function in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(function, ast.FunctionDef)
        for mark in map(ast.unparse, function.decorator_list)
        if (kind := mark.partition("(")[0]) in ("task", "scorer", "metric", "solver")
    }
    every = [one for names in EVALS.values() for one in names]
    assert set(every) == found
    assert len(every) == len(set(every)), "two evals register one name"


def test_no_task_touches_the_path() -> None:
    for path in (ROOT / "evals").rglob("*.py"):
        assert "sys.path" not in path.read_text(encoding="utf-8"), path


@pytest.mark.slow
def test_names_resolve_and_tasks_are_listed(run: Run, installed: Path) -> None:
    code = """
import json, inspect_lens
from inspect_ai._util.entrypoints import ensure_entry_points
from inspect_ai._util.registry import registry_find, registry_info
ensure_entry_points("inspect_lens")
tasks = registry_find(lambda info: info.type == "task" and info.name.startswith("inspect_lens/"))
from inspect_lens.attention import load_heads
from inspect_lens.oracle import load_oracle
from inspect_lens.probe import check_model, load_probe
from inspect_lens.vector import load_vector
from inspect_lens.view import TokenTexts
probe = load_probe("organism/deception-lr")
print(json.dumps({
    "file": inspect_lens.__file__,
    "tasks": sorted(registry_info(t).name for t in tasks),
    "probe": probe.name,
    "is_its_model": check_model(probe, "organism"),
    "vector": load_vector("organism/truth").name,
    "heads": load_heads("organism/attention-tracker").model,
    "oracle": str(load_oracle("organism").path),
    "tokenizer": TokenTexts.of("vllm-lens/organism").note,
}))
"""
    facts = json.loads(run("-c", code).splitlines()[-1])
    assert facts["file"].startswith(str(installed))
    wanted = {f"inspect_lens/{n}" for names in EVALS.values() for k, n in names if k == "task"}
    assert set(facts["tasks"]) == wanted
    assert (facts["probe"], facts["vector"]) == ("organism/deception-lr", "organism/truth")
    assert facts["heads"] == "organism"
    assert facts["is_its_model"] is True
    assert facts["oracle"].startswith(str(installed))
    assert facts["tokenizer"] == ""


def test_every_eval_imports(run: Run) -> None:
    code = """
from inspect_lens._base.shipped import EVALS, from_eval
for module, names in EVALS.items():
    for _, name in names:
        assert callable(from_eval(module, name))
import sys
assert all(f"inspect_lens.evals.{module}" in sys.modules for module in EVALS)
assert "evals" not in sys.modules and "organism" not in sys.modules
"""
    run("-c", code)


def evaluate(run: Run, folder: Path, *server: str) -> str:
    """Run an eval of the wheel; the path of its log."""
    task = ["-m", "inspect_ai", "eval", "inspect_lens/organism_deception", "--limit", "4"]
    run(*task, "--model", "vllm-lens/organism", *server, "--display", "plain")
    (info,) = list_eval_logs(str(folder / "logs"))
    log = read_eval_log(info)
    assert log.status == "success", log.error
    assert log.eval.task == "inspect_lens/organism_deception"
    for sample in log.samples or []:
        score = (sample.scores or {})["deception_probe"]
        assert score.reason is None
        assert (score.metadata or {})["model_verified"] is True
    return info.name.removeprefix("file://")


def score_and_view(run: Run, folder: Path, path: str) -> None:
    """Score a log of the wheel again, and show it."""
    again = [
        "-m", "inspect_ai", "score", path, "--scorer", "inspect_lens/monitor_alarm",
        "-S", "probe=organism/deception-lr", "--action", "append", "--overwrite", "--display",
        "plain",
    ]  # fmt: skip
    run(*again)
    scored = read_eval_log(path)
    assert {"deception_probe", "monitor_alarm"} <= (scored.samples or [])[0].scores.keys()  # type: ignore[union-attr]
    # Its own scorers are found by the names that the log has.
    own = [*again[:5], "inspect_lens/truthfulness", "--action", "overwrite", "--overwrite"]
    run(*own, "--display", "plain")
    assert list((read_eval_log(path).samples or [])[0].scores or {}) == ["truthfulness"]
    run("-m", "inspect_lens._cli", "view", path, "--probe", "organism/deception-lr",
        "--out", "page.html")  # fmt: skip
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "organism/deception-lr" in page


@pytest.mark.slow
def test_an_eval_runs_is_scored_and_shown(run: Run, tmp_path: Path) -> None:
    with FakeLensServer(model="organism", n_layers=6, hidden=256) as server:
        path = evaluate(run, tmp_path, "--model-base-url", server.url)
    score_and_view(run, tmp_path, path)


def test_the_readmes_eval_runs_on_the_wheel(run: Run, installed: Path, tmp_path: Path) -> None:
    (block,) = (b for b in read_blocks(Path("README.md")) if b.title == "honesty.py")
    data = "organism/data/demo.jsonl"  # in a clone; the wheel has it inside the package
    assert data in block.code
    code = block.code.replace(data, str(installed / "inspect_lens" / data))
    (tmp_path / block.title).write_text(code, encoding="utf-8")
    with FakeLensServer(model="organism", n_layers=6, hidden=256) as server:
        command = ["-m", "inspect_ai", "eval", block.title, "--limit", "4", "--display", "plain"]
        run(*command, "--model", "vllm-lens/organism", "--model-base-url", server.url)
    (info,) = list_eval_logs(str(tmp_path / "logs"))
    log = read_eval_log(info)
    assert log.status == "success", log.error
    assert len(log.samples or []) == 4
    for sample in log.samples or []:
        assert (sample.scores or {})["deception_probe"].reason is None


@pytest.mark.engine
@pytest.mark.nightly(
    held_by=(
        "tests/unit/wheel/test_wheel.py::test_an_eval_runs_is_scored_and_shown",
        "tests/unit/wheel/test_wheel.py::test_names_resolve_and_tasks_are_listed",
    ),
    why="a server out of an installed wheel; by day its eval meets a stand-in for one",
)
def test_the_shipped_model_is_started_by_its_name(run: Run, tmp_path: Path) -> None:
    options = {"dtype": "float32", "max_model_len": 512, "enforce_eager": "true",
               "kv_cache_memory_bytes": 64 << 20}  # fmt: skip
    said = [word for name, value in options.items() for word in ("-M", f"{name}={value}")]
    evaluate(run, tmp_path, *said)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the main wheel, without the organism."""
    folder = tmp_path_factory.mktemp("alone")
    _unpack(_build(ROOT, folder), folder / "site-packages")
    return folder / "site-packages"


def _run_alone(code: str, cwd: Path, *path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("INSPECT", "PYTHON"))}
    kept["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = run_python("-c", code, cwd=cwd, environment=kept)
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_the_organism_its_names_say_what_to_install(alone: Path, tmp_path: Path) -> None:
    code = """
from inspect_lens._base.shipped import from_eval
from inspect_lens._cli._doctor import checkpoint_facts
from inspect_lens.attention import load_heads
from inspect_lens.errors import ArtifactError
from inspect_lens.model._server import refuse_start
from inspect_lens.oracle import load_oracle
from inspect_lens.probe import load_probe
from inspect_lens.vector import load_vector
loads = (
    lambda: load_probe("organism/deception-lr"),
    lambda: load_vector("organism/truth"),
    lambda: load_heads("organism/attention-tracker"),
    lambda: load_oracle("organism"),
    lambda: checkpoint_facts("organism"),
    lambda: refuse_start("organism"),
    lambda: from_eval("organism_deception.task", "organism_deception")(),
)
said = []
for load in loads:
    try:
        load()
    except Exception as error:
        said.append(str(getattr(error, "message", error)))
assert len(said) == len(loads) and all("pip install ./organism" in one for one in said), said
assert not any("pip install inspect-lens" in one for one in said), "no index has it yet"
"""
    _run_alone(code, tmp_path, alone)


def test_without_the_organism_other_names_that_begin_so_are_started(
    alone: Path, tmp_path: Path
) -> None:
    code = """
from inspect_lens.model import _server
_server.importlib.util.find_spec = lambda name: True
for model in ("organism/checkpoint", "organism/mine", "organism-agent"):
    _server.refuse_start(model)
"""
    (tmp_path / "organism-agent").mkdir()
    (tmp_path / "organism-agent/config.json").write_text("{}")
    _run_alone(code, tmp_path, alone)


def test_the_organism_is_found_in_another_folder_of_the_path(
    alone: Path, installed: Path, tmp_path: Path
) -> None:
    (wheel,) = installed.parent.glob("inspect_lens_organism-*.whl")
    _unpack(wheel, tmp_path / "other")
    code = """
from inspect_lens.attention import load_heads
from inspect_lens.probe import fingerprint_model, load_probe
assert load_probe("organism/deception-lr").card.model.sha256 == fingerprint_model("organism")
load_heads("organism/attention-tracker")
from inspect_lens._base.shipped import from_eval
from inspect_lens.data import organism_data
from inspect_lens.evals.organism_agent.dataset import _records
(task,) = (from_eval("organism_deception.task", "organism_deception")(),)
assert len(task.dataset) == len((organism_data() / "demo.jsonl").read_text().splitlines())
assert len(from_eval("organism_agent.dataset", "agent_dataset")()) and _records()
"""
    (tmp_path / "empty").mkdir()
    _run_alone(code, tmp_path / "empty", alone, tmp_path / "other")


def test_each_wheel_has_the_licence(installed: Path) -> None:
    wheels = list(installed.parent.glob("*.whl"))
    assert len(wheels) == 2
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            texts = [archive.read(n) for n in archive.namelist() if n.endswith("/LICENSE")]
        assert (ROOT / "LICENSE").read_bytes() in texts, path.name


def test_the_sdist_is_enough_to_build_the_wheel(tmp_path: Path, installed: Path) -> None:
    build = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, text=True, capture_output=True,
        check=True,
    )  # fmt: skip
    with tarfile.open(tmp_path / made.stdout.strip().splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"} <= names
    of_no_use = ("tests/", "docs/", "benchmarks/", "logs/", ".github/", ".ci/")
    assert not [name for name in names if name.startswith(of_no_use)]
    (source,) = (p for p in tmp_path.iterdir() if p.is_dir())
    wheel = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", wheel, str(tmp_path)], cwd=source, check=True)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        said = message_from_string(archive.read(metadata).decode())
    # What an index and `twine check --strict` ask for.
    assert said["Description-Content-Type"] == "text/markdown"
    assert (said["License-Expression"], said["Name"]) == ("MIT", "inspect-lens")
    assert "make demo" in str(said.get_payload())
    with zipfile.ZipFile(next(installed.parent.glob("inspect_lens-*.whl"))) as archive:
        assert inside == {name for name in archive.namelist() if ".dist-info/" not in name}
