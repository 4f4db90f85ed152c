"""Persona vectors: a trait, from responses under prompts that ask for it and against it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from inspect_lens.errors import SpecError
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.vector import Vector

from ._vectors import extract_vector

_SOURCE: Final = "arXiv:2507.21509"


def persona_pairs(
    data: ActivationSet,
    *,
    trait: str = "trait",
    coherence: str = "coherence",
    threshold: float = 50.0,
) -> ActivationSet:
    """Keep the pairs of responses in which a judge saw what the prompts asked for.

    A pair is the answer to one question under a system prompt for the trait and under one against
    it. It is kept where the first shows the trait (at least `threshold`), the second does not
    (below 100 - `threshold`), and both are coherent (at least 50).

    Args:
        data: responses; label 1 under the prompt for the trait. A group is a pair: the question,
            the number of the prompt pair, and that of the rollout.
        trait: column with the judge's score of the trait, 0 to 100.
        coherence: column with the judge's score of coherence, 0 to 100.
        threshold: of the trait.

    Returns:
        The samples of the pairs that are kept.

    Raises:
        SpecError: a column is missing or no number, a group is no pair, or none is kept.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import from_arrays, persona_pairs

        data = from_arrays(
            np.random.default_rng(0).standard_normal((4, 1, 8)),
            [1, 0, 1, 0],
            layers=[3],
            groups=["a", "a", "b", "b"],
            columns={"trait": [90, 5, 20, 5], "coherence": [80, 90, 90, 90]},
        )
        assert persona_pairs(data).groups == ("a", "a")  # the other shows no trait
        ```
    """
    scores = {}
    for column in (trait, coherence):
        try:
            scores[column] = np.array([float(value) for value in data.key(column)])
        except ValueError as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(
                f"{column}: {data.name} holds values that are no numbers ({error}); allowed are "
                "scores of a judge from 0 to 100; leave samples without a score out"
            ) from None
    members: dict[str, dict[bool, list[int]]] = {}
    for i, (group, label) in enumerate(zip(data.groups, data.labels.tolist(), strict=True)):
        members.setdefault(group, {True: [], False: []})[label].append(i)
    kept: list[int] = []
    for group, sides in members.items():
        if [len(side) for side in sides.values()] != [1, 1]:
            raise SpecError(
                f"group {group!r}: {len(sides[True])} samples for the trait and "
                f"{len(sides[False])} against it; allowed is one of each; name groups by question, "
                "prompt pair and rollout"
            )
        high, low = sides[True][0], sides[False][0]
        shown = scores[trait][high] >= threshold and scores[trait][low] < 100.0 - threshold
        if shown and min(scores[coherence][[high, low]]) >= 50.0:
            kept += [high, low]
    if not kept:
        raise SpecError(
            f"{data.name}: none of {len(members)} pairs shows the trait under one prompt and not "
            "under the other, coherently; check the judge, or lower the threshold"
        )
    return data.subset(sorted(kept))


def persona_vector(
    data: ActivationSet,
    *,
    name: str,
    trait: str = "trait",
    coherence: str = "coherence",
    threshold: float = 50.0,
    **options: Any,
) -> Vector:
    """Difference of mean responses with and without a trait, in every layer.

    Rows are means over the tokens of a response (collect with `positions="completion"`; for the
    source's other two kinds, `prompt` and `last_prompt`). The source chooses the layer by how much
    steering with it changes the trait; a `selection` set chooses it by separation instead.

    Args:
        data: as in `persona_pairs`, of the model's own responses.
        name: `<model>/<name>`, for the card.
        trait: column, as in `persona_pairs`.
        coherence: column, as in `persona_pairs`.
        threshold: as in `persona_pairs`.
        **options: of `extract_vector`, such as `layer` and `description`.

    Returns:
        The vector; its card says how many pairs were kept.

    Raises:
        SpecError: as `persona_pairs` and `extract_vector`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import from_arrays, persona_vector

        rng, labels = np.random.default_rng(0), np.arange(40) % 2
        data = from_arrays(
            rng.standard_normal((40, 1, 8)) + labels[:, None, None],
            labels,
            layers=[3],
            groups=[str(i // 2) for i in range(40)],
            columns={"trait": labels * 90, "coherence": [95] * 40},
        )
        vector = persona_vector(data, name="mine/cheerful", layer=3)
        assert vector.layers == (3,)
        ```
    """
    kept = persona_pairs(data, trait=trait, coherence=coherence, threshold=threshold)
    notes = (
        f"{len(kept) // 2} of {len(data) // 2} pairs kept: trait at least {threshold:g} and below "
        f"{100 - threshold:g}, coherence at least 50, by column {trait!r}",
        f"source of the pipeline: {_SOURCE}",
        *options.pop("notes", ()),
    )
    return extract_vector(
        kept, name=name, method="mean_difference", rows="mean", notes=notes, **options
    )
