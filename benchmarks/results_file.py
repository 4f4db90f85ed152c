"""The file that a run leaves: medians, ratios, and what could not be measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["WAITS", "Key", "Results"]

Key = tuple[str, str, str]
"""Model, load, arm."""

WAITS = {
    "garbage_ms": "time that the client's garbage collector took",
    "waited_ms": "time for which steps waited for room in shared memory",
    "add_ms": "from the start until the client had handed the last request over",
    "add_own_ms": "work of the client's thread in that time, whatever it waited for",
    "first_steps_ms": "from there until the outputs of the first 16 steps had come",
    "steps_ms": "from the last request until the outputs of the last step had come",
    "idle_ms": "of these, time for which the client waited for outputs",
    "end_ms": "from there to the end",
    "end_own_ms": "work of the client's thread in that time",
    "busy_ms": "time of all the machine's cores, whoever used them",
    "server_own_ms": "work of the API server's process, without its engine's",
    "stolen_ms": "time that the machine's host gave to others",
}
"""What is noted of each run beside its seconds, in milliseconds."""


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
    steps: list[dict[str, Any]] = field(default_factory=list)
    host: list[dict[str, Any]] = field(default_factory=list)
    """What the lens took of the step loop's thread in a run that is not among the timed ones."""
    waits: dict[Key, dict[str, list[float]]] = field(default_factory=dict)
    """By name, of each run: what `WAITS` describes."""

    def add(self, key: Key, run: dict[str, Any]) -> None:
        """Take one timed run."""
        self.seconds.setdefault(key, []).append(float(run["seconds"]))
        self.tokens[key] = int(run["tokens"])
        self.preemptions[key] = self.preemptions.get(key, 0) + int(run["preemptions"])
        for name in WAITS:
            if name in run:
                values = self.waits.setdefault(key, {}).setdefault(name, [])
                values.append(round(float(run[name]), 1))

    @classmethod
    def kept(cls, file: Mapping[str, Any], environment: Mapping[str, Any]) -> Results:
        """What a file holds, to add the runs of another command to it.

        Args:
            file: of `to_json`.
            environment: of the other command.
        """
        found = cls(dict(file["environment"]))
        found.environment["command"] += f" && {environment['command']}"
        found.environment["arms"] = {**found.environment["arms"], **environment["arms"]}
        for run in file["runs"]:
            key = run["model"], run["load"], run["arm"]
            found.seconds[key] = list(run["seconds"])
            found.tokens[key] = round(run["tokens_per_second"] * statistics.median(run["seconds"]))
            found.preemptions[key] = run["preemptions"]
        found.engines = dict(file["engines"])
        for one in file["skipped"]:
            found.skipped[one["model"], one["load"], one["arm"]] = one["reason"]
        for name in ("steps", "host"):
            setattr(found, name, list(file[name]))
        for one in file["waits"]:
            names = {k: v for k, v in one.items() if k not in ("model", "load", "arm")}
            found.waits[one["model"], one["load"], one["arm"]] = names
        return found

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
            "steps": self.steps,
            "host": self.host,
            "waits": [
                {"model": model, "load": load, "arm": arm, **waits}
                for (model, load, arm), waits in self.waits.items()
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
