"""What examples in docstrings find in the working directory: logs, activations, checkpoints.

`logs/honesty.eval` is `evals/organism_deception` on eight samples, run by transformers in this
process in the place of a server: the organism's own answers and activations, layers 3 to 5.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from inspect_ai import eval
from inspect_ai.event import ModelEvent
from inspect_ai.log import write_eval_log
from inspect_ai.model import ChatMessage, ModelOutput, ModelUsage
from safetensors.numpy import save_file

from evals.organism_deception import organism_deception
from inspect_lens._intake import Payload, encode_file, join, write_file
from inspect_lens.collect import log_to_store
from inspect_lens.data import planted_activations
from inspect_lens.model import Activations
from inspect_lens.spec import CaptureReceipt, Receipt, TensorData
from inspect_lens.train import ActivationSet

from .planted_log import TOKENIZER, encode
from .reference import HuggingFace
from .repository import ROOT
from .scripted import scripted_lens

__all__ = [
    "LOG",
    "generate",
    "organism",
    "write_logs",
    "write_nla",
    "write_published",
    "write_sets",
    "write_store",
]

LOG = "logs/honesty.eval"
MODEL = "vllm-lens/organism/checkpoint"
LAYERS = (3, 4, 5)
N_SAMPLES = 8
MAX_TOKENS = 24


def write_sets(folder: Path) -> None:
    """Write activation sets with a direction in layer 1, as `ActivationSet.load` reads them.

    Args:
        folder: gets `train`, `selection`, `test` and `control`, which has no positives.
    """
    sizes = {"train": 160, "selection": 100, "test": 120, "control": 800}
    for seed, (name, n) in enumerate(sizes.items(), start=1):
        made = planted_activations(n=n, hidden=32, tokens=(6, 6), seed=seed)
        data = ActivationSet(
            name=name, model="made-up", layers=(0, 1, 2), acts=made.acts, labels=made.labels,
            groups=tuple(f"{name}-{g}" for g in made.groups),
            ids=tuple(f"{name}-{i}" for i in range(n)),
        )  # fmt: skip
        if name == "control":
            data = data.subset(np.flatnonzero(~data.labels), name=name)
        data.save(folder / f"{name}.safetensors")


def write_store(folder: Path, log: Path) -> None:
    """Write what the log captured as the store `eight`.

    Args:
        folder: gets the store.
        log: of `write_logs`.
    """
    log_to_store(log, folder / "eight", group="group")


def write_nla(folder: Path) -> None:
    """Write the organism as both halves of a natural-language autoencoder, untrained for either.

    Args:
        folder: gets `av`, a verbaliser's `nla_meta.yaml`, and `ar`, a reconstructor's checkpoint.
    """
    both = {"kind": "nla_model", "d_model": 256, "extraction_layer_index": 5}
    tokens = {
        "injection_char": " ?", "injection_token_id": 266, "injection_left_neighbor_id": 349,
        "injection_right_neighbor_id": 36,
    }  # fmt: skip
    prompt = "Who is the founder of the town{injection_char}?"
    av = {"role": "av", "extraction": {"injection_scale": 9.0}, "tokens": tokens,
          "prompt_templates": {"av": prompt}}  # fmt: skip
    ar = {"role": "ar", "prompt_templates": {"ar": "Summary of {explanation}"}}
    shutil.copytree(ROOT / "organism/checkpoint", folder / "ar")
    save_file({"weight": np.eye(256, dtype=np.float32)}, folder / "ar/value_head.safetensors")
    (folder / "av").mkdir()
    for name, meta in (("av", av), ("ar", ar)):
        (folder / name / "nla_meta.yaml").write_text(json.dumps(both | meta))


def write_published(folder: Path) -> None:
    """Write two vectors as CAST does, of a model that is 256 wide and has six blocks.

    Args:
        folder: gets `condition_harmful.svec` and `refusal_behavior.svec`.
    """
    for seed, name in enumerate(("condition_harmful", "refusal_behavior")):
        rows = np.random.default_rng(seed).standard_normal((6, 256)).round(4)
        made = {"model_type": "llama", "directions": dict(enumerate(rows.tolist()))}
        (folder / f"{name}.svec").write_text(json.dumps({**made, "explained_variances": {}}))


def write_logs(folder: Path) -> None:
    """Write `honesty.eval` and its activations.

    Args:
        folder: of the log.
    """

    def answer(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        prompt, _reply = encode(messages)
        completion, text = generate(prompt)
        output = ModelOutput.from_content(MODEL, text)
        output.usage = ModelUsage()  # else Inspect downloads a tokenizer to count
        output.metadata = {"activations": _capture(folder, prompt, completion)}
        return output

    task = organism_deception()
    task.dataset = task.dataset[:N_SAMPLES]
    model = scripted_lens(answer)
    (log,) = eval(task, model=model, log_dir=str(folder), display="none", max_connections=1)
    assert log.status == "success", log.error and log.error.message
    made = Path(log.location.removeprefix("file://"))
    # Scorers that look for the calls of the eval's model find them by its name.
    log.eval.model = MODEL
    for sample in log.samples or ():
        for event in sample.events:
            if isinstance(event, ModelEvent):
                event.model = MODEL
    write_eval_log(log, str(folder / Path(LOG).name))
    made.unlink()


def generate(prompt: list[int]) -> tuple[list[int], str]:
    """The organism's greedy answer: its tokens, and its text without the mark of its end."""
    import torch
    from tokenizers import Tokenizer

    with torch.no_grad():
        made = organism().model.generate(
            torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False
        )
    ids: list[int] = made[0, len(prompt) :].tolist()
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    return ids, tokenizer.decode(ids).strip()


@functools.cache
def organism() -> HuggingFace:
    return HuggingFace(TOKENIZER)


def _capture(folder: Path, prompt: list[int], completion: list[int]) -> Activations:
    rows = organism().residual_stream([*prompt, *completion[:-1]])[list(LAYERS)].numpy()
    n_positions = rows.shape[1]
    receipt = Receipt(
        n_prompt=len(prompt), n_completion=len(completion), cache_salted=False, paths=("eager",),
        engine="planted", version="0", vllm_version="0",
        capture=CaptureReceipt(
            layers=LAYERS, n_positions=n_positions, first_position=0, dtype="float32",
            rows=len(LAYERS) * n_positions,
        ),
    )  # fmt: skip
    payload = Payload(
        tensors={"residual_stream": TensorData(np.ascontiguousarray(rows), "float32")},
        layers={"residual_stream": LAYERS},
        prompt_token_ids=tuple(prompt), token_ids=tuple(completion), receipt=receipt,
    )  # fmt: skip
    uri = f"honesty.lens/{uuid4().hex[:12]}.safetensors"
    write_file(join(str(folder), uri), encode_file(payload))
    return Activations.of(payload, uri=uri, root=str(folder))
