"""Bodies of requests near right ones: some part is replaced, left out, repeated or wrapped."""

from __future__ import annotations

import base64
import copy
import json
from random import Random
from typing import Any

import numpy as np
import zstandard

from inspect_lens.spec import EDITS, POOLS, SITES, as_tensor_data, encode_tensor

__all__ = [
    "LAYERS", "WIDTH", "calm", "lens_part", "mutated", "near_valid", "pattern", "registry_body",
    "sweep_body", "zeros",
]  # fmt: skip

WIDTH = 256
LAYERS = 6


def zeros(*shape: int) -> dict[str, Any]:
    """The JSON form of zeros in float32: few bytes of text for any shape."""
    packer = zstandard.ZstdCompressor(level=1)
    n_bytes = 4 * int(np.prod(shape))
    frame = packer.compress(bytes(min(n_bytes, 1 << 24)))
    return {
        "data": base64.b64encode(frame).decode(),
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(shape),
        "compression": "zstd",
    }


def _nested(n: int) -> Any:
    value: Any = 1
    for _ in range(n):
        value = [value]
    return value


_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400, 1.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "1", "2", "true", "all", "last", "maen", "ema:2", "top_k_mean:1" + "0" * 5000,
    "../../etc/passwd", "a/b", "\x00", "<script>", "\ud800", "é", "x" * 70_000, [], {}, [[]],
    [None], [True, False], [False], [0, 0], [1.0], ["1"], [-1], [999], list(range(3000)), {"a": 1},
    {"inspect_lens": {}}, [{}], [[1.0] * 3], "[", "[" * 5000, "null", '{"capture": {}}',
]  # fmt: skip
_KEYS = (
    "capture", "edits", "edits_named", "probes", "hooks", "qk", "layers",
    "positions", "phase", "reduce", "dtype", "site", "transport", "name", "aggregate", "tokens",
    "alarm", "threshold", "scale", "norm_match", "position_indices", "layer_indices", "activations",
    "shape", "data", "compression", "inspect_lens", "_inspect_lens", "output_residual_stream",
    "lens", "extra_args", "vllm_xargs", "extra_body", "capture_layers", "steering_vectors",
    "output_residual_streem", "edits", "sink", "op", "when", "pattern", "token_ids", "direction",
    "vector", "value", "heads", "columns", "top_k",
)  # fmt: skip


def _tensor(rng: Random, *shape: int) -> Any:
    kind = rng.randrange(6)
    if kind == 0:
        return zeros(1, 1 << rng.randrange(4, 24), WIDTH)
    if kind == 1:
        return zeros(1, WIDTH << rng.randrange(16))
    values = np.full(shape, rng.choice([1.0, 0.01, -3.0, 30.0]), np.float32)
    return values.tolist() if kind == 2 else encode_tensor(as_tensor_data(values))


def _vector(rng: Random) -> dict[str, Any]:
    made: dict[str, Any] = {"activations": _tensor(rng, 1, WIDTH), "layer_indices": [3]}
    extra = {
        "scale": rng.choice([0.5, 2, 1e-3]),
        "norm_match": rng.random() < 0.5,
        "position_indices": [0, -1],
        "phase": rng.choice(["prefill", "decode", "both"]),
    }
    return made | {k: v for k, v in extra.items() if rng.random() < 0.3}


def _use(rng: Random) -> Any:
    name = rng.choice(["p", "p", "q", "nobody"])
    if rng.random() < 0.3:
        return name
    extra = {
        "aggregate": rng.choice([*POOLS, "top_k_mean:3", "ema:0.3", "maen"]),
        "tokens": True,
        "alarm": rng.choice(["flag", "stop"]),
        "threshold": rng.choice([-1e6, 0, 1e6]),
        "positions": rng.choice(["all", "prompt", "completion", "last", [0, 1], "last_prompt"]),
    }
    return {"name": name} | {k: v for k, v in extra.items() if rng.random() < 0.5}


def _capture(rng: Random) -> dict[str, Any]:
    full = {
        "layers": rng.choice(["all", [0], [1, 4], [LAYERS - 1]]),
        "positions": _where(rng),
        "phase": rng.choice(["prefill", "decode", "both"]),
        "reduce": rng.choice(["none", "mean", "last", "max", "norm"]),
        "dtype": rng.choice(["model", "float32", "bfloat16", "float16"]),
        "site": rng.choice([*SITES, list(SITES)]),
        "transport": rng.choice(["auto", "inline", "binary"]),
    }
    return {k: v for k, v in full.items() if rng.random() < 0.4}


_ATOMS = (
    "a", "e", ".", "é", "\\pL", "\\w", "\\d", "[a-z]", "[^é]", "(?:a|b)", "(a)", "the", "e", "a",
    "\\x{10ffff}", "[\\pL\\pN]", "^", "$", "\\b", "(?i)", "(?s)", "|", "(", "]", "\\", "\\Q",
    "\ud800", "(?<=a)", "\\1", "{e<=1}", "(?P<n>a)", "\x00", "𝄞", "(?:" * 300, "[[:alpha:]]",
)  # fmt: skip
_REPEATS = ("", "", "", "*", "+", "?", "*?", "{3}", "{2,5}", "{1000}", "{3000}", "{0,900}", "{,2}")


