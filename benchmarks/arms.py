"""What each arm asks for, as data: which engine, and the lens request of each of its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .families import FAMILIES, direction, four_layers, router_environment, sites_environment
from .shapes import Shape

__all__ = ["ARMS", "ENGINES", "Arm", "EngineKind", "Vector", "vector"]


@dataclass(frozen=True, eq=False)
class Vector:
    """A steering vector, made into the engine's own class by the worker."""

    values: np.ndarray
    layer: int
    scale: float


Request = Mapping[str, Any] | None
"""Extra arguments of one request; None for a plain one."""


@dataclass(frozen=True)
class Arm:
    """One arm."""

    engine: str
    request: Callable[[Shape, int], Request] = lambda shape, i: None
    """Extra arguments of the i-th request. `Vector` stands for a steering vector."""
    probes: Callable[[Shape], Mapping[str, Any]] | None = None
    """By name, what is registered once with the engine before the arm's first run."""
    note: str = ""
    streams: bool = False
    """Whether answers come as events, which only a server sends; offline the arm is refused."""
    over_tcp: bool = False
    """Whether a client fetches by HTTP, as from another host; offline the arm is refused."""
    refusal: str = ""
    """Why the arm cannot run yet; it is then skipped with this reason."""


@dataclass(frozen=True)
class EngineKind:
    """How an engine of some arms is started."""

    environment: Callable[[Shape], Mapping[str, str]] = lambda shape: {}
    options: Mapping[str, Any] = ()  # type: ignore[assignment]
    is_peer: bool = False
    is_hf: bool = False


def vector(shape: Shape, seed: int) -> Vector:
    """A random direction of unit norm at the arm's layer, weak enough to leave numbers finite.

    The same object for the same seed, as a user has one vector for a thousand prompts.
    """
    return _vector(shape.hidden, shape.layer, seed)


@lru_cache(maxsize=1024)
def _vector(hidden: int, layer: int, seed: int) -> Vector:
    values = np.random.default_rng(seed).standard_normal(hidden)
    return Vector(values / np.linalg.norm(values), layer, scale=0.5)


def _one_layer(shape: Shape, i: int) -> Request:
    return {"output_residual_stream": [shape.layer]}


def _streamed_rows(shape: Shape, transport: str) -> Request:
    capture = {"layers": [shape.layer], "transport": transport}
    return {"inspect_lens": {"capture": capture, "stream_results": True}}


def _steer(shape: Shape, i: int) -> Request:
    return {"apply_steering_vectors": [vector(shape, 0)]}


_PROBES = [f"probe-{i}" for i in range(16)]


def _probes(shape: Shape) -> Mapping[str, Any]:
    from inspect_lens.spec import EngineProbe

    layers, probes = four_layers(shape), {}
    for i, name in enumerate(_PROBES):
        weight = np.random.default_rng(i).standard_normal((len(layers), shape.hidden))
        probes[name] = EngineProbe(layers=layers, tensors={"weight": weight.astype(np.float32)})
    return probes


def _mixed(shape: Shape, i: int) -> Request:
    if i % 2 == 0:
        return None
    return _one_layer(shape, i) if i % 4 == 1 else _steer(shape, i)


def _four_layers(shape: Shape) -> Mapping[str, str]:
    return {"INSPECT_LENS_LAYERS": ",".join(map(str, four_layers(shape)))}


@lru_cache(maxsize=8)
def _ablate_all(hidden: int, layers: int) -> Request:
    from inspect_lens import LensRequest
    from inspect_lens.spec import Ablate

    edit = Ablate(direction=direction(hidden, 0), layers=range(layers))
    return {"inspect_lens": LensRequest(edits=(edit,))}


