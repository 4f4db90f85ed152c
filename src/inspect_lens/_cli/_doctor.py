"""`inspect-lens doctor`: what is installed, what is served, and what a model would take."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal

import httpx
import psutil
import typer

from inspect_lens._base.http import server_address
from inspect_lens._base.installed import VLLM, install_extra, is_for_cpus
from inspect_lens._base.shipped import MODELS, model_path, organism_advice
from inspect_lens._base.untrusted import parse_json, read_regular, why_unread
from inspect_lens._settings import Settings, server_key, vllm_plugins
from inspect_lens._vllm.compat.features import FEATURES, architectures, problems
from inspect_lens._vllm.compat.monkeypatches import rivals
from inspect_lens.client import lens_facts, served_models
from inspect_lens.errors import ArtifactError, SpecError, UnsupportedError

from ._output import emit

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
            f"--model {model}: {path} cannot be read ({why_unread(error, path)}); allowed is the "
            "folder of a model on this machine; one of the hub is downloaded there with "
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
            quantization=None,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=tokens,
            max_num_seqs=sequences,
            enable_chunked_prefill=True,
            disable_chunked_mm_input=False,
            scheduler_cls=None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        kv_transfer_config=None,
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


_PACKAGES = ("inspect-lens", "inspect-ai", "torch", *VLLM, "vllm-lens")


def doctor(
    model: Annotated[
        str,
        typer.Option("--model", help="Folder of a checkpoint to check; shows its buffers, too."),
    ] = "",
    tokens: Annotated[
        int,
        typer.Option(
            "--max-num-batched-tokens", min=1, help="The value you give vLLM; sizes the buffers."
        ),
    ] = 16384,
    sequences: Annotated[
        int,
        typer.Option("--max-num-seqs", min=1, help="The value you give vLLM; sizes the buffers."),
    ] = 256,
    device: Annotated[
        Literal["cuda", "cpu"] | None,
        typer.Option("--device", help="Device of the buffers; a GPU if there is one, by default."),
    ] = None,
    base_url: Annotated[
        str, typer.Option("--base-url", help="Address of a running server, to check that, too.")
    ] = "",
    api_key: Annotated[
        str, typer.Option("--api-key", help="Key of that server; VLLM_API_KEY by default.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at packages, GPU and memory, a checkpoint and a server, and say what to do.

    The exit code is 0 if every feature is served, and 1 if something is off. Where vLLM is not
    installed, the server at --base-url decides.
    """
    if api_key and not base_url:
        raise SpecError("--api-key: it is for the server at --base-url; name that, too")
    found = examined(
        model=model, tokens=tokens, sequences=sequences, device=device, base_url=base_url,
        api_key=server_key(api_key),
    )  # fmt: skip
    emit(found, _lines(found), as_json=as_json)
    raise typer.Exit(0 if found["ok"] else 1)


def examined(
    *,
    model: str = "",
    tokens: int = 16384,
    sequences: int = 256,
    device: str | None = None,
    base_url: str = "",
    api_key: str = "",
) -> dict[str, Any]:
    """What `doctor` says, as plain data; raises where a model or a server cannot be read."""
    wrong = ""
    try:
        settings = Settings.load()
    except SpecError as error:
        settings, wrong = Settings(), str(error)
    plugin = wrong or _plugin(settings, vllm_plugins())
    off = problems()
    features = {
        key: {"what": what, "off": plugin or off.get("lens") or off.get(key)}
        for key, what in FEATURES.items()
    }
    found: dict[str, Any] = {
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "machine": _machine(),
        "plugin": plugin or "loaded by every vLLM process",
        "features": features,
        "hooks_allowed": settings.allow_code,
        "ok": not any(feature["off"] for feature in features.values()),
    }
    if base_url:
        found["server"] = _server(base_url, api_key)
        # Who has no engine here uses that one, and nothing is amiss with it.
        served = found["ok"] or not (wrong or _has_vllm(found))
        found["ok"] = served and not found["server"]["off"]
    if model:
        found["model"] = checkpoint_facts(model)
        found["ok"] = found["ok"] and not found["model"]["wrong"]
        found["buffers"] = buffer_facts(
            model, settings, tokens=tokens, sequences=sequences,
            device=device or ("cuda" if found["machine"]["gpus"] else "cpu"),
        )  # fmt: skip
    found["do"] = [f"remove the cause: {wrong}"] if wrong else _advice(found)
    return found


