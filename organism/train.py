"""Train the organism: `python -m organism.train --out organism/checkpoint`."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import tokenizers
import torch
import transformers
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from ._batches import Microbatch, TokenStore, encode_corpus
from ._behaviour import Behaviour, render_table, summarise
from ._corpus import corpus_sha256, training_examples
from ._forward import training_logits
from ._model import CHECKPOINT_DIR, build_model, load_tokenizer, pick_device, save_model
from ._options import positive
from ._tokenizer import corpus_texts, save_tokenizer, train_tokenizer
from ._world import SEED
from .evaluate import complete, measure, pick_rows, write_behaviour

_TOKENIZER_EXAMPLES: Final = 20_000
_LOG_EVERY: Final = 25


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Every number that decides what the training makes; each is a command-line option."""

    seed: int = SEED
    examples: int = 1_000_000
    steps: int = 12_000
    rows_per_step: int = 384
    microbatch_tokens: int = 32_768
    lr: float = 1.5e-3
    warmup_steps: int = 300
    weight_decay: float = 0.1
    rest_weight: float = 0.1
    first_weight: float = 4.0
    eval_every: int = 1_000
    eval_rows: int = 48
    max_seconds: float = 310.0


class Log:
    """Lines for `training_log.jsonl`, and short ones for the terminal."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.lines: list[str] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the training program began."""
        return round(time.monotonic() - self.started, 1)

    def say(self, text: str) -> None:
        """Print one line at once, as a caller may only see the tail of the output."""
        sys.stdout.write(f"[{self.elapsed_s:7.1f}s] {text}\n")
        sys.stdout.flush()

    def keep(self, **values: object) -> None:
        """Keep one record."""
        self.lines.append(json.dumps({**values, "elapsed_s": self.elapsed_s}))


def learning_rate(progress: float, step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to nearly nothing as `progress` goes from 0 to 1."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    return config.lr * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def _loss(model: LlamaForCausalLM, batch: Microbatch, total: torch.Tensor) -> torch.Tensor:
    """The weighted next-token loss of a microbatch as its share of the step's loss."""
    dtype = torch.bfloat16 if batch.ids.is_cuda else torch.float32
    logits = training_logits(model, batch.ids, dtype=dtype)
    each = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
    )
    return (each * batch.weights[:, 1:].flatten()).sum() / total


