"""Arms of `benchmarks.run` for techniques: one for each family of edits, and the readouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from .shapes import Shape

__all__ = ["FAMILIES", "direction", "four_layers", "router_environment", "sites_environment"]

Request = Mapping[str, Any] | None
Asked = Callable[[Shape, int], Request]


@lru_cache(maxsize=1024)
def direction(hidden: int, seed: int) -> np.ndarray:
    """A random direction of norm 1, the same object for the same seed."""
    values: np.ndarray = np.random.default_rng(seed).standard_normal(hidden)
    row: np.ndarray = (values / np.linalg.norm(values)).astype(np.float32)
    return row


def sites_environment(shape: Shape) -> Mapping[str, str]:
    """An engine that taps queries, keys and attention results, too, at the arm's layer."""
    return {
        "INSPECT_LENS_SITES": "resid_post,q,k,z",
        "INSPECT_LENS_LAYERS": ",".join(map(str, four_layers(shape))),
    }


def router_environment(shape: Shape) -> Mapping[str, str]:
    """An engine that taps routers of experts, too."""
    return {**sites_environment(shape), "INSPECT_LENS_SITES": "resid_post,router_logits"}


def four_layers(shape: Shape) -> list[int]:
    """The first, the last and two between."""
    return sorted({0, shape.layer, 2 * shape.layer, shape.layers - 1})


def _edits(make: Callable[[int, int], tuple[Any, ...]]) -> Asked:
    """Each request has the same edits, which are made once per shape."""

    @lru_cache(maxsize=8)
    def made(hidden: int, layer: int) -> Request:
        from inspect_lens import LensRequest

        return {"inspect_lens": LensRequest(edits=make(hidden, layer))}

    return lambda shape, i: made(shape.hidden, shape.layer)


def _swap(hidden: int, layer: int) -> tuple[Any, ...]:
    from inspect_lens.spec import Swap

    return (Swap(first=direction(hidden, 1), second=direction(hidden, 2), layers=[layer]),)


def _rotate(hidden: int, layer: int) -> tuple[Any, ...]:
    from inspect_lens.spec import Rotate

    plane = np.stack([direction(hidden, 1), direction(hidden, 2)])
    return (Rotate(plane=plane, degrees=20.0, layers=[layer]),)


def _latent(hidden: int, layer: int) -> tuple[Any, ...]:
    from inspect_lens.spec import Latents

    encoder, decoder = direction(hidden, 1)[None], direction(hidden, 2)[None]
    one = Latents(encoder=encoder, decoder=decoder, threshold=[0.1], value=[1.0], layers=[layer])
    return (one,)


def _low_rank(hidden: int, layer: int) -> tuple[Any, ...]:
    from inspect_lens.spec import LowRank

    read = np.stack([direction(hidden, i) for i in range(8)])
    write = np.stack([direction(hidden, 8 + i) for i in range(8)])
    return (LowRank(read=read, write=write, scale=0.1, layers=[layer]),)


def _replace(hidden: int, layer: int) -> tuple[Any, ...]:
    from inspect_lens.spec import Replace

    return (Replace(rows=direction(hidden, 1), alpha=0.1, layers=[layer]),)


def _renormalise(hidden: int, layer: int) -> tuple[Any, ...]:
    from inspect_lens.spec import Add, Renormalise

    add = Add(vector=direction(hidden, 1), norm_match=True, scale=0.1, layers=[layer])
    return (add, Renormalise(layers=[layer]))


def _lens(shape: Shape, i: int) -> Request:
    return {"inspect_lens": {"lens": {"layers": four_layers(shape), "top_k": 5}}}


def _lens_sampled(shape: Shape, i: int) -> Request:
    lens = {"layers": four_layers(shape), "top_k": 5, "positions": "completion"}
    return {"inspect_lens": {"lens": lens}}


def _router(shape: Shape, i: int) -> Request:
    return {"inspect_lens": {"capture": {"layers": [shape.layer], "site": "router_logits"}}}


def _queries_and_keys(shape: Shape, i: int) -> Request:
    return {"output_qk": [shape.layer]}


FAMILIES: dict[str, tuple[str, Asked, str]] = {
    "swap": ("lens-sites", _edits(_swap), "two directions exchanged at one layer"),
    "rotate": ("lens-sites", _edits(_rotate), "a plane turned by 20 degrees at one layer"),
    "latent": ("lens-sites", _edits(_latent), "a latent of a sparse autoencoder set at one layer"),
    "low-rank": ("lens-sites", _edits(_low_rank), "a low-rank edit of 8 directions at one layer"),
    "replace": ("lens-sites", _edits(_replace), "a stored row mixed in at one layer"),
    "renormalise": (
        "lens-sites",
        _edits(_renormalise),
        "a norm-matched vector, and its norm given back",
    ),
    "logit-lens": ("lens", _lens, "the five most likely tokens at 4 layers, for all tokens"),
    "logit-lens-sampled": ("lens", _lens_sampled, "the same, for sampled tokens"),
    "qk-1": ("lens-sites", _queries_and_keys, "queries and keys of one layer, all tokens"),
    "idle-router": ("lens-router", lambda shape, i: None, "four layers and their routers tapped"),
    "router-1": ("lens-router", _router, "logits of one layer's router, all tokens"),
}
"""By arm: its engine, the extra arguments of its i-th request, and what it is."""