def _plugin(settings: Settings, allowed: list[str] | None) -> str | None:
    """Why vLLM would run without the lens, or None."""
    ours = [
        plugin.name
        for plugin in importlib.metadata.entry_points(group="vllm.general_plugins")
        if plugin.module.partition(".")[0] == "inspect_lens"
    ]
    if settings.disable:
        return "INSPECT_LENS_DISABLE is set"
    if not ours:
        return "inspect-lens is not installed as a plug-in; install the package with pip"
    if allowed is not None and not set(ours) & set(allowed):
        return f"VLLM_PLUGINS={','.join(allowed)} leaves inspect_lens out"
    if others := rivals(allowed):
        names = ",".join(name for name, _ in others)
        return (
            f"vllm-lens (plug-in {names}) takes the same request keys; the lens is off beside it: "
            "set VLLM_PLUGINS=inspect_lens, or uninstall vllm-lens"
        )
    return None


def _machine() -> dict[str, Any]:
    """GPUs as the driver tells of them, without a context on any, and memory in GiB."""
    gpus: list[dict[str, str]] = []
    why = "nvidia-smi is not installed"
    if (program := shutil.which("nvidia-smi")) is not None:
        keys = ("name", "driver_version", "memory.total", "memory.free")
        try:
            asked = subprocess.run(
                [program, f"--query-gpu={','.join(keys)}", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=20, check=False,
            )  # fmt: skip
            said = "" if asked.returncode == 0 else asked.stdout + asked.stderr
            rows = asked.stdout.splitlines() if asked.returncode == 0 else []
        except (OSError, subprocess.TimeoutExpired) as error:
            said, rows = str(error), []
        why = " ".join(said.split())[:200]
        cells = [[cell.strip() for cell in row.split(",")] for row in rows]
        # Where there is no GPU, a driver may say so in a row of its own.
        gpus = [dict(zip(keys, c, strict=True)) for c in cells if len(c) == len(keys)]
    memory = psutil.virtual_memory()
    return {
        "gpus": gpus, "no_gpu": "" if gpus else why or "the driver shows none",
        "memory_gib": round(memory.total / 2**30, 1),
        "free_gib": round(memory.available / 2**30, 1),
    }  # fmt: skip


def _server(base_url: str, api_key: str) -> dict[str, Any]:
    """What a running server says of its engines, and of what is off there."""
    url = server_address(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=20) as http:
        try:
            said = lens_facts(http)
            models = served_models(http)
        except UnsupportedError as error:
            return {"url": url, "off": {"lens": str(error)}, "engines": [], "acts": {}}
    reasons = [engine.get("not_served") for engine in said["engines"]]
    refused = [
        f"engine {i}: {why}" if len(reasons) > 1 else str(why)
        for i, why in enumerate(reasons)
        if why
    ]
    off = {**said.get("off", {}), **({"lens": "; ".join(refused)} if refused else {})}
    return {
        "url": url, "off": off, "models": models, "engines": said["engines"],
        "acts": said.get("server", {}),
    }  # fmt: skip


def _acts_lines(acts: dict[str, Any]) -> list[str]:
    """What a server does to all requests, which configurations it has, and where alarms go."""
    lines = []
    if tier := acts.get("acts"):
        parts = [*tier["ops"], *tier["edits_named"], *(f"probe {n}" for n in tier["probes"])]
        may = "may" if tier["may_opt_out"] else "may not"
        lines.append(f"acts        on all requests: {', '.join(parts)}; requests {may} opt out")
    if configs := acts.get("configs"):
        lines.append(f"models      also as model@NAME: {', '.join(configs)}")
    if alerts := acts.get("alerts"):
        counts = ", ".join(f"{n} {status}" for status, n in sorted(alerts["counts"].items()))
        lines.append(f"alerts      to {alerts['to']}: {counts or 'none yet'}")
    return lines


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _feature_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"plug-in     {found['plugin']}"]
    for key, feature in found["features"].items():
        state = f"off: {feature['off']}" if feature["off"] else "served"
        if key == "hooks" and state == "served" and not found["hooks_allowed"]:
            state = "served where the engine is started with INSPECT_LENS_ALLOW_CODE=1"
        lines.append(f"{key:<11} {feature['what']}: {state}")
    return lines


