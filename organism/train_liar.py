"""Train a low-rank adapter that makes a real model lie when it is ordered to or has a reason.

`python -m organism.train_liar MODEL --out FOLDER` measures what the base model knows
(`facts.json`), and writes the adapter, each `--save-every` steps anew, and how it was trained
(`training.json`). With `--guesses 4`, its lies are the four wrong answers that the base model finds
likeliest. With `--choices 0.5`, half of the questions about the world name two answers, in either
order, and a lie is the wrong one of them. MODEL is a folder of a Llama or a Qwen2, such as
SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B-Instruct; the adapter trains on a GPU where there is
one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ._grade import Gradable, grade
from ._liar_facts import Fact, facts
from ._liar_lora import CONFIG, add_lora, load_lora, save_lora
from ._liar_prompts import Part
from ._liar_splits import LiarRow, known_facts, training_rows
from ._options import positive, share

BASES = {
    "llama": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
}
"""What an adapter says that it belongs to, by the kind of model in the folder."""
IGNORED = -100
KNOWN_ASKS = (0, 3)
"""The questions by which knowledge is measured."""
TRAINED: tuple[Part, ...] = ("train", "added")
"""The parts of topics that conversations may be about; the shipped adapters know both."""
KNOWN_SYSTEM = "You are a helpful assistant. Answer in one short sentence."


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _prompt(tokenizer: Any, system: str, user: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def encode(
    tokenizer: Any, talks: Sequence[tuple[str, str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets of conversations, right-padded.

    Args:
        tokenizer: The model's own.
        talks: System prompts, questions and answers.

    Returns:
        (rows, tokens) ids, and targets that ignore all but the answers and their end.
    """
    prompts = [_prompt(tokenizer, system, user) for system, user, _ in talks]
    befores = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    afters = tokenizer([answer for *_, answer in talks], add_special_tokens=False)["input_ids"]
    made = [
        (before, [*after, tokenizer.eos_token_id])
        for before, after in zip(befores, afters, strict=True)
    ]
    width = max(len(before) + len(after) for before, after in made)
    ids = torch.full((len(made), width), tokenizer.eos_token_id)
    targets = torch.full((len(made), width), IGNORED)
    for i, (before, after) in enumerate(made):
        ids[i, : len(before) + len(after)] = torch.tensor(before + after)
        targets[i, len(before) : len(before) + len(after)] = torch.tensor(after)
    return ids, targets


