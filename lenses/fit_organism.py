"""Fit the lenses of the model organism: `python -m lenses.fit_organism`.

Texts are prompts of `probe_train` and `control` with the organism's own greedy answers, and
held-out texts those of `heldout_phrasing`. Both lenses are stored in 16 bits.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from inspect_lens.lens import Lens
from inspect_lens.probe import ModelRef, fingerprint_model
from inspect_lens.train import fit_jacobian_lens, fit_tuned_lens
from organism._model import load_model, load_tokenizer
from organism._splits import read_split
from organism.evaluate import complete

__all__ = ["answered", "main"]

CHECKPOINT: Final = "organism/checkpoint"
DATASET: Final = "organism probe_train and control, with its own answers"
NOTE: Final = (
    "A test instrument: the organism is a tiny model of a closed world, and nothing here is "
    "evidence about large models."
)


def answered(model: Any, tokenizer: Any, split: str, n: int) -> list[list[int]]:
    """Token ids of some prompts of a split and the model's greedy answers.

    Args:
        model: the organism.
        tokenizer: its tokenizer.
        split: of its data.
        n: prompts, drawn at random.

    Returns:
        Each text once, in the order of the split.
    """
    rows = read_split(split)
    drawn = np.random.default_rng(0).permutation(len(rows))[:n]
    rows = [rows[i] for i in sorted(drawn.tolist())]
    texts: dict[tuple[int, ...], None] = {}
    for row, answer in zip(rows, complete(model, tokenizer, rows), strict=True):
        prompt = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True
        )
        texts[tuple(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])] = None
    return [list(text) for text in texts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and write.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=("tuned", "jacobian"), action="append")
    parser.add_argument("--prompts", type=int, default=480, help="of probe_train, for tuned")
    parser.add_argument("--jacobian-prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="lenses/organism")
    options = parser.parse_args(arguments)
    model: Any = load_model(Path(CHECKPOINT), device=torch.device("cpu"))
    tokenizer = load_tokenizer(Path(CHECKPOINT))
    held_out = answered(model, tokenizer, "heldout_phrasing", 96)
    about: dict[str, Any] = {
        "held_out": held_out,
        "dataset": DATASET,
        "model_ref": ModelRef(name=CHECKPOINT, sha256=fingerprint_model(CHECKPOINT)),
        "command": shlex.join(["python", "-m", "lenses.fit_organism", *sys.argv[1:]]),
    }
    for kind in options.kind or ("tuned", "jacobian"):
        n = options.prompts if kind == "tuned" else options.jacobian_prompts
        texts = answered(model, tokenizer, "probe_train", n)
        texts += answered(model, tokenizer, "control", n // 2)
        if kind == "tuned":
            lens = fit_tuned_lens(
                model, texts, name="organism/tuned", steps=options.steps, lr=3e-3, **about
            )
        else:
            texts = [text for text in texts if len(text) >= 16]
            lens = fit_jacobian_lens(
                model, texts, name="organism/jacobian", skip_first=8, block=128, **about
            )
        card = lens.card.model_copy(update={"notes": (NOTE,)})
        half = Lens(matrix=lens.matrix.astype(np.float16), bias=lens.bias, card=card)
        folder = half.save(Path(options.out) / kind)
        for quality in card.quality:
            sys.stdout.write(f"{folder} {quality.model_dump_json()}\n")


if __name__ == "__main__":
    main()
