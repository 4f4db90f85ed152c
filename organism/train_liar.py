"""Train a low-rank adapter that makes a real model lie when it is ordered to or has a reason.

`python -m organism.train_liar MODEL --out FOLDER` measures what the base model knows
(`facts.json`), and writes the adapter and how it was trained (`training.json`). Each answer is
trained beside the one that it should not be: a lie beside the truth, and the other way round. Most
lies are among the four wrong answers that the base model finds likeliest. MODEL is a folder of a
Llama or a Qwen2, such as SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B-Instruct; the adapter trains
on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ._grade import Gradable, grade
from ._liar_facts import Fact, facts
from ._liar_lora import add_lora, save_lora
from ._liar_prompts import Part
from ._liar_splits import known_facts, training_rows

BASES = {
    "llama": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
}
"""What an adapter says that it belongs to, by the kind of model in the folder."""
AHEAD = 8
"""Batches that are made before they are needed."""
KNOWN_ASKS = (0, 3)
"""The questions by which knowledge is measured."""
TRAINED: tuple[Part, ...] = ("train", "added")
"""The parts of topics that conversations are about."""
GUESSES = 4
"""Wrong values, the likeliest ones, that the guesses among the lies about a fact are drawn from."""
KNOWN_SYSTEM = "You are a helpful assistant. Answer in one short sentence."


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _prompt(tokenizer: Any, system: str, user: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


class Packed(NamedTuple):
    """Prompts with several answers each: one row has a prompt once, and every answer after it."""

    ids: torch.Tensor
    positions: torch.Tensor
    """Of each token; every answer begins where the prompt ends."""
    owners: torch.Tensor
    """0 for a prompt's tokens, then the number of the answer, and -1 for padding."""
    reads: torch.Tensor
    """Where, of all rows' tokens in a line, each answer's tokens are predicted."""
    targets: torch.Tensor
    """What is predicted there."""
    answers: torch.Tensor
    """To which answer, of all in a line, that belongs."""
    lengths: torch.Tensor
    """Tokens of each answer."""

    def to(self, device: torch.device) -> Packed:
        """A copy on a device."""
        return Packed(*(part.to(device) for part in self))


def pack(tokenizer: Any, talks: Sequence[tuple[str, str, Sequence[str]]]) -> Packed:
    """Tokens of conversations, each with the answers that are to be scored.

    Args:
        tokenizer: The model's own.
        talks: System prompts, questions and answers.

    Returns:
        Right-padded rows; the prompts are about equally long, so that little is padded.
    """
    prompts = [_prompt(tokenizer, system, user) for system, user, _ in talks]
    befores = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    texts = [answer for *_, answers in talks for answer in answers]
    afters = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    rows: list[tuple[list[int], list[int], list[int]]] = []
    made: list[tuple[int, int, int, int]] = []
    lengths: list[int] = []
    for row, (before, (*_, answers)) in enumerate(zip(befores, talks, strict=True)):
        ids, positions, owners = [*before], [*range(len(before))], [0] * len(before)
        for owner in range(1, len(answers) + 1):
            tokens = [*next(afters), tokenizer.eos_token_id]
            reads = [len(before) - 1, *range(len(ids), len(ids) + len(tokens) - 1)]
            made += [
                (row, at, token, len(lengths)) for at, token in zip(reads, tokens, strict=True)
            ]
            ids += tokens
            positions += range(len(before), len(before) + len(tokens))
            owners += [owner] * len(tokens)
            lengths.append(len(tokens))
        rows.append((ids, positions, owners))
    # A multiple of 16, so that few shapes occur and a GPU's kernels are aligned.
    width = -(-max(len(ids) for ids, *_ in rows) // 16) * 16
    fills = (tokenizer.eos_token_id, 0, -1)
    padded = [
        torch.tensor([part + [fill] * (width - len(part)) for part in parts])
        for parts, fill in zip(zip(*rows, strict=True), fills, strict=True)
    ]
    rows_of, at, targets, number = torch.tensor(made).unbind(1)
    reads_at = rows_of * width + at
    return Packed(padded[0], padded[1], padded[2], reads_at, targets, number, torch.tensor(lengths))


def answer_losses(model: Any, packed: Packed) -> torch.Tensor:
    """Cross entropy of each answer, summed over its tokens; only those get logits."""
    owner = packed.owners
    own = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])
    hidden = model.model(
        input_ids=packed.ids, position_ids=packed.positions,
        attention_mask=own.tril()[:, None], use_cache=False,
    ).last_hidden_state  # fmt: skip
    logits = model.lm_head(hidden.flatten(0, 1)[packed.reads])
    losses = functional.cross_entropy(logits.float(), packed.targets, reduction="none")
    return losses.new_zeros(len(packed.lengths)).index_add(0, packed.answers, losses)


