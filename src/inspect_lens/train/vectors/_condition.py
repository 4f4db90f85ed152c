"""Conditions of conditional activation steering (CAST): when a prompt is about something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.spec import Gate, Rule, as_array
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.vector import Vector

__all__ = ["Condition", "fit_condition", "similarity"]

Side = Literal["above", "below"]


class Condition(NamedTuple):
    """Rule for conditional steering: steer if the prompt is on one side of a similarity threshold.

    The source names the side from the threshold's point of view: its `"larger"` means that the
    threshold is larger than the similarity, which is `below` here, and its `"smaller"` is `above`.
    """

    layer: int
    """Block, counted from 0, whose output is read. The source reads inputs: its layer is one
    more."""
    direction: NDArray[np.float64]
    """(hidden,) the condition vector."""
    threshold: float
    acts: Side
    """Where the condition holds."""
    f1: float
    """Of prompts that it should hold for, on the samples that it was fitted on."""
    rows: Literal["mean", "last"] = "mean"
    """What is read of a prompt: the mean of its tokens, or the last one."""

    @property
    def threshold_is(self) -> Literal["larger", "smaller"]:
        """The side in the words of the source, for its `condition_comparator_threshold_is`."""
        return "larger" if self.acts == "below" else "smaller"

    def holds(self, prompt: ArrayLike) -> bool:
        """Whether it holds for a prompt, by the rows (tokens, hidden) of its tokens at `layer`."""
        rows = as_array(prompt).astype(np.float64)
        read = rows.mean(axis=0) if self.rows == "mean" else rows[-1]
        value = float(similarity(read, self.direction))
        return value > self.threshold if self.acts == "above" else value < self.threshold

    @property
    def when(self) -> Gate | Rule:
        """The same for an engine: `when` of an edit of sampled tokens."""
        gate = Gate(
            direction=self.direction.astype(np.float32),
            layer=self.layer,
            threshold=self.threshold,
            similarity="cast",
            scope="rest",
            reads="prompt_mean" if self.rows == "mean" else "last_prompt",
        )
        return gate if self.acts == "above" else Rule(none=(gate,))


def similarity(rows: ArrayLike, direction: ArrayLike) -> NDArray[np.float64]:
    """Cosine of rows and of the hyperbolic tangent of their projection on a direction, (...,).

    Args:
        rows: (..., hidden).
        direction: (hidden,); its length and sign do not matter.

    Source:
        arXiv:2409.05907: sim(h, tanh(P h)) with P = c cᵀ / cᵀ c.

    Example:
        ```python
        from inspect_lens.train import similarity

        values = similarity([[3.0, 0.0], [0.0, 2.0]], [1.0, 0.0])
        assert values.tolist() == [1.0, 0.0]
        ```
    """
    x, c = as_array(rows).astype(np.float64), as_array(direction).astype(np.float64)
    projected = np.tanh((x @ c)[..., None] * c / (c @ c))
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(projected, axis=-1)
    dots = (x * projected).sum(axis=-1)
    return np.asarray(np.where(norms > 0, dots / np.where(norms > 0, norms, 1.0), 0.0))


@judged_arguments
def fit_condition(
    vector: Vector,
    data: ActivationSet,
    *,
    layers: Sequence[int] | None = None,
    rows: Literal["mean", "last"] = "mean",
) -> Condition:
    """Find the layer and threshold that tell when to steer, by the largest F1 and widest gap.

    Args:
        vector: condition vectors, such as `extract_vector(method="pca")` of prompts that the
            condition should and should not hold for.
        data: prompts with label 1 where it should hold; `positions="prompt"`.
        layers: to search; those that both have by default.
        rows: what is read of a prompt.

    Raises:
        SpecError: no common layer, or a class is missing.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, extract_vector, fit_condition

        data = ActivationSet.load("acts/train.safetensors")
        vector = extract_vector(data, name="mine/condition", rows="mean")
        condition = fit_condition(vector, data)
        assert condition.f1 > 0.8
        assert condition.holds(data.sequences(condition.layer)[1])
        ```
    """
    shared = [n for n in vector.layers if n in data.layers]
    tried = shared if layers is None else sorted(layers)
    if not tried or set(tried) - set(shared) or not data.n_positive or not data.n_negative:
        raise SpecError(
            f"layers={list(tried)}: vector has {list(vector.layers)} and {data.name!r} has "
            f"{list(data.layers)}, {data.n_positive} positive and {data.n_negative} negative "
            "prompts; allowed are layers of both, and both classes"
        )
    found: list[tuple[float, int, float, Condition]] = []
    for layer in tried:
        direction = vector.raw(layer).astype(np.float64)
        values = similarity(data.pooled(layer, rows), direction)
        ordered = np.unique(values)
        middles = (ordered[1:] + ordered[:-1]) / 2.0 if ordered.size > 1 else ordered
        gaps = np.diff(ordered) if ordered.size > 1 else np.zeros(1)
        for threshold, gap in zip(middles.tolist(), gaps.tolist(), strict=True):
            for acts in get_args(Side):
                held = values > threshold if acts == "above" else values < threshold
                right = int((held & data.labels).sum())
                f1 = 2.0 * right / max(int(held.sum()) + data.n_positive, 1)
                made = Condition(layer, direction, threshold, acts, f1, rows)
                found.append((f1, -layer, gap, made))
    return max(found, key=lambda row: row[:3])[3]
