"""What the decoder layers of a vLLM release return, read from its source without importing it.

`python -m tests.kit.layouts SITE_PACKAGES > tests/contracts/vllm/layouts/VERSION.json` records a
release; `inspect_lens._vllm.model.residual_layout` says how the source is read and what that
cannot tell.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from inspect_lens._vllm.model.residual_layout import Layout, layout_of_forward

__all__ = ["layouts_of", "read_release"]


def read_release(packages: Path) -> dict[str, dict[str, Layout]]:
    """Classify every decoder layer of a release.

    Args:
        packages: the folder that holds the package `vllm`.

    Returns:
        Layout by class, by family: a file of `model_executor/models/`, or a folder of `models/`,
        of which that for NVIDIA's cards counts.
    """
    found: dict[str, dict[str, Layout]] = {}
    vllm = packages / "vllm"
    old, new = vllm / "model_executor" / "models", vllm / "models"
    named = [(path.stem, path) for path in sorted(old.rglob("*.py"))]
    named += [
        (path.relative_to(new).parts[0], path)
        for path in sorted(new.rglob("*.py"))
        if not {"amd", "cpu", "xpu"} & set(path.parts)
    ]
    for family, path in named:
        if layouts := layouts_of(path.read_text(encoding="utf-8")):
            found.setdefault(family, {}).update(layouts)
    return found


def layouts_of(source: str) -> dict[str, Layout]:
    """Layout by class of the decoder layers in one file.

    Args:
        source: of the file.

    Returns:
        Layouts of the classes that define a forward.
    """
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Layer", "Block")):
            for forward in node.body:
                if isinstance(forward, ast.FunctionDef) and _is_layer(node.name, forward):
                    found[node.name] = layout_of_forward(forward)
    return found


def _is_layer(name: str, function: ast.FunctionDef) -> bool:
    """Whether a function looks like a decoder layer's forward, by what goes in."""
    names = {a.arg for a in function.args.args}
    return (
        function.name == "forward"
        and "hidden_states" in names
        and ("DecoderLayer" in name or bool(names & {"residual", "positions", "position_ids"}))
    )


def main() -> None:
    """Print the record of a release."""
    sys.stdout.write(json.dumps(read_release(Path(sys.argv[1])), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
