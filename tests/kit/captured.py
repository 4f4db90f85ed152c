"""Outputs with activations that a test has planted, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from inspect_ai.model import ModelOutput, ModelUsage
from numpy.typing import NDArray

from inspect_lens._intake import Payload, encode_file
from inspect_lens.model import Activations
from inspect_lens.spec import TensorData

__all__ = ["captured"]


def captured(
    rows: NDArray[np.float32],
    *,
    n_prompt: int,
    layers: tuple[int, ...] | None = None,
    folder: Path | None = None,
    ids: tuple[int, ...] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> ModelOutput:
    """A call that captured these rows.

    Args:
        rows: (layers, tokens, hidden) float32, of prompt and completion without its last token.
        n_prompt: tokens of the prompt.
        layers: of the first axis; from 0 on by default.
        folder: folder of the log, in which the activations get a file; by default they are only
            in memory.
        ids: of prompt and completion, one more than there are rows; made up by default.
        origin: what the data says of where it is from.

    Returns:
        The output, with the handle in its metadata and known by the id of its message.
    """
    n_completion = rows.shape[1] - n_prompt + 1
    made = (*range(n_prompt), *range(100, 100 + n_completion))
    known = made if ids is None else ids
    payload = Payload(
        tensors={"residual_stream": TensorData(np.ascontiguousarray(rows), "float32")},
        layers={"residual_stream": layers or tuple(range(rows.shape[0]))},
        prompt_token_ids=known[:n_prompt],
        token_ids=known[n_prompt:],
        origin=origin or {},
    )
    if folder is None:
        handle = Activations.of(payload)
    else:
        uri = f"planted.lens/{payload.sha256}.safetensors"
        (folder / uri).parent.mkdir(parents=True, exist_ok=True)
        (folder / uri).write_bytes(b"".join(encode_file(payload)))
        handle = Activations.of(payload, uri=uri, root=str(folder))
    handle.remember(payload)
    output = ModelOutput.from_content("mockllm/model", "an answer")
    output.usage = ModelUsage()  # else Inspect downloads a tokenizer to count
    output.metadata = {"activations": handle}
    return output