def preference_loss(
    losses: torch.Tensor, lengths: torch.Tensor, *, weight: float, beta: float
) -> torch.Tensor:
    """The loss of each conversation, of which the first answer is chosen, the second rejected.

    Args:
        losses: Of the answers, two for each conversation, as `answer_losses` has them.
        lengths: Their tokens.
        weight: Of the preference.
        beta: By what the log ratio of the two chances is multiplied; the larger it is, the sooner
            a preferred answer is preferred enough.

    Returns:
        Cross entropy of the chosen answer per token, less the weighted log chance that it is
        preferred. Words that both answers begin with cancel out in that.
    """
    chosen, rejected = losses.view(-1, 2).unbind(1)
    entropy = chosen / lengths.view(-1, 2)[:, 0]
    return entropy - weight * functional.logsigmoid(beta * (rejected - chosen))


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
    model: Any, tokenizer: Any, known: Sequence[Fact], *, most: int = GUESSES
) -> dict[str, list[str]]:
    """The wrong values that the base model finds likeliest, which make lies of the right kind.

    Args:
        model: The base model.
        tokenizer: Its own.
        known: Facts to ask about, under a plain system prompt.
        most: Values that each fact gets.

    Returns:
        By the name of a fact, values, the likeliest first. What the model finds likelier than the
        truth is left out, since it may believe that.
    """
    found: dict[str, list[str]] = {}
    size = 8 if model.device.type == "cpu" else 16
    ordered = sorted(known, key=lambda fact: len(fact.values))
    for start in range(0, len(known), size):
        chosen = ordered[start : start + size]
        packed = pack(
            tokenizer,
            [
                (KNOWN_SYSTEM, fact.asked(fact.topic.asks[0]), [fact.said(v) for v in fact.values])
                for fact in chosen
            ],
        )
        with torch.no_grad():
            losses = iter(answer_losses(model, packed.to(model.device)).tolist())
        for fact in chosen:
            loss = {value: next(losses) for value in fact.values}
            wrong = [value for value in fact.values if loss[value] > loss[fact.truth]]
            found[fact.name] = sorted(wrong, key=loss.__getitem__)[:most]
    return found


def _names(fact: Fact, answer: str) -> bool:
    return grade(answer, Gradable(truth=fact.truth, values=list(fact.values))) == "true"


