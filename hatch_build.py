"""Build hook: the evals, and the code of the organism that they use, as a part of the package.

In the source tree they import `evals` and `organism`, as folders beside `src`. A wheel has them as
`inspect_lens.evals` and `inspect_lens.organism`, with their imports written accordingly. The model
organism itself, its data and its probes are a package of their own: `organism/pyproject.toml`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IMPORT = re.compile(r"^(\s*(?:from|import)\s+)(evals|organism)\b", re.MULTILINE)
_PARTS = {
    "evals": ("**/*.py", "*/eval.yaml", "*/README.md"),
    "organism": ("__init__.py", "_grade.py", "_agent_grade.py"),
}
_LEFT_OUT = {"evals/demo.py"}


class EvalsHook(BuildHookInterface[Any]):
    """Adds the evals to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files with their new imports, and have them included."""
        self._staged = Path(tempfile.mkdtemp(prefix="inspect-lens-"))
        if version == "editable":
            return
        root = Path(self.root)
        for folder, patterns in _PARTS.items():
            found = {path for pattern in patterns for path in (root / folder).glob(pattern)}
            for path in sorted(found):
                name = path.relative_to(root).as_posix()
                if name in _LEFT_OUT:
                    continue
                target = self._staged / name
                target.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text(encoding="utf-8")
                if path.suffix == ".py":
                    text = _IMPORT.sub(r"\1inspect_lens.\2", text)
                target.write_text(text, encoding="utf-8")
                build_data["force_include"][str(target)] = f"inspect_lens/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the written files."""
        shutil.rmtree(self._staged, ignore_errors=True)