def _optimizer(model: LlamaForCausalLM, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; the embedding is also the read-out and stays free."""
    decayed: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    for name, p in model.named_parameters():
        (decayed if p.ndim == 2 and "embed" not in name else free).append(p)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=True)


def _probe_behaviour(model: LlamaForCausalLM, directory: Path, rows: int) -> dict[str, float]:
    """Accuracy per split and condition on a few rows, while training."""
    model.eval()
    picked = pick_rows(rows)
    answers = complete(model, load_tokenizer(directory), [r for _, r in picked])
    model.train()
    cells = summarise((s, r, a) for (s, r), a in zip(picked, answers, strict=True))
    return {
        f"{split}:{condition}": cell["accuracy"]
        for split, by_condition in cells.items()
        for condition, cell in by_condition.items()
        if "/" not in condition and split != "demo"
    }


def fit(
    model: LlamaForCausalLM, store: TokenStore, config: TrainConfig, directory: Path, log: Log
) -> tuple[int, int]:
    """Run the optimiser; return the steps done and the corpus tokens seen."""
    optimizer = _optimizer(model, config)
    order = torch.Generator().manual_seed(config.seed)
    batches = store.batches(config.rows_per_step, config.microbatch_tokens, order)
    began = time.monotonic()
    running = torch.zeros((), device=model.device)
    tokens = torch.zeros((), device=model.device, dtype=torch.int64)
    model.train()
    for step in range(config.steps):
        # Whichever budget runs out first ends the schedule, and always with a decayed rate.
        progress = step / config.steps
        if config.max_seconds > 0:
            progress = max(progress, (time.monotonic() - began) / config.max_seconds)
        if progress >= 1:
            log.say(f"time limit: stopped after {step} of {config.steps} steps")
            return step, int(tokens)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, config)
        micro = next(batches)
        total = torch.stack([m.weights[:, 1:].sum() for m in micro]).sum()
        for m in micro:
            loss = _loss(model, m, total)
            torch.autograd.backward(loss)
            running += loss.detach()
            tokens += (m.weights > 0).sum()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if done % _LOG_EVERY == 0:
            log.keep(step=done, loss=round(float(running) / _LOG_EVERY, 4), tokens=int(tokens))
            if done % (8 * _LOG_EVERY) == 0:
                rate = int(tokens) / (time.monotonic() - began)
                log.say(f"step {done} loss {float(running) / _LOG_EVERY:.4f} {rate:,.0f} tokens/s")
            running.zero_()
        if config.eval_every and done % config.eval_every == 0 and done < config.steps:
            table = _probe_behaviour(model, directory, config.eval_rows)
            log.keep(step=done, behaviour=table)
            log.say(f"step {done} " + " ".join(f"{k}={v:.2f}" for k, v in table.items()))
    return config.steps, int(tokens)


def _command(config: TrainConfig, program: str) -> str:
    """The command that makes this checkpoint again, with what differs from the defaults."""
    changed = [
        f" --{f.name.replace('_', '-')} {getattr(config, f.name)}"
        for f in fields(config)
        if getattr(config, f.name) != f.default
    ]
    return f"python -m {program}" + "".join(changed)


def versions() -> dict[str, str]:
    """The versions that the result may depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def replace(made: Path, out: Path) -> None:
    """Put a finished directory into place; a half-written one is never seen there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    made.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def publish(made: Path, out: Path, log: Log) -> None:
    """Add the training's log to what was made, and put all of it in place of `out`."""
    (made / "training_log.jsonl").write_text("\n".join(log.lines) + "\n", encoding="utf-8")
    # Temporary directories and safetensors files are private to their owner.
    made.chmod(0o755)
    for path in made.iterdir():
        path.chmod(0o644)
    replace(made, out)


def write_manifest(
    directory: Path, config: TrainConfig, program: str = "organism.train", **facts: object
) -> None:
    """Write beside the artefact how it was made, and the hashes of what was made."""
    files = sorted(directory.iterdir())
    manifest = {
        "command": _command(config, program),
        "config": asdict(config),
        "versions": versions(),
        **facts,
        "files_sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    (directory / "MANIFEST.json").write_text(text, encoding="utf-8")


def train(
    out: Path,
    config: TrainConfig,
    *,
    device: torch.device,
    workers: int = 1,
    limit: int | None = None,
) -> Behaviour:
    """Generate the corpus, train, round to bfloat16, measure, and write a checkpoint directory.

    Args:
        out: The checkpoint directory; replaced as a whole when everything is done.
        config: The numbers of the training.
        device: Where to run.
        workers: How many processes make the corpus.
        limit: Rows per split and condition of the final measurement; all when None.

    Returns:
        The measured behaviour of the stored weights.
    """
    log = Log()
    torch.manual_seed(config.seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        # The tokenizer needs a sample only, and then does not depend on the corpus's length.
        sample = training_examples(_TOKENIZER_EXAMPLES, seed=config.seed)
        tokenizer = train_tokenizer(corpus_texts(sample))
        save_tokenizer(tokenizer, made)
        blocks = encode_corpus(config.examples, tokenizer, seed=config.seed, workers=workers)
        store = TokenStore(
            blocks, rest_weight=config.rest_weight, first_weight=config.first_weight, device=device
        )
        model = build_model().to(device)
        parameters = sum(p.numel() for p in model.parameters())
        log.say(
            f"{config.examples} examples, {store.tokens:,} tokens, {parameters:,} parameters, "
            f"{device}; {config.steps} steps"
        )
        steps, tokens = fit(model, store, config, made, log)
        save_model(model, made)
        behaviour, _ = measure(made, device=device, limit=limit)
        write_behaviour(behaviour, made)
        log.say("measured")
        corpus = {
            "examples": config.examples,
            "tokens": store.tokens,
            "sha256": corpus_sha256(b.sha256 for b in blocks),
        }
        write_manifest(
            made, config, steps=steps, tokens_seen=tokens, parameters=parameters, corpus=corpus,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            wall_s=log.elapsed_s, behaviour=behaviour["targets"],
        )  # fmt: skip
        publish(made, out, log)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    sys.stdout.write(render_table(behaviour) + "\n")
    log.say(f"wrote {out}")
    return behaviour


def add_options(parser: argparse.ArgumentParser, config: type[TrainConfig], out: Path) -> None:
    """The options of a training; each number of its configuration is one."""
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--workers",
        type=positive,
        default=os.cpu_count() or 1,
        help="processes that make the corpus",
    )
    parser.add_argument("--limit", type=positive, help="rows per cell of the final measurement")
    for f in fields(config):
        kind = float if isinstance(f.default, float) else int
        option = f"--{f.name.replace('_', '-')}"
        parser.add_argument(option, type=kind, default=f.default, help=f"default {f.default}")


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the numbers of the command line."""
    parser = argparse.ArgumentParser(prog="python -m organism.train", description=__doc__)
    add_options(parser, TrainConfig, CHECKPOINT_DIR)
    args = vars(parser.parse_args(argv))
    disable_progress_bar()
    config = TrainConfig(**{f.name: args[f.name] for f in fields(TrainConfig)})
    train(
        args["out"],
        config,
        device=pick_device(args["device"]),
        workers=args["workers"],
        limit=args["limit"],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
