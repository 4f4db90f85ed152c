"""Files to deploy with: they parse, and name settings, options and metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from inspect_lens._vllm.telemetry import METRICS
from tests.kit.repository import ROOT, files
from tests.kit.settings_table import settings_table

DEPLOY = [path for path in files() if path.parts[0] == "deploy"]
SCRIPT = ROOT / "deploy/slurm/two-nodes.sbatch"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text("utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/helm/values.yaml").read_text("utf-8"))
BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/inspect-lens.json").read_text("utf-8"))

OF_INSPECT = {"INSPECT_LOG_DIR"}


@pytest.mark.parametrize("path", DEPLOY, ids=str)
def test_the_page_says_what_a_file_is_for(path: Path) -> None:
    page = (ROOT / "docs/how-to/deploy.md").read_text("utf-8")
    assert f"| `{path}` |" in page or path.name == "Dockerfile.dockerignore"


@pytest.mark.parametrize("path", DEPLOY, ids=str)
def test_every_setting_exists(path: Path) -> None:
    named = set(re.findall(r"\bINSPECT_[A-Z_]+", (ROOT / path).read_text("utf-8")))
    assert named - OF_INSPECT <= {row[0] for row in settings_table()}


def test_some_settings_are_named() -> None:
    text = "".join((ROOT / path).read_text("utf-8") for path in DEPLOY)
    for name in ("REQUIRED", "REGISTRY_KEY", "STORE_BYTES", "HOSTS_KEY", "HOSTS_ADDRESS"):
        assert f"INSPECT_LENS_{name}" in text


def vllm_options() -> dict[str, list[str]]:
    """Options for vLLM, by file."""
    (model,) = VALUES["servingEngineSpec"]["modelSpec"]
    lines = SCRIPT.read_text("utf-8").replace("\\\n", " ").splitlines()
    (serve,) = [line for line in lines if "vllm serve" in line]
    found = {
        "compose": COMPOSE["services"]["server"]["command"],
        "values": model["vllmConfig"]["extraArgs"],
        "sbatch": [*serve.split(), *re.findall(r"role=\((--\S+)\)", SCRIPT.read_text("utf-8"))],
    }
    return {file: [w for w in words if w.startswith("--")] for file, words in found.items()}


def test_every_option_of_vllm_exists() -> None:
    spec = importlib.util.find_spec("vllm")
    options = vllm_options()
    assert {"--headless", "--nnodes", "--master-addr"} < set(options["sbatch"])
    assert all(options.values())
    if spec is None or spec.origin is None:
        return  # which options there are is known where vLLM is
    root = Path(spec.origin).parent
    sources = [root / "engine/arg_utils.py", *root.glob("entrypoints/**/cli_args.py")]
    text = "".join(path.read_text("utf-8") for path in sources)
    unknown = [o for some in options.values() for o in some if f'"{o}"' not in text]
    assert not unknown


def test_the_script_can_be_read_by_a_shell() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    (inner,) = re.findall(r"bash -c '\n(.*)'\n", SCRIPT.read_text("utf-8"), re.DOTALL)
    subprocess.run(["bash", "-n"], input=inner, text=True, check=True)


@pytest.mark.parametrize(("rank", "expected"), [(0, "10.0.0.1 "), (1, "10.0.0.2 --headless")])
def test_each_node_gets_its_own_address_and_role(rank: int, expected: str, tmp_path: Path) -> None:
    """The script runs with stand-ins for Slurm, `ip` and vLLM."""
    stubs = {
        "scontrol": "printf 'one\\ntwo\\n'",
        "getent": "echo '10.0.0.1 STREAM one'",
        "openssl": "echo 0123456789abcdef0123456789abcdef",
        "ip": "echo '10.0.0.1 via 10.0.0.9 dev eth0 src 10.0.0.2 uid 0'",
        "srun": f'shift; SLURM_PROCID={rank} "$@"',
        "vllm": 'echo "$VLLM_HOST_IP $INSPECT_LENS_HOSTS_ADDRESS $INSPECT_LENS_HOSTS_KEY $*"',
    }
    for name, body in stubs.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "m", "SLURM_JOB_NODELIST": "x"}
    run = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=True
    )
    address, _, role = expected.partition(" ")
    assert run.stdout.split()[:5] == [
        *(address, "10.0.0.1:7000-7010", "0123456789abcdef0123456789abcdef", "serve", "m")
    ]
    assert f"--node-rank {rank} --master-addr 10.0.0.1" in run.stdout
    assert run.stdout.split()[-1] == (role or "10.0.0.1")


def test_the_script_says_what_is_missing() -> None:
    run = subprocess.run(
        ["bash", str(SCRIPT)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "name a model" in run.stderr


def test_images_that_compose_builds_are_in_the_dockerfile() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    wanted = {service["build"]["target"] for service in COMPOSE["services"].values()}
    assert wanted == stages == {"server", "client"}
    arguments = set(re.findall(r"^ARG (\w+)=", text, re.MULTILINE))
    assert set(re.findall(r"^FROM .*\$\{(\w+)\}", text, re.MULTILINE)) == arguments


def test_no_port_is_open_to_other_machines_and_no_key_has_a_default() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    environment = COMPOSE["services"]["server"]["environment"]
    for name in ("VLLM_API_KEY", "INSPECT_LENS_REGISTRY_KEY"):
        assert re.fullmatch(rf"\$\{{{name}:\?.+\}}", environment[name])
    (model,) = VALUES["servingEngineSpec"]["modelSpec"]
    (key,) = [e for e in model["env"] if e["name"] == "INSPECT_LENS_REGISTRY_KEY"]
    assert "secretKeyRef" in key["valueFrom"]


def test_what_a_build_copies_has_all_that_the_wheels_are_made_of() -> None:
    lines = (ROOT / "deploy/Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    for line in lines:
        assert not line.startswith("!") or (ROOT / line[1:]).exists()
    with (ROOT / "pyproject.toml").open("rb") as stream:
        sdist = tomllib.load(stream)["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    with (ROOT / "organism/pyproject.toml").open("rb") as stream:
        wheel = tomllib.load(stream)["tool"]["hatch"]["build"]["targets"]["wheel"]
    organism = {posixpath.normpath(f"organism/{source}") for source in wheel["force-include"]}
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert sent == (
        {path.removeprefix("/") for path in sdist}
        | organism
        | {"pyproject.toml", "organism/pyproject.toml"}
    )


def queries() -> list[str]:
    panels = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return panels + [v["definition"] for v in BOARD["templating"]["list"] if "definition" in v]


def test_every_query_of_the_dashboard_names_metrics_that_exist() -> None:
    known = {m.name for m in METRICS if m.kind != "histogram"}
    known |= {
        f"{m.name}_{part}"
        for m in METRICS
        if m.kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    labels = {label for m in METRICS for label in m.labels} | {"le", "job"}
    shown: set[str] = set()
    for query in queries():
        named = set(re.findall(r"\binspect_lens_\w+", query))
        assert named, query
        assert named <= known, query
        assert query.count("(") == query.count(")")
        for by in re.findall(r"by \(([^)]*)\)", query):
            assert {label.strip() for label in by.split(",")} <= labels, query
        shown |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
    assert shown == {m.name for m in METRICS}, "a panel for each"


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    spots = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]]
    assert len(set(spots)) == len(spots) == len({p["id"] for p in BOARD["panels"]})