@lru_cache(maxsize=1024)
def _program(hidden: int, layer: int, seed: int) -> Request:
    from inspect_lens import LensRequest
    from inspect_lens.spec import Ablate, Add, Clamp

    edits = (
        Ablate(direction=direction(hidden, 3 * seed), layers=[layer]),
        Clamp(direction=direction(hidden, 3 * seed + 1), layers=[layer], min=-1.0, max=1.0),
        Add(vector=direction(hidden, 3 * seed + 2), layers=[layer], scale=0.5),
    )
    return {"inspect_lens": LensRequest(edits=edits)}


@lru_cache(maxsize=1024)
def _sweep(hidden: int, layer: int, i: int, positions: str) -> Request:
    from inspect_lens import LensRequest
    from inspect_lens.spec import Add

    edit = Add(
        vector=direction(hidden, 0), layers=[layer], scale=0.1 * (i + 1), positions=positions
    )
    return {"inspect_lens": LensRequest(edits=(edit,))}


@lru_cache(maxsize=8)
def _gated(hidden: int, layer: int) -> Request:
    from inspect_lens import LensRequest
    from inspect_lens.spec import Add, Gate

    gate = Gate(direction=direction(hidden, 1), layer=layer, sharpness=2.0)
    edit = Add(vector=direction(hidden, 0), layers=[2 * layer], scale=0.5, when=gate)
    return {"inspect_lens": LensRequest(edits=(edit,))}


@lru_cache(maxsize=8)
def _joined(hidden: int, layer: int) -> Request:
    from inspect_lens import LensRequest
    from inspect_lens.spec import Add, Gate, Rule, Schedule

    once, token, latent = (
        Gate(direction=direction(hidden, 1), layer=layer, scope="rest"),
        Gate(direction=direction(hidden, 2), layer=layer, sharpness=2.0),
        Gate(direction=direction(hidden, 3), layer=layer, active_above=0.0),
    )
    edit = Add(
        vector=direction(hidden, 0),
        layers=[2 * layer],
        scale=0.5,
        when=Rule(any=[once, latent], none=[token]),
        positions="completion",
        schedule=Schedule(half_life=64.0),
    )
    return {"inspect_lens": LensRequest(edits=(edit,))}


@lru_cache(maxsize=8)
def _prompt_gated(hidden: int, layer: int) -> Request:
    from inspect_lens import LensRequest
    from inspect_lens.spec import Add, Gate

    gate = Gate(
        direction=direction(hidden, 1),
        layer=layer,
        threshold=0.05,
        similarity="cast",
        scope="rest",
        reads="prompt_mean",
    )
    edit = Add(
        vector=direction(hidden, 0),
        layers=[2 * layer],
        scale=0.5,
        when=gate,
        positions="completion",
    )
    return {"inspect_lens": LensRequest(edits=(edit,))}


_OFF = {"INSPECT_LENS_DISABLE": "1"}

ENGINES = {
    "plain": EngineKind(lambda shape: _OFF),
    "eager": EngineKind(lambda shape: _OFF, options={"enforce_eager": True}),
    "vllm-lens": EngineKind(lambda shape: _OFF, is_peer=True),
    "hf": EngineKind(lambda shape: _OFF, is_hf=True),
    "lens": EngineKind(),
    "lens-4": EngineKind(_four_layers),
    "lens-sites": EngineKind(sites_environment),
    "lens-router": EngineKind(router_environment),
}
"""`plain` and `lens` have vLLM's defaults; `lens` taps every layer, `lens-4` four of them,
`lens-sites` places inside of attention at these, too, and `lens-router` routers of experts."""

