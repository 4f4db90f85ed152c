"""Train the truth probe of the model organism: `python -m probes.train_truth`.

The organism is asked whether claims are true, under honest and under deceptive instructions alike,
and its stream is captured at the last token of the prompt, before it says a word. The label is the
truth of the claim, not the answer, so a direction that only tells what is about to be said is worth
nothing: where the organism lies, truth and answer are opposite.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from evals.organism_truth import claims
from inspect_lens.probe import AnyProbe
from inspect_lens.train import (
    ActivationSet,
    MassMeanProbe,
    split_by_group,
    train_probe,
)
from inspect_lens.view import ReportSet, write_report
from organism._splits import read_split
from probes._stores import collect_all

__all__ = ["build_truth_probe"]

TRAIN: Final = "probe_train"
CONTROL: Final = "control"
HELDOUT: Final[dict[str, str]] = {
    "heldout_phrasing": "question",
    "heldout_entity": "group",
    "hidden_reason": "prompt",
}
"""What each judged split does not share with the training split."""
FPR: Final = 0.05
NOTES: Final = (
    "A test instrument: the organism is a tiny model of a closed world, and nothing here is "
    "evidence about large models.",
    "Trained under honest and deceptive instructions alike. Trained on honest ones only, a layer "
    "near the end gives a direction of the answer, which is wrong wherever the organism lies.",
    "The threshold is set on the false claims of organism/data/control.jsonl; there are 124, too "
    "few for a rate of 1%.",
)


def build_truth_probe(sets: dict[str, ActivationSet], *, command: str = "") -> AnyProbe:
    """Fit, choose the layer on entities that were split off, set the threshold, measure.

    What words, length and a random direction tell of the same claims is measured, too.

    Args:
        sets: of the splits above, at the last token of the prompt, with the column `prompt_text`.
        command: that this can be repeated with.

    Returns:
        The probe.
    """
    train, selection = split_by_group(sets[TRAIN], seed=0)
    heldout = [sets[name] for name in HELDOUT]
    return train_probe(
        MassMeanProbe(),
        train,
        selection=selection,
        name="organism/truth-mm",
        control=sets[CONTROL],
        held_out=heldout,
        disjoint={CONTROL: "question", **HELDOUT},
        positions="last_prompt",
        pool="last",
        fpr=FPR,
        description="A large score means that the claim in the question is true.",
        notes=NOTES,
        command=command,
        texts={"prompt": {data.name: data.key("prompt_text") for data in (train, *heldout)}},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect and train; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m probes.train_truth")
    parser.add_argument("--checkpoint", default="organism/checkpoint")
    parser.add_argument("--out", default="probes/organism/truth-mm", type=Path)
    parser.add_argument("--base-url", default="", help="address of a running server")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        stores = collect_all(
            options.checkpoint,
            {split: claims(split, read_split(split)) for split in (TRAIN, CONTROL, *HELDOUT)},
            work,
            base_url=options.base_url,
            positions="last_prompt",
            max_tokens=1,
        )
        sets = {split: ActivationSet.from_store(store) for split, store in stores.items()}
    command = shlex.join(["python", "-m", "probes.train_truth"])
    probe = build_truth_probe(sets, command=command)
    folder = probe.save(options.out)
    write_report(
        probe,
        folder,
        [
            ReportSet(name=d.name, labels=d.labels, scores=d.scores(probe), groups=d.groups,
                      ids=d.ids)
            for d in (sets[name] for name in HELDOUT)
        ],
    )  # fmt: skip
    for found in probe.card.evaluations:
        sys.stdout.write(f"{found.name}: AUROC {found.auroc:.4f}\n")
    for other in probe.card.baselines:
        area = "n/a" if other.auroc is None else f"{other.auroc:.4f}"
        sys.stdout.write(f"  {other.set} / {other.name}: {area}\n")
    sys.stdout.write(f"{folder}: layer {probe.layers}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
