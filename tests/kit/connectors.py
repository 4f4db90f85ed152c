"""Reads a vLLM release's source for what its KV connectors know blocks by, without importing it.

`python -m tests.kit.connectors WHEEL_OR_FOLDER > tests/contracts/vllm/connectors/VERSION.json`
records one.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

from .vllm_names import Read, reader_of

__all__ = ["WORDS", "read_connectors"]

_FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
_HOMES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.",
    "vllm.v1.kv_offload.",
    "vllm.v1.simple_kv_offload.",
)
_SHARED = re.compile(r"\.v1\.(base|metrics)$")

WORDS = {
    # vLLM's hash of a block, into which the cache salt goes.
    "block_hashes": r"\b(request|req|self\.req|request_real|unfinished_req)\.block_hashes\b",
    "cache_salt": r"\.cache_salt\b",
    "token_ids": r"\b(prompt|all)_token_ids\b|\btoken_ids\b",
    "kv_transfer_params": r"\bkv_transfer_params\b",
}
"""What a connector's source may say."""


def read_connectors(read: Read) -> dict[str, list[str]]:
    """Of each connector that a release registers, which of `WORDS` its source has."""
    found = {}
    for node in ast.walk(ast.parse(read(_FACTORY) or "")):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_connector"):
            name, module, _ = (ast.literal_eval(arg) for arg in node.args)
            text = "\n".join(_sources(read, module, {}).values())
            found[name] = [word for word, pattern in WORDS.items() if re.search(pattern, text)]
    return found


def _sources(read: Read, module: str, known: dict[str, str]) -> dict[str, str]:
    """The source of a module, and of those of connectors that it imports."""
    base = module.replace(".", "/")
    text = read(f"{base}.py") or read(f"{base}/__init__.py")
    if text is None or module in known or _SHARED.search(module):
        return known
    known[module] = text
    package = module.split(".") if read(f"{base}.py") is None else module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*outer, *([node.module] if node.module else [])])
            for one in (home, *(f"{home}.{alias.name}" for alias in node.names)):
                if one.startswith(_HOMES):
                    _sources(read, one, known)
    return known


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_connectors(reader_of(Path(sys.argv[1]))), indent=1) + "\n")
