"""Model calls whose heads look where a test wants; no server, no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from inspect_ai.model import ChatMessage, ModelOutput, ModelUsage
from numpy.typing import NDArray

from inspect_lens._intake import Payload, encode_file
from inspect_lens.attention import Head
from inspect_lens.model import Activations
from inspect_lens.spec import TensorData

from .planted_log import encode

__all__ = ["HEADS", "LAYERS", "SIZE", "Looks", "attending"]

SIZE = 96
"""Most tokens of a call."""
LAYERS = (1, 4)
HEADS: list[Head] = [(1, 0), (1, 1), (4, 0), (4, 1)]

Looks = Mapping[int, Mapping[Head, NDArray[np.float64]]]
"""By position and head, positive numbers in proportion to the attention that each token gets."""


def attending(
    messages: Sequence[ChatMessage], look: Callable[[list[int]], Looks], folder: Path
) -> ModelOutput:
    """A call of the organism's tokenizer that captured queries and keys, with its file.

    Args:
        messages: of the prompt.
        look: from the prompt's token ids to where heads look; others look at all alike.
        folder: of the log.

    Returns:
        The output, whose answer is `Ruvan.`.
    """
    ids, reply = encode(messages, "Ruvan.")
    n = len(ids) + len(reply) - 1
    assert n <= SIZE
    # Each key is a direction of its own, so a softmax of logarithms is the distribution itself.
    q = np.zeros((2, n, 2, SIZE), dtype=np.float32)
    k = np.zeros((2, n, 1, SIZE), dtype=np.float32)
    k[:, np.arange(n), 0, np.arange(n)] = 1
    for position, heads in look(ids).items():
        for (layer, head), row in heads.items():
            q[LAYERS.index(layer), position, head, : len(row)] = np.log(row)
    payload = Payload(
        tensors={"attn_q": TensorData(q, "float32"), "attn_k": TensorData(k, "float32")},
        layers={"attn_q": LAYERS, "attn_k": LAYERS},
        prompt_token_ids=tuple(ids), token_ids=tuple(reply),
    )  # fmt: skip
    uri = f"planted.lens/{payload.sha256}.safetensors"
    (folder / uri).parent.mkdir(exist_ok=True)
    (folder / uri).write_bytes(b"".join(encode_file(payload)))
    handle = Activations.of(payload, uri=uri, root=str(folder))
    output = ModelOutput.from_content("mockllm/model", "Ruvan.")
    output.usage = ModelUsage()  # else Inspect downloads a tokenizer to count
    meta = {"scale": 1.0, "num_heads": 2, "num_kv_heads": 1, "head_size": SIZE}
    output.metadata = {"activations": handle, "qk_layers": [1, 4], "qk_meta": [meta, meta]}
    return output
