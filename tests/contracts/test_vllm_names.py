"""Every name of vLLM that `_vllm/` uses stands in the table, with the feature that needs it."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from inspect_lens._vllm.compat.features import USED_NAMES
from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, PATCHES, SERVER_PATCHES
from inspect_lens.spec._engine import _METHODS
from tests.kit.repository import ROOT

FINE = {
    "vllm": "its version",
    "vllm.envs": "what is read of it is in the table",
}
OF_OTHERS = {
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "of vLLM 0.32 alone, and read with a default",
    **dict.fromkeys(("chat_template", "get_vocab", "is_fast"), "a tokenizer's"),
    **dict.fromkeys(
        ("num_hidden_layers", "to_dict", "v_head_dim", "vocab_size"),
        "a configuration's, of Hugging Face",
    ),
    "compute_logits": "a model's, and refused where it lacks it",
    "get_node_ip_address": "Ray's",
    **dict.fromkeys(("cls", "methods", "router", "user_middleware"), "starlette's"),
    **dict.fromkeys(("col_offset", "threadName"), "the standard library's"),
    **dict.fromkeys(("_get_default_store", "set_stance"), "torch's"),
}
"""Attributes of classes that the test does not look at, and why they are not in the table."""


def nodes(folder: str) -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / "src/inspect_lens" / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.name, node


def imported() -> set[str]:
    found = set()
    for _, node in nodes("_vllm"):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("vllm")}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("vllm"):
                found.add(str(name.value))
    return found


def own_names() -> Iterator[str]:
    """What this package calls functions, classes, fields and attributes."""
    for _, node in nodes(""):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else []
                targets = [part.target] if isinstance(part, ast.AnnAssign) else targets
                yield from (one.id for one in targets if isinstance(one, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def names_of_libraries() -> Iterator[str]:
    """What modules have that the vLLM processes' folders import, and their classes."""
    modules = {"torch.nn", "numpy.random", "numpy", "torch"}
    for _, node in (n for folder in ("_vllm", "_engine", "spec", "_base") for n in nodes(folder)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(str(node.module))
    kinds = [*vars(builtins).values(), *vars(types).values(), np.ndarray, torch.Tensor]
    for name in modules:
        if name.partition(".")[0] not in ("vllm", "inspect_lens", "triton"):
            module = importlib.import_module(name)
            yield from dir(module)
            kinds += vars(module).values()
    for kind in kinds:
        if isinstance(kind, type):
            yield from (*dir(kind), *getattr(kind, "_fields", ()))


def test_every_import_is_in_the_table() -> None:
    known = {used.target for used in USED_NAMES}
    assert len(imported()) > 12
    assert imported() - known - FINE.keys() == set()


@pytest.mark.filterwarnings("ignore")
def test_every_attribute_that_is_nobody_elses_is_in_the_table() -> None:
    """What neither this package has nor a library that it uses is vLLM's."""
    known = {*own_names(), *names_of_libraries(), *OF_OTHERS}
    patches = (*PATCHES, *SERVER_PATCHES, *EAGER_PATCHES)
    for target in (*(u.target for u in USED_NAMES), *(p.target for p in patches)):
        known |= set(target.replace(":", ".").split("."))
    read: dict[str, str] = {}
    for file, node in nodes("_vllm"):
        if isinstance(node, ast.Attribute):
            read[node.attr] = f"{file}:{node.lineno}"
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr")
            and isinstance(name := node.args[1], ast.Constant)
        ):
            read[str(name.value)] = f"{file}:{node.lineno}"
    assert {"quant_method", "stream_interval", "_heap"} <= read.keys()
    assert not OF_OTHERS.keys() - read.keys(), "what is not read any more"
    ours = ("inspect_lens", "__")
    unknown = {n: at for n, at in read.items() if n not in known and not n.startswith(ours)}
    assert not unknown, "vLLM's go into the table of features.py, those of others into OF_OTHERS"


def test_names_of_quantisation_that_count_as_one_are_one_in_vllm() -> None:
    # As text: to import it takes ten seconds.
    place = Path(str(importlib.import_module("vllm").__file__)).parent
    text = (place / "model_executor/layers/quantization/__init__.py").read_text(encoding="utf-8")
    kinds = dict(re.findall(r'^ +"([\w-]+)": (\w+),$', text, re.MULTILINE))
    for name, same in _METHODS.items():
        # Of a checkpoint; the other makes the same of one that is not quantised.
        if name != "fp8_per_tensor":
            assert kinds[name] == kinds[same], name
    ours: dict[str, set[str]] = {}
    for name, kind in kinds.items():
        ours.setdefault(kind, set()).add(_METHODS.get(name) or name)
    # A checkpoint and the command line say `mxfp8` of different things.
    several = {kind: names for kind, names in ours.items() if len(names) > 1}
    assert several == {"ModelOptMxFp8Config": {"modelopt_mxfp8", "mxfp8"}}


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
