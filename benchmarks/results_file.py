"""The file that a run leaves: medians, ratios, and what could not be measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Key", "Results", "medians"]

Key = tuple[str, str, str]
"""Model, load, arm."""


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By process, the median of its seconds; a run in which it did nothing counts as none."""
    names = sorted({name for run in runs for name in run})
    return {n: round(statistics.median(run.get(n, 0.0) for run in runs), 3) for n in names}


@dataclass
class Results:
    """What was measured so far."""

    environment: dict[str, Any]
    seconds: dict[Key, list[float]] = field(default_factory=dict)
    tokens: dict[Key, int] = field(default_factory=dict)
    """Sampled tokens of one run."""
    preemptions: dict[Key, int] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By model and kind of engine: seconds to start, options, shared memory."""
    skipped: dict[Key, str] = field(default_factory=dict)
    cpu_s: dict[Key, list[dict[str, float]]] = field(default_factory=dict)
    """Processor time of each process in each run, by its name."""
    phases: dict[Key, list[dict[str, float]]] = field(default_factory=dict)
    """Of servers: seconds of each run at which answers came, and what vLLM measured of each."""

    def add(self, key: Key, run: dict[str, Any]) -> None:
        """Take one timed run."""
        self.seconds.setdefault(key, []).append(float(run["seconds"]))
        self.tokens[key] = int(run["tokens"])
        self.preemptions[key] = self.preemptions.get(key, 0) + int(run["preemptions"])
        self.cpu_s.setdefault(key, []).append(run["cpu_s"])
        self.phases.setdefault(key, []).append(run.get("phases", {}))

    def median(self, key: Key) -> float | None:
        """Median seconds; None where nothing was measured."""
        values = self.seconds.get(key)
        return statistics.median(values) if values else None

    def _ratio(self, key: Key, other: str) -> float | None:
        mine, reference = self.median(key), self.median((key[0], key[1], other))
        return None if mine is None or reference is None else mine / reference

    def to_json(self) -> dict[str, Any]:
        """The file's content; ratios are of median seconds, above 1 is slower."""
        runs = []
        for key, values in self.seconds.items():
            model, load, arm = key
            runs.append(
                {
                    "model": model,
                    "load": load,
                    "arm": arm,
                    "seconds": [round(v, 4) for v in values],
                    "tokens_per_second": self.tokens[key] / statistics.median(values),
                    "ratio_to_default": self._ratio(key, "default"),
                    "ratio_to_vllm_lens": self._ratio(key, "vllm-lens"),
                    "preemptions": self.preemptions[key],
                    "cpu_s": medians(self.cpu_s[key]),
                    **({"phases": phases} if (phases := medians(self.phases[key])) else {}),
                }
            )
        return {
            "environment": self.environment,
            "runs": runs,
            "engines": self.engines,
            "skipped": [
                {"model": m, "load": load, "arm": arm, "reason": reason}
                for (m, load, arm), reason in self.skipped.items()
            ],
        }

    def table(self) -> str:
        """The medians as text."""
        lines = []
        for key in self.seconds:
            ratios = [self._ratio(key, other) for other in ("default", "vllm-lens")]
            shown = "".join(f"{'-' if r is None else format(r, '.3f'):>9}" for r in ratios)
            lines.append(f"{key[0]:9} {key[1]:9} {key[2]:12} {self.median(key):9.3f} s{shown}")
        lines += [f"{m:9} {load:9} {arm:12} {why}" for (m, load, arm), why in self.skipped.items()]
        return "\n".join(lines) + "\n"
