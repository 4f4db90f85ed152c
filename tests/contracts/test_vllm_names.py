"""Every name of vLLM that `_vllm/` imports stands in the table, with the feature that needs it."""

from __future__ import annotations

import ast

from inspect_lens._vllm.compat.features import USED_NAMES
from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, PATCHES, SERVER_PATCHES
from tests.kit.repository import ROOT

FINE = {
    "vllm": "its version",
    "vllm.envs": "read with a default, but for VLLM_PLUGINS",
}


def imported() -> set[str]:
    found = set()
    for path in sorted((ROOT / "src/inspect_lens/_vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.startswith("vllm")}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                name = node.args[0]
                if isinstance(name, ast.Constant) and str(name.value).startswith("vllm"):
                    found.add(str(name.value))
    return found


def test_every_import_is_in_the_table() -> None:
    known = {used.target for used in USED_NAMES}
    assert len(imported()) > 12
    assert imported() - known - FINE.keys() == set()


def test_every_attribute_that_is_wrapped_is_in_the_table() -> None:
    names = {s.target.rpartition(":")[2].rpartition(".")[2] for s in PATCHES + SERVER_PATCHES}
    names |= {s.target.rpartition(":")[2].rpartition(".")[2] for s in EAGER_PATCHES}
    names |= {used.target.rpartition(":")[2].rpartition(".")[2] for used in USED_NAMES}
    # Of the runner's model state, whose class differs from model to model, and of graphs.
    names |= {"add_request", "remove_request", "preprocess_state", "run_fullgraph", "run_pw_graph"}
    ours = ("inspect_lens", "num_", "wants_eager", "skip_compiled")
    for file in (
        "worker/runners",
        "worker/worker",
        "results/attach",
    ):
        tree = ast.parse((ROOT / f"src/inspect_lens/_vllm/{file}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                target = node.targets[0]
                owner = ast.unparse(target.value)
                if owner in ("runner", "self._runner", "state", "worker", "detokenizer"):
                    is_ours = target.attr.startswith(ours) or (
                        owner == "state" and file == "worker/worker"
                    )
                    if not is_ours:
                        assert target.attr in names, f"{file}: {owner}.{target.attr}"
