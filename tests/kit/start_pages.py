"""Tables of README and of the first pages, made from committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gallery import replication_link

from .repository import ROOT

__all__ = ["findings_markdown", "layouts_markdown", "walks_markdown"]

_NEWEST = "tests/contracts/vllm/layouts/0.33.0.json"
# Draft models, encoders and speech: no taps, or no generation.
_OTHER_KINDS = re.compile("eagle|dflash|_mtp|bert|whisper|_asr")
_DRAFTS = re.compile("DFlash|DSpark")
_LAYOUTS = {
    "fused": "two tensors whose sum is the stream",
    "plain": "the stream",
    "pair_with_none": "the stream",
    "stale": "the stream and a residual that is not part of it",
}


def findings_markdown() -> str:
    """What the gallery found in real models, for README: one row for each claim."""
    rows = ["| what was asked | model | found | compared with |", "|---|---|---|---|"]
    return "\n".join(rows + [f"| {' | '.join(row)} |" for row in _findings()])


def _findings() -> Iterator[tuple[str, str, str, str]]:
    lies = _result("lies")
    probe = lies["numbers"]["probes"]["logistic"]["ordered"]["sets"]
    for name, said in (
        ("role, new topics", "does a probe of ordered lies find lies told in a role?"),
        ("hiding, new secrets", "and denials of a secret?"),
    ):
        judged = probe[name]
        low, high = judged["auroc_interval"]
        baseline, its_own = judged["best_baseline"]
        yield (
            f"[{said}]({_link('lies')})", lies["model"],
            f"AUROC {judged['auroc']:.3f} [{low:.3f}, {high:.3f}] on "
            f"{judged['n_positive']} lies and {judged['n_negative']} honest answers; "
            f"{judged['fpr']:.0%} of the honest ones are above the threshold",
            f"best baseline, {baseline}: {its_own:.3f}",
        )  # fmt: skip
    refusal = _result("refusal")
    rates, n = refusal["numbers"]["rates"], refusal["numbers"]["n"]
    ablated, unedited = (round(rates[f"harmful_{key}"] * n) for key in ("ablated", "unedited"))
    yield (
        f"[does it still refuse without one direction?]({_link('refusal')})",
        refusal["model"], f"{ablated} of {n} refused", f"unedited: {unedited} of {n}",
    )  # fmt: skip
    injection = _result("injection")
    plain, padded = (
        "{:.3f} [{:.3f}, {:.3f}]".format(*injection["numbers"][f"auroc_{key}"])
        for key in ("plain", "padded")
    )
    n = injection["numbers"]["n"]
    yield (
        f"[does attention show a prompt injection?]({_link('injection')})",
        injection["model"], f"AUROC {plain} on {n} injected and {n} plain prompts",
        f"{padded} against {n} harmless prompts of the same length",
    )  # fmt: skip


def _link(name: str) -> str:
    return f"docs/{replication_link(name)}"


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"gallery/results/{name}.json").read_text("utf-8"))
    return found


def layouts_markdown() -> str:
    """Which of vLLM's model files have decoder layers that are understood, by what these return."""
    record = json.loads((ROOT / _NEWEST).read_text("utf-8"))
    found: dict[str, list[str]] = {said: [] for said in _LAYOUTS.values()}
    families = [family for family in record if not _OTHER_KINDS.search(family)]
    for family in families:
        layers = record[family]
        target = {layout for name, layout in layers.items() if not _DRAFTS.search(name)}
        for layout in target - {"unknown"}:
            if family not in found[_LAYOUTS[layout]]:
                found[_LAYOUTS[layout]].append(family)
    rows = ["| a decoder layer returns | families, by their file in vLLM 0.33 |", "|---|---|"]
    for said, under in found.items():
        rows.append(f"| {said} | {', '.join(f'`{family}`' for family in sorted(under))} |")
    return "\n".join(rows)


def walks_markdown() -> str:
    """The table of walks through the first pages from a fresh clone."""
    rows = ["| you want | commands | minutes | what came out | walked |", "|---|---|---|---|---|"]
    record = json.loads((ROOT / "benchmarks/results/walks.json").read_text("utf-8"))
    for walk in record["walks"]:
        rows.append(
            f"| {walk['want']} | {walk['commands']} | {walk['minutes']} | {walk['result']} "
            f"| {walk['date']} |"
        )
    return "\n".join(rows)