def pattern(rng: Random) -> str:
    """A regular expression: often right, often too much, sometimes none."""
    n = rng.choice([1, 1, 2, 3, 5, 12, 80, 400])
    parts = [rng.choice(_ATOMS) + rng.choice(_REPEATS) for _ in range(n)]
    text = "".join(parts)
    for _ in range(rng.choice([0, 0, 1, 2])):
        text = f"(?:{text}){rng.choice(_REPEATS)}"
    if rng.random() < 0.3:
        text += "|e"
    return text[: rng.choice([10, 100, 1000, 1000, 5000])]


def _match(rng: Random) -> dict[str, Any]:
    full = {
        "matches": rng.choice(["all", "first", "last"]),
        "tokens": rng.choice(["all", "first", "last"]),
        "exclude": rng.random() < 0.5,
        "among": rng.choice(["prompt", "completion"]),
    }
    what = {"pattern": pattern(rng)} if rng.random() < 0.5 else {"token_ids": [5, 9]}
    return what | {k: v for k, v in full.items() if rng.random() < 0.3}


def _where(rng: Random) -> Any:
    named = ["all", "prompt", "completion", "last", [0], [-1], "last_prompt"]
    return _match(rng) if rng.random() < 0.3 else rng.choice(named)


def _gate(rng: Random) -> dict[str, Any]:
    full = {
        "threshold": rng.choice([-1e6, 0, 1e6]),
        "scope": rng.choice(["token", "next", "rest"]),
        "ema": 0.3,
        "closes_below": -1.0,
        "sharpness": rng.choice([None, 1.0]),
        "similarity": rng.choice(["dot", "cosine", "cast"]),
        "reads": rng.choice(["prompt", "completion", "last_prompt", "prompt_mean"]),
        "bias": rng.choice([0, 1]),
        "active_above": 0.5,
        "conversation": True,
    }
    made = {"direction": _tensor(rng, WIDTH), "layer": rng.randrange(LAYERS)}
    return made | {k: v for k, v in full.items() if rng.random() < 0.3}


def _when(rng: Random, depth: int = 0) -> dict[str, Any]:
    if depth > 4 or rng.random() < 0.6:
        return _gate(rng)
    names = [name for name in ("all", "any", "none") if rng.random() < 0.5]
    return {n: [_when(rng, depth + 1) for _ in range(rng.randrange(3))] for n in names}


def _schedule(rng: Random) -> dict[str, Any]:
    full = {
        "points": rng.choice([[[0, 1.0], [4, 0.0]], [[3, 1]], [], [[5, 1.0], [2, 1.0]]]),
        "between": rng.choice(["step", "linear", "cosine", "sine"]),
        "half_life": rng.choice([4.0, 0, 1e9]),
    }
    return {k: v for k, v in full.items() if rng.random() < 0.5}


_NUMBERS = (0, 0.5, 1, -1, 10)


def edit(rng: Random) -> dict[str, Any]:
    """One edit, of any operation that there is, with any of its fields."""
    kind = EDITS[rng.choice(sorted(EDITS))]
    made: dict[str, Any] = {
        "op": kind.model_fields["op"].default,
        "layers": [rng.randrange(LAYERS)],
    }
    for name, axes in kind.tensor_fields.items():
        if kind.model_fields[name].is_required() or rng.random() < 0.2:
            n = () if name in kind.number_fields else (WIDTH,)
            made[name] = _tensor(rng, *((2,) * (axes - len(n))), *n)
    extra = {
        "positions": _where(rng),
        "site": rng.choice(SITES),
        "phase": rng.choice(["prefill", "decode", "both"]),
        "when": _when(rng),
        "schedule": _schedule(rng),
        "heads": [0, 1],
        "neurons": [3],
        "experts": [0],
    }
    made |= {k: v for k, v in extra.items() if rng.random() < 0.05}
    for name, field in kind.model_fields.items():
        if name not in made and name not in extra and (field.is_required() or rng.random() < 0.3):
            made[name] = rng.choice(_NUMBERS)
    return made


def _logit_lens(rng: Random) -> dict[str, Any]:
    full = {
        "layers": rng.choice(["all", [1], [0, 5]]),
        "top_k": rng.choice([0, 5, 100]),
        "tokens": rng.choice([[5], [" the"], ["\ud800"], ["nothing of one token"], [10**9]]),
        "positions": _where(rng),
        "name": rng.choice(["l", "nobody"]),
    }
    return {k: v for k, v in full.items() if rng.random() < 0.5}


