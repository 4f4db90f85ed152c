"""Edits of every operation with the closed form of each, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from inspect_lens.spec import (
    Ablate,
    Add,
    Clamp,
    EditBase,
    Insert,
    LatentMode,
    Latents,
    LowRank,
    ProjectOut,
    Reconstruct,
    Replace,
    Rotate,
    Scale,
    Swap,
    Zero,
)

__all__ = ["WIDTH", "edit_cases", "random_rows", "unit"]

WIDTH = 24
Wide = NDArray[np.float64]


def random_rows(seed: int, n: int, width: int = WIDTH) -> NDArray[np.float32]:
    """(n, width) numbers."""
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def unit(v: NDArray[Any]) -> Wide:
    """A vector of norm 1."""
    wide = v.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide))


def _along(v: NDArray[Any], change: Callable[[float], float]) -> Callable[[Wide], Wide]:
    """The stream with its projection on `v` changed."""
    u = unit(v)
    return lambda h: h + (change(float(h @ u)) - float(h @ u)) * u


def _turn(plane: NDArray[Any], degrees: float) -> Callable[[Wide], Wide]:
    first = unit(plane[0])
    second = unit(plane[1].astype(np.float64) - (plane[1] @ first) * first)
    angle = math.radians(degrees)

    def turned(h: Wide) -> Wide:
        x, y = float(h @ first), float(h @ second)
        rest = h - x * first - y * second
        x, y = (
            x * math.cos(angle) - y * math.sin(angle),
            x * math.sin(angle) + y * math.cos(angle),
        )
        return np.asarray(rest + x * first + y * second)

    return turned


def _several_latents(
    seed: int, short: np.float32, at: dict[str, Any], v: NDArray[np.float32]
) -> list[tuple[EditBase, Callable[[Wide], Wide]]]:
    """Edits of four latents at once, and reconstructions by them."""
    width, wide = len(v), v.astype(np.float64)
    encoder, decoder = random_rows(seed + 4, 8, width).reshape(2, 4, width) * short
    some: dict[str, Any] = {
        "encoder": encoder,
        "decoder": decoder,
        "bias": np.array([0.25, -0.5, 0.0, 1.0]),
    }
    some["threshold"] = limits = np.array([0.0, 0.5, 1.0, 0.0])
    values = np.array([2.0, 0.0, -1.0, 0.5])

    def latents(h: Wide) -> tuple[Wide, NDArray[np.bool_]]:
        z = encoder.astype(np.float64) @ h + some["bias"]
        return np.where(z > limits, z, 0.0), z > limits

    def several(h: Wide, *, mode: LatentMode, only: bool) -> Wide:
        was, is_active = latents(h)
        after = {
            "set": values, "add": was + values, "at_least": np.maximum(was, values),
        }[mode]  # fmt: skip
        step = np.where(is_active | (not only), after - was, 0.0)
        return np.asarray(h + step @ decoder.astype(np.float64))

    return [
        *(
            (
                Latents(value=values, mode=mode, only_if_active=only, **some, **at),
                lambda h, mode=mode, only=only: several(h, mode=mode, only=only),
            )
            for mode in get_args(LatentMode)
            for only in (False, True)
        ),
        (
            Reconstruct(decoder_bias=v, **some, **at),
            lambda h: latents(h)[0] @ decoder.astype(np.float64) + wide,
        ),
        (
            Reconstruct(strength=0.5, **some, **at),
            lambda h: 0.5 * h + 0.5 * latents(h)[0] @ decoder.astype(np.float64),
        ),
    ]


def edit_cases(
    seed: int, layer: int = 1, width: int = WIDTH
) -> list[tuple[EditBase, Callable[[Wide], Wide]]]:
    """Edits at one layer, and what each makes of a stream.

    Directions of any width are as long as those of `WIDTH`: with longer ones, a chain of latents
    multiplies the stream, and what the next takes back is rounding.
    """
    short = np.float32(math.sqrt(WIDTH / width))
    v, w, e, d = random_rows(seed, 4, width) * short
    r = np.linalg.qr(random_rows(seed + 1, 3, width).T)[0].T.astype(np.float32)
    weight = random_rows(seed + 2, 3, width) * short
    bias = np.array([0.3, -1.0, 2.0], dtype=np.float32)
    at: dict[str, Any] = {"layers": [layer]}
    wide = v.astype(np.float64)
    out = w.astype(np.float64)
    basis = np.linalg.qr(random_rows(seed + 3, 3, width).T.astype(np.float64))[0]

    def latent(h: Wide, *, threshold: float, value: float, mode: LatentMode, only: bool) -> Wide:
        z = float(h @ e) + 0.25
        activation = z if z > threshold else 0.0
        if only and not z > threshold:
            return h
        after = {
            "set": value, "add": activation + value, "at_least": max(activation, value),
        }[mode]  # fmt: skip
        return np.asarray(h + (after - activation) * d)

    def swapped(h: Wide) -> Wide:
        both = np.stack([wide, out], axis=1)
        c = np.linalg.lstsq(both, h, rcond=None)[0]
        return np.asarray(h - both @ c + both @ c[::-1])

    return [
        (Add(vector=v, scale=2.5, **at), lambda h: h + 2.5 * wide),
        (
            Add(vector=v, scale=0.5, norm_match=True, **at),
            lambda h: h + 0.5 * np.linalg.norm(h) * unit(v),
        ),
        (Ablate(direction=v, **at), _along(v, lambda x: 0.0)),
        (Ablate(direction=v, strength=0.3, **at), _along(v, lambda x: 0.7 * x)),
        (Clamp(direction=v, max=0.2, **at), _along(v, lambda x: min(x, 0.2))),
        (Clamp(direction=v, min=-0.1, max=0.2, **at), _along(v, lambda x: min(max(x, -0.1), 0.2))),
        (
            Clamp(direction=v, value=3.0, strength=0.5, **at),
            _along(v, lambda x: x + 0.5 * (3.0 - x)),
        ),
        (Clamp(direction=v, value=-1.5, **at), _along(v, lambda x: -1.5)),
        (Scale(direction=v, factor=3.0, **at), _along(v, lambda x: 3.0 * x)),
        (
            ProjectOut(directions=random_rows(seed + 3, 3, width), **at),
            lambda h: h - basis @ (basis.T @ h),
        ),
        (Rotate(plane=np.stack([v, w]), degrees=40.0, **at), _turn(np.stack([v, w]), 40.0)),
        (
            Insert(concept=v, instead_of=w, **at),
            lambda h: h + float(h @ out) / float(out @ out) * (wide - out),
        ),
        (Swap(first=v, second=w, **at), swapped),
        (
            LowRank.loreft(r, weight, bias, layers=[layer]),
            lambda h: h + r.T.astype(np.float64) @ (weight @ h + bias - r @ h),
        ),
        (
            LowRank.lm_steer(weight.T, r.T, scale=0.2, layers=[layer]),
            lambda h: h + 0.2 * (h @ weight.T.astype(np.float64)) @ r,
        ),
        *(
            (
                Latents(
                    encoder=e[None], decoder=d[None], bias=[0.25], threshold=[t], value=[2.0],
                    mode=mode, only_if_active=only, **at,
                ),
                lambda h, t=t, mode=mode, only=only: latent(
                    h, threshold=t, value=2.0, mode=mode, only=only
                ),
            )
            for t in (0.0, 1.0)
            for mode in get_args(LatentMode)
            for only in (False, True)
        ),
        *_several_latents(seed, short, at, v),
        (Replace(rows=v, **at), lambda h: wide),
        (Replace(rows=v, alpha=0.25, **at), lambda h: 0.75 * h + 0.25 * wide),
        (Zero(**at), lambda h: 0.0 * h),
    ]  # fmt: skip
