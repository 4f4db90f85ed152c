"""Answers of the organism with their activations, through vLLM or through transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from organism._splits import Row

__all__ = ["Answer", "collect_hf", "collect_vllm"]

_BATCH: Final = 128


class Answer(NamedTuple):
    """What the organism said to one row, and what it was like inside."""

    row: Row
    completion: str
    acts: NDArray[np.float32]
    """(layers, tokens, hidden) of the completion without its last sampled token."""
    layers: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    """Of the rows; empty when nobody asked."""


async def collect_vllm(
    checkpoint: str, splits: Mapping[str, Sequence[Row]], *, max_tokens: int, base_url: str = ""
) -> dict[str, list[Answer]]:
    """Answer all rows through the provider and capture the completions.

    Args:
        checkpoint: folder of the organism.
        splits: rows by split.
        max_tokens: longest answer.
        base_url: of a running server of the checkpoint; the provider starts one without it.

    Returns:
        Answers by split, in the order of the rows.
    """
    from inspect_ai.model import (
        ChatMessage,
        ChatMessageSystem,
        ChatMessageUser,
        GenerateConfig,
        get_model,
    )

    from inspect_lens.model import activations, lens_config

    config = lens_config(
        capture={"layers": "all", "positions": "completion"},
        base=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
    )
    kinds: dict[str, Any] = {"system": ChatMessageSystem, "user": ChatMessageUser}
    answers: dict[str, list[Answer | None]] = {s: [None] * len(r) for s, r in splits.items()}
    # A small cache does, and leaves the memory of a laptop alone.
    # In float32 every engine says the same; in the checkpoint's bfloat16 a fifth of the answers
    # differ in a word from run to run, with what else is in the batch.
    server: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20
    }  # fmt: skip
    if base_url:
        server = {"base_url": base_url}
    model = get_model(f"vllm-lens/{checkpoint}", activations="memory", **server)

    async def answer(split: str, index: int, row: Row) -> None:
        messages: list[ChatMessage] = [
            kinds[m["role"]](content=m["content"]) for m in row["messages"]
        ]
        output = await model.generate(messages, config=config)
        handle = activations(output)
        if handle is None:
            raise RuntimeError(f"{row['id']}: the provider returned no activations")
        answers[split][index] = Answer(
            row, output.completion, handle.numpy(), handle.layers, tuple(handle.token_ids[:-1])
        )

    async with anyio.create_task_group() as tasks:
        for split, rows in splits.items():
            for index, row in enumerate(rows):
                tasks.start_soon(answer, split, index, row)
    return {split: [a for a in made if a is not None] for split, made in answers.items()}


def collect_hf(
    checkpoint: str, splits: Mapping[str, Sequence[Row]], *, max_tokens: int
) -> dict[str, list[Answer]]:
    """Answer all rows with transformers, in batches of similar length; needs no engine.

    Args:
        checkpoint: folder of the organism.
        splits: rows by split.
        max_tokens: longest answer.

    Returns:
        Answers by split, in the order of the rows.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    blocks = model.get_decoder().layers
    ends = np.atleast_1d(model.generation_config.eos_token_id)
    pad = int(ends[0]) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    captured: dict[int, Any] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            # After the block and before the final norm, which `hidden_states[-1]` has applied.
            captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    for layer, block in enumerate(blocks):
        block.register_forward_hook(keep(layer))

    def answer(rows: Sequence[Row], prompts: Sequence[list[int]]) -> list[Answer]:
        width = max(map(len, prompts))
        empty = [width - len(ids) for ids in prompts]
        ids = torch.tensor([[pad] * n + p for n, p in zip(empty, prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in empty])
        with torch.inference_mode():
            full = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False,
                pad_token_id=pad,
            )  # fmt: skip
            mask = torch.nn.functional.pad(mask, (0, full.shape[1] - width), value=1)
            model(full, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        made = []
        for i, row in enumerate(rows):
            said = full[i, width:]
            stops = np.flatnonzero(np.isin(said.numpy(), ends))
            n = int(stops[0]) + 1 if stops.size else len(said)
            # The last sampled token is never fed to the model.
            acts = torch.stack([captured[k][i, width : width + n - 1] for k in range(len(blocks))])
            text = tokenizer.decode(said[:n], skip_special_tokens=True)
            layers = tuple(range(len(blocks)))
            ids_read = tuple(said[: n - 1].tolist())
            made.append(Answer(row, text, acts.numpy().copy(), layers, ids_read))
        return made

    def answer_all(rows: Sequence[Row]) -> list[Answer]:
        prompts = [
            tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for row in rows
        ]
        order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
        made: dict[int, Answer] = {}
        for first in range(0, len(order), _BATCH):
            part = order[first : first + _BATCH]
            found = answer([rows[i] for i in part], [prompts[i] for i in part])
            made |= dict(zip(part, found, strict=True))
        return [made[i] for i in range(len(rows))]

    return {split: answer_all(rows) for split, rows in splits.items()}
