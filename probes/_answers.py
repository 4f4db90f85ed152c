"""Answers of the organism with their activations, through vLLM or through transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from organism._splits import Row

__all__ = ["Answer", "collect_hf", "collect_vllm"]


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
    """Answer all rows with transformers, one by one: slow, and needs no engine.

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
    captured: dict[int, Any] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            # After the block and before the final norm, which `hidden_states[-1]` has applied.
            captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    for layer, block in enumerate(blocks):
        block.register_forward_hook(keep(layer))

    def answer(row: Row) -> Answer:
        prompt = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.inference_mode():
            full = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
            model(full[:, :-1])
        n_prompt = prompt.shape[1]
        acts = torch.stack([captured[i][0, n_prompt:] for i in range(len(blocks))])
        completion = tokenizer.decode(full[0, n_prompt:], skip_special_tokens=True)
        ids = tuple(full[0, n_prompt:-1].tolist())
        return Answer(row, completion, acts.numpy(), tuple(range(len(blocks))), ids)

    return {split: [answer(row) for row in rows] for split, rows in splits.items()}
