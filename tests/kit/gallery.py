"""Tables of the gallery: what each shipped probe, vector and oracle gave, from its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .repository import ROOT

__all__ = ["oracles_markdown", "probes_markdown"]


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def probes_markdown() -> str:
    """A row per probe and held-out set."""
    rows = [
        "| probe | layers | held-out set | AUROC | recall | false positive rate |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "probes").glob("*/*/card.json")):
        card = _read(path)["card"]
        layers = ", ".join(map(str, card["layers"]))
        rows += [
            f"| `{card['name']}` | {layers} | {found['name']} | {_rate(found['auroc'])} | "
            f"{_rate(found['recall'])} | {_rate(found['fpr'])} |"
            for found in card["evaluations"]
        ]
    return "\n".join(rows)


def oracles_markdown() -> str:
    """A row per measurement of the organism's oracle."""
    controls = ("text_only", "shuffled", "random", "other_sample")
    rows = [
        "| question | sees | layer | wording | held-out set | right | best control |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in _read(ROOT / "oracles/organism/card.json")["results"]:
        best = max(found[name]["accuracy"] for name in controls)
        rows.append(
            f"| {found['task']} | {found['inputs']} | {found['layer']} | {found['wording']} | "
            f"{found['split']} | {found['oracle']['accuracy']:.2f} | {best:.2f} |"
        )
    return "\n".join(rows)