def registry_body(rng: Random) -> Any:
    """A body of the registry, mostly near right."""
    kinds: dict[str, Any] = {
        "edits": [edit(rng) for _ in range(rng.randrange(1, 4))],
        "probe": {"layers": [1], "tensors": {"weight": _tensor(rng, 1, WIDTH)}},
        "lens": {
            "kind": "jacobian", "n_layers": LAYERS, "layers": [1],
            "tensors": {"matrix": zeros(1, WIDTH, WIDTH)},
        },
    }  # fmt: skip
    kind = rng.choice(sorted(kinds))
    body: Any = {"name": rng.choice(["fuzz-a", "fuzz-b"]), kind: kinds[kind], "replace": True}
    return mutated(body, rng) if rng.random() < 0.7 else body


def sweep_body(rng: Random) -> Any:
    """A body of a sweep, mostly near right."""
    texts: tuple[Any, ...] = (
        "the town is",
        [5, 9, 14],
        [{"role": "user", "content": "Who?"}],
        [{}],
        [-5],
    )
    body: Any = {
        "clean": rng.choice(texts), "corrupted": rng.choice(texts), "answer": rng.choice([" a", 5]),
        "layers": [1], "floor_runs": 1, "positions": [-1],
        "source": rng.choice(["clean", "zero", "mean", "rows"]),
    }  # fmt: skip
    if rng.random() < 0.3:
        body["rows"] = _tensor(rng, 1, 1, WIDTH)
    return mutated(body, rng) if rng.random() < 0.7 else body


def lens_part(rng: Random) -> dict[str, Any]:
    """Keys of the lens as a client may put them into a body; mostly right."""
    if rng.random() < 0.6:
        parts: dict[str, Any] = {
            "capture": _capture(rng),
            "probes": [_use(rng)],
            "edits_named": [rng.choice(["v", "e", "nobody"])],
            "edits": [edit(rng) for _ in range(rng.choice([1, 1, 2, 3, 70]))],
            "lens": _logit_lens(rng),
            "sink": rng.choice(["recorded", "nobody", {"name": "recorded", "columns": {"a": 1}}]),
            "qk": {"layers": [1]},
            "skip_reading_prefix_cache": True,
        }
        lens = {k: v for k, v in parts.items() if rng.random() < 0.35}
        return {"inspect_lens": json.dumps(lens) if rng.random() < 0.2 else lens}
    keys: dict[str, Any] = {
        "output_residual_stream": rng.choice([True, "true", [1], "[1, 2]", False, 1, "2"]),
        "apply_steering_vectors": [_vector(rng)],
        "activations_transport": rng.choice(["base64", "binary"]),
        "skip_reading_prefix_cache": rng.choice([True, 1, "true"]),
        "output_qk": rng.choice([True, [1], "[0]"]),
        "apply_hooks": [{"fn": {"cloudpickle": "gAROLg=="}, "layer_indices": [1]}],
    }
    return {k: v for k, v in keys.items() if rng.random() < 0.4}


def mutated(value: Any, rng: Random, depth: int = 0) -> Any:
    """A copy of JSON with one thing changed somewhere."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.75):
        made = dict(value)
        key = rng.choice(list(made))
        kind = rng.randrange(8)
        if kind == 0:
            del made[key]
        elif kind == 1:
            made[rng.choice(_KEYS)] = copy.deepcopy(rng.choice(_ODD))
        elif kind == 2:
            made[key + rng.choice("sx_ ")] = made.pop(key)
        else:
            made[key] = mutated(made[key], rng, depth + 1)
        return made
    if isinstance(value, list) and value and len(value) < 100 and rng.random() < 0.6:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(value[i], rng, depth + 1), *value[i + 1 :]]
    if isinstance(value, str) and value[:1] in "[{" and rng.random() < 0.5:
        return value[: rng.randrange(len(value) + 1)]
    wrapped: list[Any] = [[value], {"x": value}, [value, value], _nested(rng.choice([30, 300]))]
    return rng.choice([*wrapped, *_ODD, *_ODD])


def near_valid(rng: Random) -> dict[str, Any]:
    """The lens part of a body, in one of its places, changed up to three times."""
    part = lens_part(rng)
    place = rng.choice(["extra_args", "vllm_xargs", "top", "top"])
    body = part if place == "top" else {place: part}
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        body = mutated(body, rng) if body else {}
        if not isinstance(body, dict):
            body = {"inspect_lens": body}
    return body


_CALM_DEPTH = 12


def calm(value: Any, depth: int = 0) -> Any:
    """The same without code, and without strengths of steering that no model survives."""
    if depth > _CALM_DEPTH:
        return value
    if isinstance(value, dict):
        kept = {k: calm(v, depth + 1) for k, v in value.items() if k != "apply_hooks"}
        scale = kept.get("scale")
        if isinstance(scale, int | float) and abs(scale) > 1e3:
            kept["scale"] = 1.0
        return kept
    if isinstance(value, list):
        return [calm(item, depth + 1) for item in value]
    if isinstance(value, str) and value[:1] in "[{" and "scale" in value:
        try:
            return json.dumps(calm(json.loads(value), depth + 1))
        except (ValueError, RecursionError):
            return value
    return value
