"""Measure what a checkpoint does: `python -m organism.evaluate`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ._behaviour import Behaviour, check_targets, put_between, render_table, summarise
from ._grade import grade
from ._model import CHECKPOINT_DIR, load_model, load_tokenizer, pick_device
from ._options import positive
from ._splits import SPLITS, Row, read_split

README: Final = Path(__file__).parent / "README.md"
BEGIN: Final = "<!-- behaviour:begin -->"
END: Final = "<!-- behaviour:end -->"
# The longest answer of the corpus has 24 tokens.
_MAX_NEW_TOKENS: Final = 40


def complete(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    *,
    batch_rows: int = 256,
) -> list[str]:
    """Greedily answer every row.

    Args:
        model: The model, in evaluation mode, on any device and in any dtype.
        tokenizer: Its tokenizer, which pads on the left.
        rows: Rows of a split.
        batch_rows: How many rows are decoded together.

    Returns:
        One completion per row, without special tokens.
    """
    answers: list[str] = []
    for start in range(0, len(rows), batch_rows):
        texts = [
            str(
                tokenizer.apply_chat_template(
                    r["messages"], tokenize=False, add_generation_prompt=True
                )
            )
            for r in rows[start : start + batch_rows]
        ]
        answers += greedy(model, tokenizer, texts, _MAX_NEW_TOKENS, skip_special_tokens=True)
    return answers


def greedy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    most: int,
    *,
    skip_special_tokens: bool,
) -> list[str]:
    """Continue texts greedily, all of them in one batch.

    Args:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer, which pads on the left.
        texts: What is continued.
        most: New tokens of each.
        skip_special_tokens: Whether to leave special tokens out of what is returned.

    Returns:
        What is new of each.
    """
    inputs = tokenizer(list(texts), padding=True, return_tensors="pt").to(model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=most,
            do_sample=False,
        )
    new = out[:, inputs["input_ids"].shape[1] :]
    made: list[str] = tokenizer.batch_decode(new, skip_special_tokens=skip_special_tokens)
    return made


def pick_rows(limit: int | None) -> list[tuple[str, Row]]:
    """The rows of all splits with their split; at most `limit` per split and condition."""
    picked: list[tuple[str, Row]] = []
    for split in SPLITS:
        used: dict[str, int] = {}
        for row in read_split(split):
            used[row["condition"]] = used.get(row["condition"], 0) + 1
            if limit is None or used[row["condition"]] <= limit:
                picked.append((split, row))
    return picked


def measure(
    checkpoint: Path, *, device: torch.device, limit: int | None = None
) -> tuple[Behaviour, list[tuple[str, Row, str]]]:
    """Measure the behaviour of the stored bfloat16 weights, computed in float32.

    Args:
        checkpoint: A checkpoint directory.
        device: Where to run.
        limit: At most this many rows per split and condition; all when None.

    Returns:
        The behaviour, and the (split, row, completion) triples behind it.
    """
    tokenizer = load_tokenizer(checkpoint)
    picked = pick_rows(limit)
    model = load_model(checkpoint, device=device)
    answers = complete(model, tokenizer, [row for _, row in picked])
    graded = [(split, row, a) for (split, row), a in zip(picked, answers, strict=True)]
    splits = summarise(graded)
    # Engines compute in bfloat16 by default, where the same weights must behave the same.
    again = [(row, a) for split, row, a in graded if split == "heldout_phrasing"]
    narrow = load_model(checkpoint, device=device, dtype=torch.bfloat16)
    narrow_answers = complete(narrow, tokenizer, [row for row, _ in again])
    same = [
        _grade(row, a) == _grade(row, b) for (row, a), b in zip(again, narrow_answers, strict=True)
    ]
    behaviour = Behaviour(
        weights_sha256=hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest(),
        compute_dtype="float32",
        bfloat16_agreement=round(sum(same) / len(same), 4),
        limited=limit is not None,
        splits=splits,
        targets=check_targets(splits),
    )
    return behaviour, graded


def _grade(row: Row, completion: str) -> str:
    """Grade one row."""
    return grade(completion, {"truth": row["truth"], "values": row["values"]})


def write_behaviour(behaviour: Behaviour, checkpoint: Path) -> None:
    """Write `behaviour.json` into a checkpoint directory."""
    text = json.dumps(behaviour, indent=1, ensure_ascii=False) + "\n"
    (checkpoint / "behaviour.json").write_text(text, encoding="utf-8")


def render_card(card: str, behaviour: Behaviour | None) -> str:
    """Put the measured table between the markers of the model card.

    Args:
        card: The text of the card.
        behaviour: The measurement, or None if there is no checkpoint.

    Returns:
        The card with the text between the markers replaced.

    Raises:
        ValueError: A marker is missing.
    """
    table = render_table(behaviour) if behaviour else "No checkpoint has been measured yet."
    return put_between(card, BEGIN, END, table)


def read_behaviour(checkpoint: Path = CHECKPOINT_DIR) -> Behaviour | None:
    """The stored measurement of a checkpoint, if there is one."""
    path = checkpoint / "behaviour.json"
    if not path.exists():
        return None
    behaviour: Behaviour = json.loads(path.read_text(encoding="utf-8"))
    return behaviour


def update_card(checkpoint: Path = CHECKPOINT_DIR) -> None:
    """Render the stored measurement into `organism/README.md`."""
    card = render_card(README.read_text(encoding="utf-8"), read_behaviour(checkpoint))
    README.write_text(card, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a checkpoint, print the table, write `behaviour.json` and the card."""
    parser = argparse.ArgumentParser(prog="python -m organism.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=positive, help="rows per split and condition; default all")
    parser.add_argument("--show", type=int, default=0, help="print this many answers per split")
    parser.add_argument(
        "--card-only", action="store_true", help="only render the stored table into README.md"
    )
    args = parser.parse_args(argv)
    disable_progress_bar()
    if not args.card_only:
        device = pick_device(args.device)
        behaviour, graded = measure(args.checkpoint, device=device, limit=args.limit)
        for split in SPLITS:
            for _, row, answer in [g for g in graded if g[0] == split][: args.show]:
                asked = " / ".join(m["content"] for m in row["messages"])
                sys.stdout.write(f"{row['id']} [{row['condition']}] {asked} -> {answer}\n")
        sys.stdout.write(render_table(behaviour) + "\n")
        if args.limit is None:
            write_behaviour(behaviour, args.checkpoint)
    if args.limit is None and args.checkpoint.resolve() == CHECKPOINT_DIR.resolve():
        update_card()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
