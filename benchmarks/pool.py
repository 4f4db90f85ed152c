"""`python -m benchmarks.pool FILES`: the same arms on several hosts, as one table.

A run on one host says what that host did in those minutes; a goal of 2 % needs several.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arms import ARMS

__all__ = ["main", "pooled", "table"]

Ratios = dict[tuple[str, str], dict[str, list[float]]]
"""By model and load, and then arm: a ratio to the default arm per file."""


def pooled(results: Sequence[dict[str, Any]]) -> Ratios:
    """Collect ratios to the default arm of the same file; files without that load have none."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(dict)
    for result in results:
        for run in result["runs"]:
            ratio = run["ratio_to_default"]
            if ratio is not None and run["arm"] != "default":
                ratios = found[run["model"], run["load"]].setdefault(run["arm"], [])
                ratios.append(float(ratio))
    return dict(found)


def table(ratios: Ratios) -> str:
    """A table in Markdown: median over the files, and the least and largest."""
    arms = [arm for arm in ARMS if any(arm in row for row in ratios.values())]
    lines = [
        "| model, load | " + " | ".join(arms) + " |",
        "|---" * (len(arms) + 1) + "|",
    ]
    for (model, load), row in ratios.items():
        cells = [_cell(row[arm]) if arm in row else "" for arm in arms]
        lines.append(f"| {model}, {load} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__)
    parser.add_argument("files", nargs="+", help="results of `python -m benchmarks.run`")
    options = parser.parse_args(arguments)
    results = [json.loads(Path(file).read_text()) for file in options.files]
    sys.stdout.write(table(pooled(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
