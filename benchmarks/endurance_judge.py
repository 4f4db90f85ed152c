"""What `benchmarks.endurance` finds wrong in what servers held and how requests ended."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .endurance_load import GONE

__all__ = ["SETTLE_S", "device_mib", "growth", "judge"]

SETTLE_S = 600.0
"""Of a server's life that growth leaves out: pools fill, and results wait up to 300 s. Samples of
half as long are needed behind it; the noise of fewer is more than what an hour makes of it."""
GPU_MIB = 64.0
"""Of the device's memory that may be in use when the servers have ended, and was not before."""
GROWTH_MIB = 64.0
"""Per hour beyond the server without the lens; below, it cannot be told from noise in minutes."""
DESCRIPTORS = 8
"""Connections of clients differ from sample to sample."""


def growth(
    samples: Sequence[Mapping[str, Any]], name: str, settle_s: float = SETTLE_S
) -> float | None:
    """Growth per hour, by least squares, each life of a server with a level of its own.

    Args:
        samples: with `life`, `s`, `processes` and the name.
        name: of the number.
        settle_s: see `SETTLE_S`.

    Returns:
        None where no server lived long enough.
    """
    hours: list[float] = []
    values: list[float] = []
    for life in {sample["life"] for sample in samples}:
        of_it = [s for s in samples if s["life"] == life]
        # Of a server that ends, some processes are gone.
        whole = max(s["processes"] for s in of_it)
        kept = [s for s in of_it if s["s"] >= settle_s and s["processes"] == whole]
        if not kept or kept[-1]["s"] - kept[0]["s"] < settle_s / 2:
            continue
        at = np.array([s["s"] for s in kept]) / 3600
        of = np.array([s[name] for s in kept], dtype=float)
        hours += list(at - at.mean())
        values += list(of - of.mean())
    if not hours:
        return None
    return float(np.dot(hours, values) / np.dot(hours, hours))


def device_mib() -> list[float]:
    """Memory in use on each GPU, all programs together; empty without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [float(line) for line in said.stdout.split()]


def judge(found: Mapping[str, Any], shm_left: Sequence[str]) -> list[str]:
    """What is wrong in a part, in words.

    Args:
        found: by `part`.
        shm_left: files in shared memory that the servers had, and that are still there.
    """
    problems = []
    for name in ("plain", "lens"):
        for kind, counts in found[name]["outcomes"].items():
            good = {"done", "left", "server down"}
            problems += [
                f"{name}: {n} {kind}: {what}" for what, n in counts.items() if what not in good
            ]
    more = {
        key: (found["lens"]["growth_per_hour"][key] or 0.0)
        - max(0.0, found["plain"]["growth_per_hour"][key] or 0.0)
        for key in ("own_mib", "descriptors", "shared_mib")
    }
    hours = found["seconds"] / 3600
    if more["own_mib"] > GROWTH_MIB / min(1.0, hours):
        problems.append(f"memory grew by {more['own_mib']:.0f} MiB per hour more than without")
    if more["descriptors"] * hours > DESCRIPTORS:
        problems.append(f"{more['descriptors'] * hours:.0f} descriptors more")
    for event in found["events"]:
        if event["processes_left"]:
            problems.append(f"{event['kind']}: {event['processes_left']} processes left")
        # Who was told to end has time to finish; of a killed engine, requests only have to end.
        bad = {"open", "no end"} if event["kind"] == "killed" else event["outcomes"].keys()
        for outcome in bad & event["outcomes"].keys() - {"done", "left", GONE}:
            problems.append(f"{event['kind']}: {event['outcomes'][outcome]} requests: {outcome}")
    before, after = found.get("device_mib_before", 0.0), found.get("device_mib_after", 0.0)
    if after > before + GPU_MIB:
        problems.append(f"{after - before:.0f} MiB left on the device")
    return problems + [f"left in shared memory: {name}" for name in shm_left]
