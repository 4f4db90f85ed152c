"""What the commands of `inspect-lens lens` do."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inspect_lens._base.untrusted import parse_json, refuse_irregular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.lens import Lens, LensQuality, load_lens
from inspect_lens.probe import ModelRef, fingerprint_model
from inspect_lens.train import evaluate_lens, fit_jacobian_lens, fit_tuned_lens

__all__ = ["evaluate_job", "fit_job"]

Answer = tuple[dict[str, Any], list[str]]


def fit_job(
    kind: str,
    *,
    model: str,
    texts: str,
    held_out: str,
    out: str,
    name: str,
    layers: Any,
    steps: int,
    lr: float,
    batch: int,
    block: int,
    max_tokens: int | None,
    skip_first: int | None,
    seed: int,
    half: bool,
    device: str,
    dtype: str,
) -> Answer:
    """Fit a lens to texts, and save it."""
    if kind not in ("tuned", "jacobian"):
        raise SpecError(f"kind={kind!r}; allowed are tuned and jacobian")
    refuse_irregular(texts)
    refuse_irregular(held_out)
    loaded, tokenizer = _model(model, device, dtype)
    prompts = _read(texts, tokenizer)
    is_folder = Path(model).is_dir()
    about: dict[str, Any] = {
        "held_out": _read(held_out, tokenizer),
        "name": name or f"{Path(model).name}/{kind}",
        "layers": None if layers == "all" else layers,
        "dataset": Path(texts).name,
        "model_ref": ModelRef(name=model, sha256=fingerprint_model(model) if is_folder else None),
        "command": shlex.join(["inspect-lens", *sys.argv[1:]]),
    }
    about |= {} if max_tokens is None else {"max_tokens": max_tokens}
    about |= {} if skip_first is None else {"skip_first": skip_first}
    if kind == "tuned":
        lens = fit_tuned_lens(
            loaded, prompts, steps=steps, lr=lr, batch=batch, random_state=seed, **about
        )
    else:
        lens = fit_jacobian_lens(loaded, prompts, block=block, **about)
    if half:
        lens = Lens(matrix=lens.matrix.astype(np.float16), bias=lens.bias, card=lens.card)
    folder = lens.save(out)
    quality = lens.card.quality
    result = {"lens": str(folder), "name": lens.card.name, "kind": kind, **_facts(quality)}
    return result, [f"{lens.card.name}: {kind}, {folder}", *_lines(quality)]


def evaluate_job(lens: str, *, model: str, texts: str, device: str, dtype: str) -> Answer:
    """Judge a lens on texts."""
    found = load_lens(lens)
    loaded, tokenizer = _model(model, device, dtype)
    quality = evaluate_lens(loaded, found, _read(texts, tokenizer))
    result = {"name": found.card.name, "kind": found.card.kind, **_facts(quality)}
    return result, [f"{found.card.name}: {found.card.kind}, {texts}", *_lines(quality)]


def _facts(quality: Sequence[LensQuality]) -> dict[str, Any]:
    return {"quality": [one.model_dump() for one in quality]}


def _lines(quality: Sequence[LensQuality]) -> list[str]:
    return [
        f"  layer {q.layer}: KL {q.kl:.3f} nats (logit lens {q.logit_kl:.3f}), same best token "
        f"{q.agreement:.3f} ({q.logit_agreement:.3f})"
        for q in quality
    ]


def _model(name: str, device: str, dtype: str) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    if dtype not in ("float32", "bfloat16"):
        raise SpecError(f"dtype={dtype!r}; allowed are float32 and bfloat16")
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise SpecError(
            f"fitting a lens needs torch and transformers ({error}); install both"
        ) from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(name, dtype=getattr(torch, dtype)).to(device)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"model={name!r} cannot be loaded: {error}") from None
    return model, tokenizer


def _read(file: str, tokenizer: Any) -> list[list[int]]:
    """Token ids of the texts of a file."""
    try:
        lines = Path(file).read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{file}: cannot be read ({error})") from None
    found: list[list[int]] = []
    for i, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            given = sorted({"text", "messages"} & set(row))
        except (ValueError, TypeError):
            given = []
        if len(given) != 1:
            raise ArtifactError(f"{file}:{i}: a line is JSON with 'text' or 'messages'")
        if given == ["text"]:
            ids = tokenizer(row["text"])["input_ids"]
        else:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append([int(token) for token in ids])
    return found
