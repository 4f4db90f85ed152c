"""What `inspect-lens doctor --model` says of a checkpoint, before anybody waits for a server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from inspect_lens._base.shipped import MODELS, model_path, organism_advice
from inspect_lens._base.untrusted import parse_json, read_regular
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat.features import architectures
from inspect_lens.errors import ArtifactError

_WEIGHTS: Final = (
    ("model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin.index.json", "*.bin"),
    ("", "*.gguf"),
)
"""Indices, and the files that each is of, in vLLM's order."""
_TOKENIZERS: Final = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model",
    "tiktoken.model",
)  # fmt: skip
_GIB: Final = 1 << 30


def checkpoint_facts(model: str) -> dict[str, Any]:
    """What is in the folder of a checkpoint, and what is wrong with it, each with what helps."""
    folder = Path(model_path(model))
    config = _config(folder, model)
    listed = config.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    weights, missing, unread = _weights(folder)
    found: dict[str, Any] = {
        "folder": model,
        "architectures": names,
        "weights_bytes": sum(path.stat().st_size for path in weights),
        "weights_files": len(weights),
        "tokenizer": _has_tokenizer(folder),
        "chat_template": _has_template(folder),
    }
    wrong = []
    known = architectures()
    if known and names and not known & set(names):
        wrong.append(
            f"{', '.join(names)} is no architecture that the installed vLLM knows; it may still "
            "run through transformers: try --model-impl transformers, or a newer vLLM"
        )
    if unread:
        wrong.append(f"{unread} cannot be read as an index of weights; download it again")
    elif missing:
        wrong.append(
            f"{len(missing)} of its weight files are not there, such as {missing[0]}; download the "
            "checkpoint again"
        )
    elif not weights:
        wrong.append("no weights are there (*.safetensors, *.bin, *.gguf); download them")
    if not found["tokenizer"]:
        wrong.append(
            f"no tokenizer is there ({', '.join(_TOKENIZERS[:2])}, …); copy that of the model, or "
            "start vLLM with --tokenizer"
        )
    if not found["chat_template"]:
        found["note"] = (
            "no chat template: chats are refused, as are evals; a base model needs vLLM's "
            "--chat-template FILE"
        )
    return found | {"wrong": wrong}


