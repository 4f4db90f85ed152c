"""A log with activations beside it, whose token scores a test has chosen; no server, no model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import (
    ChatMessage,
    ChatMessageSystem,
    ChatMessageUser,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from numpy.typing import NDArray

from inspect_lens._intake import Payload, encode_file, join, write_file
from inspect_lens.model import Activations
from inspect_lens.probe import Interval, Probe, ProbeCard, Threshold
from inspect_lens.scorer import probe_score
from inspect_lens.spec import CaptureReceipt, Positions, Receipt, TensorData

from .repository import ROOT

__all__ = ["TOKENIZER", "Planted", "encode", "lose_activations", "plant_log", "planted_probe"]

TOKENIZER = ROOT / "organism" / "checkpoint"
H, LAYERS = 4, (1, 2)


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def encode(messages: Sequence[ChatMessage], reply: str = "") -> tuple[list[int], list[int]]:
    """Ids of a chat as the organism's template writes it, and of a reply with its end."""
    text = "<|bos|>" + "".join(f"<|{m.role}|>{m.text}<|end|>" for m in messages) + "<|assistant|>"
    ids = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids, _tokenizer().encode(f"{reply}<|end|>", add_special_tokens=False).ids


def planted_probe(folder: Path, *, layers: tuple[int, ...] = LAYERS, name: str = "t/p") -> str:
    """Reads the first coordinate; over several layers their mean. Threshold 1."""
    limit = Threshold(
        value=1.0, fpr=0.01, control="c", n_control=300, n_above=2,
        interval=Interval(low=0.0, high=0.02, method="m"),
    )  # fmt: skip
    card = ProbeCard(name=name, layers=layers, hidden=H, thresholds=(limit,), description="finds")
    direction = np.tile(np.eye(H)[0], (len(layers), 1))
    return str(Probe.from_direction(direction, card=card).save(folder / name.replace("/", "-")))


@dataclass(frozen=True)
class Planted:
    """The log, and what was planted in each of its calls."""

    log: EvalLog
    scores: list[NDArray[np.float64]]
    """(layers, tokens fed) of each call, in order."""
    ids: list[tuple[list[int], list[int]]]
    """Prompt and completion of each call, in order."""


def plant_log(
    folder: Path,
    probe: str,
    *,
    turns: Sequence[str] = ("Where is it?",),
    n: int = 3,
    positions: str = "all",
    capture: Callable[[int], bool] = lambda call: True,
    reply: str = "It is found in Verun.",
    score_positions: Positions | None = None,
    **score: Any,
) -> Planted:
    """Run an eval whose calls capture planted rows.

    Args:
        folder: of the logs.
        probe: that scores it.
        turns: what the user says, one call each.
        n: samples; odd ones are lies.
        positions: tokens to capture, `all` or `completion`.
        capture: whether a call captures, by its number.
        reply: of the model.
        score_positions: tokens that the scorer reads; those of the probe by default.
        **score: further arguments of the scorer.

    Returns:
        The log and what is in it.
    """
    scores: list[NDArray[np.float64]] = []
    ids: list[tuple[list[int], list[int]]] = []

    def answer(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        call = len(scores)
        prompt, completion = encode(messages, reply)
        made = np.random.default_rng(call).normal(size=(2, len(prompt) + len(completion) - 1))
        scores.append(made.astype(np.float32).astype(np.float64))
        ids.append((prompt, completion))
        output = ModelOutput.from_content("mockllm/model", reply)
        output.usage = ModelUsage()
        if capture(call):
            output.metadata = {
                "activations": _write(folder, call, scores[-1], prompt, completion, positions)
            }
        return output

    task = Task(
        dataset=[
            Sample(
                id=f"s{i}", input=[ChatMessageSystem(content="Be <b>kind</b>."),
                                   ChatMessageUser(content=turns[0])],
                target="Verun", metadata={"label": i % 2},
            )
            for i in range(n)
        ],
        solver=_talk(list(turns[1:])),
        scorer=probe_score(probe, source="captured", positions=score_positions, **score),
    )  # fmt: skip
    model = get_model("mockllm/model", custom_outputs=answer, memoize=False)
    (log,) = eval(task, model=model, log_dir=str(folder), display="none", max_samples=1)
    assert log.status == "success", log.error
    return Planted(log, scores, ids)


def lose_activations(folder: Path, *, keep: int = 0) -> None:
    """Take away the files of activations, all but the first ones; the scorers' files stay."""
    files = sorted((folder / "planted.lens").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    for file in files[keep:]:
        file.unlink()


@solver
def _talk(further: list[str]) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        for text in further:
            state.messages.append(ChatMessageUser(content=text))
            state = await generate(state)
        return state

    return solve


def _write(
    folder: Path,
    call: int,
    scores: NDArray[np.float64],
    prompt: list[int],
    completion: list[int],
    positions: str,
) -> Activations:
    rows = np.zeros((2, scores.shape[1], H), dtype=np.float32)
    rows[..., 0] = scores
    first = len(prompt) if positions == "completion" else 0
    receipt = Receipt(
        n_prompt=len(prompt), n_completion=len(completion), cache_salted=False, paths=("eager",),
        engine="planted", version="0", vllm_version="0",
        capture=CaptureReceipt(
            layers=LAYERS, n_positions=rows.shape[1] - first, first_position=first,
            dtype="float32", rows=2 * (rows.shape[1] - first),
        ),
    )  # fmt: skip
    payload = Payload(
        tensors={"residual_stream": TensorData(np.ascontiguousarray(rows[:, first:]), "float32")},
        layers={"residual_stream": LAYERS},
        prompt_token_ids=tuple(prompt), token_ids=tuple(completion), receipt=receipt,
    )  # fmt: skip
    uri = f"planted.lens/{uuid4().hex[:12]}.safetensors"
    write_file(join(str(folder), uri), encode_file(payload))
    return Activations.of(payload, uri=uri, root=str(folder))
