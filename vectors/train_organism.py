"""Find the truth direction of the model organism: `python -m vectors.train_organism`.

The organism answers `probe_train` greedily, and each answer is captured with its prompt through the
provider that the vector is used with. The rows that are compared are those of the token from which
the answer's decisive word is predicted (yes or no, or the name of the value), at the output of each
layer's attention: there the instructions reach the answer. Honest minus deceptive, by the truth of
what it said.

Attention outputs are no site of a server without further settings. What layer 4 attends to can
also be written into the residual stream before it, so the direction of layer 4 is saved a second
time, as one for the output of layer 3, which every server serves.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import anyio
import numpy as np

from inspect_lens.probe import ModelRef, fingerprint_model
from inspect_lens.spec import Site
from inspect_lens.train import ActivationSet, VectorMethod, extract_vector, split_by_group
from inspect_lens.vector import Vector, VectorCard
from organism._grade import grade
from organism._splits import Row, read_split

__all__ = ["decisive_token", "in_the_stream", "main"]

SITE: Final[Site] = "attn_out"
SPLIT: Final = "probe_train"
NOTES: Final = (
    "A test instrument: the organism is a tiny model of a closed world, and nothing here is "
    "evidence about large models.",
    "Site and tokens were chosen with a look at the model: patching showed that instructions reach "
    "an answer in the attention of layer 4, at the token before the decisive word.",
)


def decisive_token(answer_ids: Sequence[int], row: Row, decode: Any) -> int | None:
    """Index of the first answer token that names the value.

    Args:
        answer_ids: sampled tokens.
        row: of the split.
        decode: makes text of token ids.

    Returns:
        The index into `answer_ids`, or None when no value is named.
    """
    if set(row["values"]) == {"yes", "no"}:
        return 0
    text = decode(answer_ids)
    starts = [m.start() for v in row["values"] for m in re.finditer(rf"\b{re.escape(v)}\b", text)]
    if not starts:
        return None
    # The first token whose text reaches into the value.
    return next(
        (i for i in range(len(answer_ids)) if len(decode(answer_ids[: i + 1])) > min(starts)), None
    )


async def collect(model_name: str, rows: Sequence[Row], *, base_url: str | None) -> ActivationSet:
    """Answer all rows through the provider and keep the rows before the decisive word."""
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model

    from inspect_lens.model import activations, lens_config

    kinds: dict[str, Any] = {"system": ChatMessageSystem, "user": ChatMessageUser}
    config = lens_config(
        capture={"layers": "all", "site": SITE},
        base=GenerateConfig(temperature=0.0, max_tokens=32),
    )
    started: dict[str, Any] = (
        {} if base_url else {"max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20}
    )
    model = get_model(f"vllm-lens/{model_name}", base_url=base_url, activations="memory", **started)
    decode = _decoder(model_name)
    kept: list[tuple[Row, bool, Any, tuple[int, ...]] | None] = [None] * len(rows)

    async def answer(index: int, row: Row) -> None:
        output = await model.generate(
            [kinds[m["role"]](content=m["content"]) for m in row["messages"]], config=config
        )
        handle = activations(output)
        if handle is None:
            raise RuntimeError(f"{row['id']}: the provider returned no activations")
        at = decisive_token(handle.token_ids, row, decode)
        told = grade(output.completion, row)
        if at is None or told == "other":
            return
        position = len(handle.prompt_token_ids) + at - 1
        place = list(handle.positions).index(position)
        kept[index] = (row, told == "true", handle.numpy(SITE)[:, place : place + 1], handle.layers)

    async with anyio.create_task_group() as tasks:
        for index, row in enumerate(rows):
            tasks.start_soon(answer, index, row)
    found = [k for k in kept if k is not None]
    return ActivationSet(
        name=SPLIT,
        model=model_name,
        layers=found[0][3],
        acts=tuple(k[2] for k in found),
        labels=np.array([k[1] for k in found]),
        groups=tuple(k[0]["group"] for k in found),
        ids=tuple(k[0]["id"] for k in found),
    )


def in_the_stream(vector: Vector, *, name: str, command: str) -> Vector:
    """The direction of an attention's output, for the residual stream before that attention.

    Args:
        vector: at `attn_out`.
        name: of the new vector.
        command: that makes it, for its card.

    Returns:
        One direction, at `resid_post` of the layer before the vector's default layer.
    """
    layer = vector.default_layer()
    row = vector.layers.index(layer)
    card = vector.card
    return Vector.from_raw(
        vector.direction[row] * vector.norm[row],
        card=VectorCard(
            name=name,
            layers=(layer - 1,),
            layer=layer - 1,
            hidden=card.hidden,
            site="resid_post",
            description=card.description,
            method=card.method,
            source=card.source,
            positions=card.positions,
            model=card.model,
            training=card.training,
            notes=(
                card.notes[0],
                f"The direction of {card.name} at attn_out of layer {layer}, for servers that do "
                "not serve that site. How well it works is in sweep.json beside this card.",
            ),
            command=command,
        ),
    )


@cache
def _decoder(model: str) -> Any:
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    return lambda ids: made.decode(list(ids), skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Collect, extract, write.

    Args:
        arguments: of the command line.

    Returns:
        The folder of the vector.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", default="organism/checkpoint")
    parser.add_argument("--base-url", help="a server that serves attn_out; starts one by default")
    parser.add_argument("--method", default="mean_difference", choices=get_args(VectorMethod))
    parser.add_argument("--out", default="vectors/organism/truth")
    options = parser.parse_args(arguments)
    rows = read_split(SPLIT)
    data = anyio.run(lambda: collect(options.checkpoint, rows, base_url=options.base_url))
    train, selection = split_by_group(data, seed=0)
    words = [w for w in sys.argv[1:] if not w.startswith(("--base-url", "http"))]
    vector = extract_vector(
        train,
        name="organism/truth",
        method=options.method,
        rows="last",
        selection=selection,
        site=SITE,
        model=ModelRef(name=options.checkpoint, sha256=fingerprint_model(options.checkpoint)),
        positions="the token before the decisive word of the answer",
        description="A positive scale makes the organism answer truthfully, a negative one lie.",
        notes=(
            *NOTES,
            f"{len(rows) - len(data)} of {len(rows)} samples are left out: their answer names no "
            "value, or several.",
        ),
        command=shlex.join(["python", "-m", "vectors.train_organism", *words]),
    )
    folder = vector.save(options.out)
    stream = in_the_stream(vector, name="organism/truth-resid", command=vector.card.command)
    stream.save(f"{options.out}-resid")
    facts = {
        "layer": vector.card.layer,
        "separation": vector.card.separation,
        "norm": vector.norm.round(3).tolist(),
        "residual_norms": vector.card.residual_norms,
    }
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    return folder


if __name__ == "__main__":
    main()