def _config(folder: Path, model: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = parse_json(read_regular(path))
        if not isinstance(found, dict):
            raise TypeError("it is no object")
    except (OSError, ValueError, TypeError) as error:
        if model in MODELS and (advice := organism_advice(model)):
            raise ArtifactError(f"--model: {advice}") from None
        raise ArtifactError(
            f"--model {model}: {path} cannot be read ({type(error).__name__}: {error}); allowed is "
            "the folder of a model on this machine; one of the hub is downloaded there with "
            f"hf download {model if model.count('/') == 1 else 'OWNER/NAME'} --local-dir FOLDER"
        ) from None
    return found


def _weights(folder: Path) -> tuple[list[Path], list[str], str]:
    """Files of weights, those that the index names and that are not there, and a broken index."""
    for index, kind in _WEIGHTS:
        found = sorted(folder.glob(kind))
        if index and (folder / index).is_file():
            try:
                told = set(parse_json(read_regular(folder / index))["weight_map"].values())
                is_there = {one: (folder / one).is_file() for one in sorted(map(str, told))}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return found, [], index
            there = [folder / one for one, is_one in is_there.items() if is_one]
            return there, [one for one, is_one in is_there.items() if not is_one], ""
        if found:  # which vLLM takes, whatever index of another kind is left there
            return found, [], ""
    return [], [], ""


def _has_tokenizer(folder: Path) -> bool:
    there = any((folder / name).is_file() for name in _TOKENIZERS)
    return there or any(folder.glob("*.tiktoken")) or _tokenizer_says(folder, "auto_map")


def _has_template(folder: Path) -> bool:
    # Mistral's tokenizer writes chats without a template.
    names = ("chat_template.jinja", "chat_template.json", "tekken.json")
    there = any((folder / name).is_file() for name in names)
    return there or _tokenizer_says(folder, "chat_template")


def _tokenizer_says(folder: Path, key: str) -> bool:
    path = folder / "tokenizer_config.json"
    try:
        return path.is_file() and bool(parse_json(read_regular(path)).get(key))
    except (OSError, ValueError, AttributeError):
        return False


def checkpoint_lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    n, size = found["weights_files"], found["weights_bytes"] / _GIB
    what = ", ".join(found["architectures"]) or "no architecture is named"
    has = [
        f"{n} file{'' if n == 1 else 's'} of weights, {size:.2f} GiB",
        "tokenizer" if found["tokenizer"] else "NO TOKENIZER",
        "chat template" if found["chat_template"] else "no chat template",
    ]
    lines = [f"model       {found['folder']}: {what}; {', '.join(has)}"]
    lines += [f"model       WRONG: {text}" for text in found["wrong"]]
    return lines + ([f"model       {found['note']}"] if found.get("note") else [])


def buffer_facts(
    model: str, settings: Settings, *, tokens: int, sequences: int, device: str
) -> dict[str, Any]:
    """What the lens would allocate for a model beside its weights."""
    from inspect_lens._vllm.compat.engine_facts import facts_of

    whole = _config(Path(model_path(model)), model)
    try:
        config = whole.get("text_config", whole)
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config.get("num_attention_heads") or 1)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if min(layers, hidden, heads, kv_heads) < 1:
            raise ValueError("each is 1 or more")
        head_size = int(config.get("head_dim") or hidden // heads)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"--model {model}: config.json gives no number of layers, heads and width "
            f"({type(error).__name__}: {error}); allowed is the folder of a model on this machine"
        ) from None
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    text = SimpleNamespace(**{**config, "num_hidden_layers": layers})
    engine = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(**whole),
            hf_text_config=text,
            get_hidden_size=lambda: hidden,
            get_head_size=lambda: head_size,
            get_num_attention_heads=lambda parallel: heads,
            get_total_num_kv_heads=lambda: kv_heads,
            use_mla=bool(config.get("kv_lora_rank")),
            dtype=dtype,
            model=model,
            max_model_len=config.get("max_position_embeddings") or tokens,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=sequences),
        cache_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type=device),
        speculative_config=None,
    )
    facts = facts_of(engine, settings)
    return {
        "layers": facts.n_layers,
        "hidden": hidden,
        "dtype": dtype,
        "device": device,
        "taps": len(facts.taps),
        "sites": list(facts.sites),
        "capture_rows": facts.ring_rows,
        "capture_bytes": facts.ring_rows * facts.ring_row_bytes,
        "all_taps_in_one_step": facts.ring_rows >= facts.rows_of(facts.taps) * tokens,
        "steering_rows": facts.bank_rows,
        "steering_bytes": facts.bank_rows * hidden * 4,
        "sum_bytes": settings.sum_bytes,
        "shared_bytes": settings.shm_bytes,
    }


def buffer_lines(buffers: dict[str, Any]) -> list[str]:
    """The same for people."""
    mib = 2**20
    whole = "" if buffers["all_taps_in_one_step"] else "not "
    where = "on the GPU" if buffers["device"] == "cuda" else "of the worker's memory"
    return [
        f"taps        {buffers['taps']} ({', '.join(buffers['sites'])}), "
        f"{buffers['layers']} layers of {buffers['hidden']} numbers, {buffers['dtype']}",
        f"capture     {buffers['capture_rows']} rows, up to {buffers['capture_bytes'] / mib:.1f} "
        f"MiB {where}; {whole}all taps of a full step fit",
        f"steering    {buffers['steering_rows']} rows, up to "
        f"{buffers['steering_bytes'] / mib:.1f} MiB {where}",
        f"sums        up to {buffers['sum_bytes'] / mib:.1f} MiB {where}",
        f"shared      up to {buffers['shared_bytes'] / mib:.1f} MiB of each worker's host memory",
    ]