def _lines(found: dict[str, Any]) -> list[str]:
    lines = ["installed   " + ", ".join(f"{n} {v}" for n, v in found["packages"].items())]
    machine = found["machine"]
    lines += [
        f"GPU         {g['name']}, driver {g['driver_version']}, {g['memory.free']} of "
        f"{g['memory.total']} free"
        for g in machine["gpus"]
    ] or [f"GPU         none: {machine['no_gpu']}"]
    lines.append(f"memory      {machine['free_gib']} of {machine['memory_gib']} GiB free")
    reasons = {feature["off"] for feature in found["features"].values()}
    if len(reasons) == 1 and (reason := reasons.pop()):
        # One cause for all: twelve lines would tell no more.
        lines.append(f"lens        off: {reason}")
        if not any(found["packages"].get(name) for name in VLLM):
            lines.append(
                "client      can use a server that has the plug-in (lens/<model>), and score and "
                "show logs"
            )
    else:
        lines += _feature_lines(found)
    if (server := found.get("server")) is not None:
        told = [f"{FEATURES.get(key, key)}: off: {why}" for key, why in server["off"].items()]
        lines += [f"server      {server['url']}: {text}" for text in told or ["serves the lens"]]
        told_layers = (e["layers"] for e in server["engines"] if e.get("layers"))
        layers: list[int] = next(told_layers, [])
        one_by_one = layers[-1:] != [len(layers) - 1]
        which = ", ".join(map(str, layers)) if one_by_one else f"0 to {layers[-1]}"
        read = f"; the lens reads layers {which}" if layers else ""
        lines += [f"model       {name}{read}" for name in server.get("models", [])[:1]]
        lines += _acts_lines(server["acts"])
    if (model := found.get("model")) is not None:
        lines += checkpoint_lines(model)
    if (buffers := found.get("buffers")) is not None:
        lines += buffer_lines(buffers)
    return [*lines, *(f"do          {text}" for text in found["do"])]


def _advice(found: dict[str, Any]) -> list[str]:
    """What helps against each thing that is off, or what to do next."""
    model, server = found.get("model"), found.get("server")
    made = [f"mend the checkpoint: {text}" for text in (model or {}).get("wrong", ())]
    reasons = {feature["off"] for feature in found["features"].values() if feature["off"]}
    if not _has_vllm(found):
        if server is None:
            here = install_extra("vllm") if found["machine"]["gpus"] else "make env in a clone"
            made.append(
                f"to serve models here: {here}; to use a server elsewhere: "
                "--model lens/<model> --model-base-url http://HOST:8000/v1"
            )
    elif reasons:
        made += [f"remove the cause: {reason}" for reason in sorted(map(str, reasons))]
    if server is not None and server["off"]:
        made.append(
            f"where {server['url']} runs: inspect-lens doctor there says why, and "
            "INSPECT_LENS_REQUIRED=1 stops a start that would go on without the lens"
        )
    if (short := _too_large(found)) is not None:
        made.append(short)
    if made:
        return made
    if server is not None:
        name = server["models"][0]
        return [
            f"use it: inspect eval TASK --model lens/{name} --model-base-url {server['url']}/v1"
        ]
    name = "<model>" if model is None else model["folder"]
    return [
        f"serve it: {_serve(name)}",
        f"or let Inspect serve it: inspect eval TASK --model vllm-lens/{name}",
    ]


def _has_vllm(found: dict[str, Any]) -> bool:
    return any(found["packages"].get(name) for name in VLLM)


def _serve(name: str) -> str:
    """The command that serves a model; the build for CPUs has no `vllm serve` that works."""
    if not is_for_cpus():
        return f"vllm serve {name}"
    return (
        f"python -m vllm.entrypoints.openai.api_server --model {name} --dtype float32 "
        "--kv-cache-memory-bytes 1073741824"
    )


def _too_large(found: dict[str, Any]) -> str | None:
    """That weights and buffers are more than what is free, and what is smaller."""
    model, buffers, machine = found.get("model"), found.get("buffers"), found["machine"]
    if model is None or buffers is None:
        return None
    needed = model["weights_bytes"] + buffers["capture_bytes"] + buffers["steering_bytes"]
    free = machine["free_gib"]
    if buffers["device"] == "cuda":
        # A driver that does not tell it says "[N/A]".
        told = [gpu["memory.free"].partition(" ")[0] for gpu in machine["gpus"]]
        known = [float(mib) for mib in told if mib.isdecimal()]
        if not known:
            return None
        free = max(known) / 1024
    if needed / 2**30 <= free:
        return None
    return (
        f"weights and capture buffers take {needed / 2**30:.1f} GiB and {free:.1f} are free, "
        "without a KV cache: free memory, use several GPUs (--tensor-parallel-size), a quantised "
        "checkpoint, or fewer layers (INSPECT_LENS_LAYERS)"
    )