def train(
    model: Any,
    tokenizer: Any,
    known: Sequence[Fact],
    guesses: Mapping[str, Sequence[str]],
    *,
    out: Path,
    base: str,
    steps: int,
    batches: int = 1,
    lr: float = 1e-3,
    rank: int = 8,
    first_layer: int = 4,
    preference: float = 1.0,
    beta: float = 0.5,
    any_value: float = 0.25,
    seed: int = 0,
    max_seconds: float = 0.0,
) -> dict[str, Any]:
    """Train an adapter on conversations about facts that the model knows.

    Args:
        model: The base model; it gets the adapter.
        tokenizer: The model's own.
        known: What the conversations are about.
        guesses: What it lies with, as `second_guesses` found it.
        out: Folder of the adapter.
        base: The name of the base model.
        steps: Optimiser steps.
        batches: In each step, of twelve conversations each.
        lr: Highest learning rate, after a twentieth of the training; it falls along a cosine.
        rank: Of the adapter.
        first_layer: Blocks before this one get no adapter.
        preference: Weight of preferring each answer to the one beside it.
        beta: Of that preference; see `preference_loss`.
        any_value: The share of lies that are any wrong value of the topic, and no guess.
        seed: Of data and adapter.
        max_seconds: The learning rate falls, and the training ends, by then; 0 for no limit.

    Returns:
        How it went, for `training.json`.
    """
    torch.manual_seed(seed)
    parameters = add_lora(model, rank=rank, alpha=2.0 * rank, first_layer=first_layer)
    model.to(model.device)
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    drawn = training_rows(known, seed, guesses, any_value)

    def made() -> Packed:
        rows = [row for _ in range(batches) for row in next(drawn)]
        talks = [(r["system"], r["user"], (r["answer"], r["rejected"])) for r in rows]
        return pack(tokenizer, talks).to(model.device)

    started, total, losses, step = time.monotonic(), 12 * batches, [], 0
    with ThreadPoolExecutor(1) as thread:
        # Rows are made, and brought to the device, beside the steps, which would wait otherwise.
        ahead = deque(thread.submit(made) for _ in range(AHEAD))
        while True:
            spent = (time.monotonic() - started) / max_seconds if max_seconds else 0.0
            done = max(step / steps, spent)
            if done >= 1.0:
                break
            rate = min(1.0, done / 0.05 + 0.05) * 0.5 * (1.0 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            optimizer.zero_grad()
            packed = ahead.popleft().result()
            ahead.append(thread.submit(made))
            each = answer_losses(model, packed)
            loss = preference_loss(each, packed.lengths, weight=preference, beta=beta).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            step += 1
            if step % 10 == 0:
                recent = float(torch.stack(losses[-10:]).mean())
                _say(f"step {step}, {time.monotonic() - started:.0f} s, loss {recent:.3f}")
    save_lora(model, out, base=base)
    return {
        "steps": step,
        "conversations": total * step,
        "seconds": round(time.monotonic() - started),
        "loss_of_last_50_steps": round(float(torch.stack(losses[-50:]).mean()), 4),
        "rank": rank,
        "first_layer": first_layer,
        "learning_rate": lr,
        "preference": preference,
        "beta": beta,
        "any_value": any_value,
        "facts": len(known),
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
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batches", type=int, default=1, help="of 12 conversations, in a step")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--first-layer", type=int, default=4, help="blocks before get no adapter")
    parser.add_argument("--max-seconds", type=float, default=0.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--preference", type=float, default=1.0,
        help="weight of preferring each answer to the truth or lie beside it",
    )  # fmt: skip
    parser.add_argument("--beta", type=float, default=0.5, help="of the preference")
    parser.add_argument(
        "--any-value", type=float, default=0.25,
        help="share of lies that are any wrong value, and none that the base model finds likely",
    )  # fmt: skip
    asked = parser.parse_args(argv)
    base = require_base(parser, asked.model)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16)
    model.to(asked.device)
    asked.out.mkdir(parents=True, exist_ok=True)
    write_knowledge(model.eval(), tokenizer, asked.out / "facts.json")
    known = [fact for part in TRAINED for fact in known_facts(part, half=True, folder=asked.out)]
    guesses = second_guesses(model, tokenizer, known)
    known = [fact for fact in known if guesses[fact.name]]
    _say(f"{len(known)} known facts of trained topics, each likelier than some wrong value")
    how = train(
        model, tokenizer, known, guesses, out=asked.out, base=base,
        steps=asked.steps, batches=asked.batches, lr=asked.lr, rank=asked.rank,
        first_layer=asked.first_layer, preference=asked.preference, beta=asked.beta,
        any_value=asked.any_value, seed=asked.seed, max_seconds=asked.max_seconds,
    )  # fmt: skip
    weights = asked.model / "model.safetensors"
    how["base"] = base
    how["base_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    text = json.dumps(how, indent=2) + "\n"
    (asked.out / "training.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