ARMS = {
    "default": Arm("plain", note="vLLM's defaults, no plug-in"),
    "eager": Arm("eager", note="vLLM without graphs and compilation, no plug-in"),
    "vllm-lens": Arm("vllm-lens", _one_layer, note="vllm-lens captures one layer, all tokens"),
    "hf": Arm("hf", note="transformers, forward hook at one layer, static batches"),
    "idle": Arm("lens", note="every layer tapped, nothing asked for"),
    "idle-4": Arm("lens-4", note="four layers tapped, nothing asked for"),
    "capture-1": Arm("lens", _one_layer, note="one layer, all tokens"),
    "capture-1-tcp": Arm(
        "lens", _one_layer, over_tcp=True, note="one layer, all tokens, fetched by HTTP"
    ),
    "capture-all": Arm(
        "lens", lambda shape, i: {"output_residual_stream": True}, note="all layers, all tokens"
    ),
    "text-1": Arm(
        "lens", _one_layer, streams=True, note="one layer, text as events, rows behind the last"
    ),
    "text-1-tcp": Arm(
        "lens",
        lambda shape, i: {
            "output_residual_stream": [shape.layer],
            "activations_transport": "inline",
        },
        streams=True,
        note="one layer, text as events, rows in the last one",
    ),
    "rows-1": Arm(
        "lens",
        lambda shape, i: _streamed_rows(shape, "binary"),
        streams=True,
        note="one layer, rows behind their tokens, taken beside the events",
    ),
    "rows-1-tcp": Arm(
        "lens",
        lambda shape, i: _streamed_rows(shape, "inline"),
        streams=True,
        note="one layer, rows behind their tokens, in the events",
    ),
    "text": Arm("lens", streams=True, note="every layer tapped, nothing asked for, text as events"),
    "scores-16x4": Arm(
        "lens",
        lambda shape, i: {
            "inspect_lens": {
                "probes": [{"name": name, "tokens": True} for name in _PROBES],
                "stream_results": True,
            }
        },
        probes=_probes,
        streams=True,
        note="the same 16 probes, each token's scores in the event of its token",
    ),
    "steer": Arm("lens", _steer, note="one vector at one layer, all tokens"),
    "probes-16x4": Arm(
        "lens",
        lambda shape, i: {"inspect_lens": {"probes": _PROBES}},
        probes=_probes,
        note="16 linear probes, each over 4 layers, mean over the completion; scores only",
    ),
    "steer-256": Arm(
        "lens",
        lambda shape, i: {"apply_steering_vectors": [vector(shape, i % 256)]},
        note="request i has vector i mod 256",
    ),
    "sweep-all": Arm(
        "lens",
        lambda shape, i: _sweep(shape.hidden, shape.layer, i, "all"),
        note="one vector, request i at scale i, all tokens",
    ),
    "sweep-completion": Arm(
        "lens",
        lambda shape, i: _sweep(shape.hidden, shape.layer, i, "completion"),
        note="the same on the completion alone, so that scales share the prompt's blocks",
    ),
    "ablate-all": Arm(
        "lens",
        lambda shape, i: _ablate_all(shape.hidden, shape.layers),
        note="one direction ablated at all layers",
    ),
    "program": Arm(
        "lens",
        lambda shape, i: _program(shape.hidden, shape.layer, 0),
        note="ablate, clamp and add at one layer",
    ),
    "programs-256": Arm(
        "lens",
        lambda shape, i: _program(shape.hidden, shape.layer, i % 256),
        note="request i has program i mod 256",
    ),
    "gate": Arm(
        "lens",
        lambda shape, i: _gated(shape.hidden, shape.layer),
        note="a vector, gated by a probe of an earlier layer",
    ),
    "rule": Arm(
        "lens",
        lambda shape, i: _joined(shape.hidden, shape.layer),
        note="a vector with a schedule, behind a rule over three gates, completion only",
    ),
    "gate-prompt": Arm(
        "lens",
        lambda shape, i: _prompt_gated(shape.hidden, shape.layer),
        note="a vector on the completion, behind a gate of the prompt's mean",
    ),
    "mixed": Arm(
        "lens", _mixed, note="half of the requests plain, a quarter capture-1, a quarter steer"
    ),
} | {name: Arm(engine, asked, note=note) for name, (engine, asked, note) in FAMILIES.items()}
"""Arms in the order of even repetitions; odd ones run them backwards."""