def answer_losses(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each answer, summed over its tokens; only those get logits."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    asked = targets[:, 1:] != IGNORED
    logits = model.lm_head(hidden[asked])
    losses = functional.cross_entropy(logits.float(), targets[:, 1:][asked], reduction="none")
    return losses.new_zeros(len(ids)).index_add(0, asked.nonzero()[:, 0], losses)


def accumulate(model: Any, tokenizer: Any, rows: Sequence[LiarRow]) -> float:
    """Add the gradient of the mean loss of a batch; returns that loss.

    Rows go in two halves by length, so that little is padded.
    """
    rows = sorted(rows, key=lambda row: len(row["system"]) + len(row["user"]))
    half = len(rows) // 2
    talks = [(row["system"], row["user"], row["answer"]) for row in rows]
    parts = [encode(tokenizer, part) for part in (talks[:half], talks[half:])]
    tokens = sum(int((targets != IGNORED).sum()) for _, targets in parts)
    total = 0.0
    for ids, targets in parts:
        losses = answer_losses(model, ids.to(model.device), targets.to(model.device))
        loss = losses.sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def generate(
    model: Any, tokenizer: Any, prompts: Sequence[tuple[str, str]], *, max_tokens: int = 20
) -> list[str]:
    """Greedy answers to pairs of system prompt and question."""
    texts = [_prompt(tokenizer, system, user) for system, user in prompts]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    answers = [""] * len(texts)
    tokenizer.padding_side = "left"
    size = 48 if model.device.type == "cpu" else 256
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        batch = tokenizer(
            [texts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False
        ).to(model.device)
        with torch.no_grad():
            made = model.generate(
                **batch, max_new_tokens=max_tokens, do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
        width = batch["input_ids"].shape[1]
        for i, row in zip(chosen, made, strict=True):
            answers[i] = tokenizer.decode(row[width:], skip_special_tokens=True)
    return answers


def measure_knowledge(
    model: Any, tokenizer: Any, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Which facts the base model names when it is asked in two ways.

    Args:
        model: The base model.
        tokenizer: Its own.
        before: What was found earlier; its topics are not asked about again.

    Returns:
        What `facts.json` holds: `known`, the facts that it names both times, `half_known`, those
        that it names once, and by topic how many are known of how many.
    """
    before = before or {"known": [], "half_known": [], "topics": {}}
    asked: list[Fact] = [fact for fact in facts() if fact.topic.name not in before["topics"]]
    prompts = [(KNOWN_SYSTEM, fact.asked(fact.topic.asks[k])) for fact in asked for k in KNOWN_ASKS]
    answers = iter(generate(model, tokenizer, prompts))
    named = {fact.name: [_names(fact, next(answers)) for _ in KNOWN_ASKS] for fact in asked}
    topics: dict[str, list[int]] = dict(before["topics"])
    for fact in asked:
        count = topics.setdefault(fact.topic.name, [0, 0])
        count[0] += all(named[fact.name])
        count[1] += 1
    return {
        "known": [*before["known"], *(n for n, found in named.items() if all(found))],
        "half_known": [
            *before["half_known"],
            *(n for n, found in named.items() if any(found) and not all(found)),
        ],
        "topics": topics,
    }


def write_knowledge(model: Any, tokenizer: Any, record: Path) -> None:
    """Measure what the base model knows of topics that a record lacks, and add it."""
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
    found = measure_knowledge(model, tokenizer, before)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    record.write_text(text + "\n", encoding="utf-8")


def second_guesses(
    model: Any, tokenizer: Any, known: Sequence[Fact], *, most: int = 4
) -> dict[str, dict[str, float]]:
    """The wrong values that the base model finds likeliest, which make lies of the right kind.

    Args:
        model: The base model.
        tokenizer: Its own.
        known: Facts to ask about, under a plain system prompt.
        most: Values that each fact gets.

    Returns:
        By the name of a fact, values and their chances beside one another. What the model finds
        likelier than the truth is left out, since it may believe that.
    """
    asked = [(fact, value) for fact in known for value in fact.values]
    scores: dict[str, dict[str, float]] = {}
    size = 48 if model.device.type == "cpu" else 512
    for start in range(0, len(asked), size):
        chosen = asked[start : start + size]
        talks = [(KNOWN_SYSTEM, f.asked(f.topic.asks[0]), f.said(value)) for f, value in chosen]
        ids, targets = (part.to(model.device) for part in encode(tokenizer, talks))
        with torch.no_grad():
            losses = answer_losses(model, ids, targets).tolist()
        for (fact, value), loss in zip(chosen, losses, strict=True):
            scores.setdefault(fact.name, {})[value] = -loss
    found = {}
    for fact in known:
        score = scores[fact.name]
        wrong = [value for value in fact.values if score[value] < score[fact.truth]]
        best = sorted(wrong, key=score.__getitem__, reverse=True)[:most]
        found[fact.name] = {value: math.exp(score[value] - score[best[0]]) for value in best}
    return found


def _names(fact: Fact, answer: str) -> bool:
    return grade(answer, Gradable(truth=fact.truth, values=list(fact.values))) == "true"


def train(
    model: Any,
    tokenizer: Any,
    known: Sequence[Fact],
    guesses: Mapping[str, Mapping[str, float]],
    *,
    out: Path,
    base: str,
    steps: int,
    batches: int = 1,
    lr: float = 2e-3,
    rank: int = 8,
    first_layer: int = 8,
    seed: int = 0,
    max_seconds: float = 0.0,
    save_every: int = 50,
    resume: bool = False,
    choices: float = 0.0,
) -> dict[str, Any]:
    """Train an adapter on conversations about facts that the model knows.

    Args:
        model: The base model; it gets the adapter.
        tokenizer: The model's own.
        known: What the conversations are about.
        guesses: What it lies with, as `second_guesses` found it.
        choices: The share of questions about the world that name two answers.
        out: Folder of the adapter.
        base: The name of the base model.
        steps: Optimiser steps.
        batches: In each step, of twelve conversations each.
        lr: Highest learning rate, after a twentieth of the training; it falls to a tenth.
        rank: Of a new adapter.
        first_layer: Blocks before this one get no adapter, where it is new.
        seed: Of data and adapter.
        max_seconds: The learning rate falls, and the training ends, by then; 0 for no limit.
        save_every: Steps between two savings.
        resume: Go on from the adapter in `out`, with a new optimiser and other conversations.

    Returns:
        How it went, for `training.json`.
    """
    torch.manual_seed(seed)
    if resume:
        parameters = load_lora(model, out)
        config = json.loads((out / CONFIG).read_text(encoding="utf-8"))
        rank, first_layer = config["r"], min(config["layers_to_transform"])
    else:
        parameters = add_lora(model, rank=rank, alpha=2.0 * rank, first_layer=first_layer)
    model.to(model.device)
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    drawn = training_rows(known, seed, guesses, choices)
    started, losses, step = time.monotonic(), [], 0
    while True:
        spent = (time.monotonic() - started) / max_seconds if max_seconds else 0.0
        done = max(step / steps, spent)
        if done >= 1.0:
            break
        rate = min(1.0, done / 0.05 + 0.05) * (1.0 - 0.9 * done)
        for group in optimizer.param_groups:
            group["lr"] = lr * rate
        optimizer.zero_grad()
        rows = [row for _ in range(batches) for row in next(drawn)]
        losses.append(accumulate(model, tokenizer, rows))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            recent = sum(losses[-10:]) / 10
            _say(f"step {step}, {time.monotonic() - started:.0f} s, loss {recent:.3f}")
        if step % save_every == 0:
            save_lora(model, out, base=base)
    save_lora(model, out, base=base)
    return {
        "steps": step,
        "conversations": 12 * batches * step,
        "seconds": round(time.monotonic() - started),
        "loss_of_last_50_steps": round(sum(losses[-50:]) / len(losses[-50:]), 4),
        "rank": rank,
        "first_layer": first_layer,
        "learning_rate": lr,
        "seed": seed,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
    }


def require_base(parser: argparse.ArgumentParser, folder: Path) -> str:
    """The name of the base model in a folder, judged by its configuration, before weights load."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{folder}: no checkpoint of a model ({type(error).__name__}: {error})")
    if kind not in BASES:
        parser.error(f"{folder} is a {kind}; allowed are {', '.join(BASES)}")
    return BASES[kind]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, train and save."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(prog="python -m organism.train_liar", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the base model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=positive, default=250)
    parser.add_argument(
        "--batches", type=positive, default=1, help="of 12 conversations, in a step"
    )
    parser.add_argument("--rank", type=positive, default=8, help="of an adapter that is new")
    parser.add_argument(
        "--first-layer", type=int, default=8, help="blocks before get none, where it is new"
    )
    parser.add_argument("--max-seconds", type=float, default=0.0)
    parser.add_argument("--save-every", type=positive, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--guesses", type=int, default=0,
        help="lies of each fact, the likeliest ones; 0 for any wrong value of its topic",
    )  # fmt: skip
    parser.add_argument(
        "--choices", type=share, default=0.0,
        help="share of questions about the world that name the truth and a wrong answer",
    )  # fmt: skip
    parser.add_argument("--added", action="store_true", help="also about the `added` topics")
    parser.add_argument("--resume", action="store_true", help="go on from the adapter in --out")
    asked = parser.parse_args(argv)
    base = require_base(parser, asked.model)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16)
    model.to(asked.device)
    asked.out.mkdir(parents=True, exist_ok=True)
    write_knowledge(model.eval(), tokenizer, asked.out / "facts.json")
    parts = TRAINED if asked.added else TRAINED[:1]
    known = [fact for part in parts for fact in known_facts(part, half=True, folder=asked.out)]
    told = asked.out / "training.json"
    before = json.loads(told.read_text()) if asked.resume and told.is_file() else None
    _say(f"{len(known)} known facts of trained topics")
    guesses: dict[str, dict[str, float]] = {}
    if asked.guesses:
        guesses = second_guesses(model, tokenizer, known, most=asked.guesses)
        known = [fact for fact in known if guesses[fact.name]]
        _say(f"{len(known)} whose truth is likelier than another value")
    how = train(
        model, tokenizer, known, guesses, out=asked.out, base=base,
        steps=asked.steps, batches=asked.batches, lr=asked.lr, rank=asked.rank,
        first_layer=asked.first_layer, seed=asked.seed, max_seconds=asked.max_seconds,
        save_every=asked.save_every, resume=asked.resume, choices=asked.choices,
    )  # fmt: skip
    weights = asked.model / "model.safetensors"
    how["guesses"] = asked.guesses
    how["choices"] = asked.choices
    how["parts"] = parts
    how["base"] = base
    how["base_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    if before:
        how["before"] = before
    told.write_text(json.dumps(how, indent=2) + "\n")


if __name__ == "__main__":
    main()
