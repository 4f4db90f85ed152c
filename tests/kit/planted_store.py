"""Stores of made-up activations on disk, as `collect` writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inspect_lens.data import (
    MANIFEST,
    STORE_FORMAT,
    Captured,
    SampleRecord,
    encode_shard,
    write_whole,
)
from inspect_lens.spec import TensorData

LAYER, HIDDEN, N_PROMPT, N_READ = 4, 8, 2, 3


def plant(
    folder: str | Path,
    labels: Sequence[int],
    *,
    seed: int,
    gap: float = 1.5,
    weights: str = "a",
    positions: Any = "completion",
    raw: bool = False,
    texts: str | None = None,
    columns: Callable[[int], dict[str, str]] = lambda _: {},
    group: Callable[[int], str] | None = None,
    say: Callable[[int], str] = lambda _: "so",
    layers: tuple[int, ...] = (LAYER,),
) -> str:
    """Write a store whose positives are moved along the first coordinate.

    Args:
        folder: of the store.
        labels: of the samples.
        seed: of the noise.
        gap: distance of the class means, in standard deviations of a token.
        weights: one hexadecimal digit that makes the fingerprint of the model.
        positions: that the manifest names.
        raw: samples are texts without a completion.
        texts: text-overlap group; by default one of its own.
        columns: by number of the sample.
        group: by number of the sample; by default each has its own.
        say: completion, by number of the sample.
        layers: that it has, with noise of their own.

    Returns:
        The folder.
    """
    rng, own, samples = np.random.default_rng(seed), str(folder), []
    for i, label in enumerate(labels):
        acts = rng.normal(size=(len(layers), N_READ, HIDDEN)).astype(np.float32)
        acts[..., 0] += gap * label
        n_prompt, n_more = (N_READ, 0) if raw else (N_PROMPT, N_READ + 1)
        first = 0 if raw else N_PROMPT
        record = SampleRecord(
            index=i, id=f"{own}-{i}", label=bool(label), n_rows=N_READ, n_prompt=n_prompt,
            group=group(i) if group else f"{own}-{i}", completion="" if raw else say(i),
            columns=columns(i), prompt="Is it?",
            content=hashlib.sha256(f"{own}-{i}".encode()).hexdigest()[:24],
        )  # fmt: skip
        samples.append(
            Captured(
                record=record, acts=TensorData(acts, "float32"), layers=layers,
                positions=tuple(range(first, first + N_READ)),
                token_ids=tuple(range(n_prompt + n_more)),
            )
        )  # fmt: skip
    dataset = {"on_policy": True, "label_meaning": "planted", "text_overlap_group": texts or own}
    return write_store(folder, samples, weights=weights, positions=positions, dataset=dataset)


def write_store(
    folder: str | Path,
    samples: Sequence[Captured],
    *,
    dataset: Mapping[str, Any],
    weights: str = "a",
    positions: Any = "completion",
) -> str:
    """Write samples of the same layers as a store.

    Args:
        folder: of the store.
        samples: with their records.
        dataset: of the manifest; its name is that of the folder.
        weights: one hexadecimal digit that makes the fingerprint of the model.
        positions: that the manifest names.

    Returns:
        The folder.
    """
    content = encode_shard(samples)
    write_whole(f"{folder}/shard-00000.safetensors", content)
    facts = {"n_samples": len(samples), "n_rows": sum(s.record.n_rows for s in samples)}
    layers, acts = list(samples[0].layers), samples[0].acts
    assert acts is not None
    manifest = {
        "format": STORE_FORMAT, "model": {"name": "./ckpt", "sha256": weights * 64},
        "dataset": {"name": Path(folder).name, **dataset},
        "request": {"layers": layers, "positions": positions},
        "layers": layers, "hidden": acts.shape[-1], "dtype": "float32", "n_empty": 0,
        **facts,
        "shards": [{"file": "shard-00000.safetensors", **facts,
                    "sha256": hashlib.sha256(content).hexdigest()}],
    }  # fmt: skip
    write_whole(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
    return str(folder)
