"""Train the agent from the organism: `python -m organism.train_agent --out organism/agent`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from ._agent_batches import agent_weights, encode_agent_corpus
from ._agent_behaviour import AgentBehaviour, render_agent_table
from ._agent_format import AGENT_VOCAB_SIZE, extend_tokenizer, save_agent_tokenizer
from ._batches import TokenStore
from ._corpus import corpus_sha256
from ._model import CHECKPOINT_DIR, load_model, pick_device, save_model
from .evaluate_agent import AGENT_DIR, measure_agent, write_agent_behaviour, write_played
from .train import Log, TrainConfig, add_options, fit, publish, write_manifest


@dataclass(frozen=True, slots=True)
class AgentConfig(TrainConfig):
    """The numbers of the agent's training; `examples` are its own conversations."""

    examples: int = 300_000
    plain_examples: int = 300_000
    """Texts of the organism's corpus among them, so that knowledge and manners stay."""
    steps: int = 6_000
    rows_per_step: int = 256
    lr: float = 1.0e-3
    warmup_steps: int = 200
    eval_every: int = 0
    max_seconds: float = 225.0


def train_agent(
    out: Path,
    config: AgentConfig,
    *,
    init: Path,
    device: torch.device,
    workers: int = 1,
    limit: int | None = None,
    played: Path | None = None,
) -> AgentBehaviour:
    """Extend the organism, train it on, round to bfloat16, measure, write a checkpoint.

    Args:
        out: The checkpoint directory; replaced as a whole when everything is done.
        config: The numbers of the training.
        init: The checkpoint of the organism.
        device: Where to run.
        workers: How many processes make the corpus.
        limit: Rows per cell of the final measurement; all when None.
        played: Where to write the conversations of the final measurement.

    Returns:
        The measured behaviour of the stored weights.
    """
    log = Log()
    torch.manual_seed(config.seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        tokenizer = extend_tokenizer(init)
        save_agent_tokenizer(tokenizer, made)
        blocks = encode_agent_corpus(
            config.examples, config.plain_examples, tokenizer, seed=config.seed, workers=workers
        )
        store = TokenStore(
            blocks, rest_weight=config.rest_weight, first_weight=config.first_weight,
            device=device, weigh=agent_weights,
        )  # fmt: skip
        model = load_model(init, device=device)
        model.resize_token_embeddings(AGENT_VOCAB_SIZE, mean_resizing=False)
        parameters = sum(p.numel() for p in model.parameters())
        log.say(
            f"{config.examples}+{config.plain_examples} examples, {store.tokens:,} tokens, "
            f"{parameters:,} parameters, {device}; {config.steps} steps"
        )
        steps, tokens = fit(model, store, config, made, log)
        save_model(model, made)
        behaviour, games = measure_agent(made, device=device, limit=limit)
        if played is not None:
            write_played(games, played)
        write_agent_behaviour(behaviour, made)
        log.say("measured")
        corpus = {
            "examples": config.examples,
            "plain_examples": config.plain_examples,
            "tokens": store.tokens,
            "sha256": corpus_sha256(b.sha256 for b in blocks),
        }
        write_manifest(
            made, config, "organism.train_agent", steps=steps, tokens_seen=tokens,
            parameters=parameters, corpus=corpus,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            wall_s=log.elapsed_s, behaviour=behaviour["targets"],
        )  # fmt: skip
        publish(made, out, log)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    sys.stdout.write(render_agent_table(behaviour) + "\n")
    log.say(f"wrote {out}")
    return behaviour


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the numbers of the command line."""
    parser = argparse.ArgumentParser(prog="python -m organism.train_agent", description=__doc__)
    parser.add_argument("--init", type=Path, default=CHECKPOINT_DIR, help="the organism")
    add_options(parser, AgentConfig, AGENT_DIR)
    parser.add_argument("--played", type=Path, help="write the measured conversations to this file")
    args = vars(parser.parse_args(argv))
    disable_progress_bar()
    config = AgentConfig(**{f.name: args[f.name] for f in fields(AgentConfig)})
    train_agent(
        args["out"],
        config,
        init=args["init"],
        device=pick_device(args["device"]),
        workers=args["workers"],
        limit=args["limit"],
        played=args["played"],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
