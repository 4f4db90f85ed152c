"""Writing down which samples made a probe, and refusing to judge it on them."""

from __future__ import annotations

from typing import Final, Literal

from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, SeenSamples

from ._dataset import ActivationSet

__all__ = ["count_seen", "list_seen", "refuse_seen"]

_DONE: Final = {
    "training": "were in training",
    "selection": "chose the layer",
    "control": "set the threshold",
    "calibration": "fitted the probabilities",
}


def list_seen(
    probe: AnyProbe, train: ActivationSet, selection: ActivationSet, control: ActivationSet
) -> SeenSamples:
    """The samples of three sets, for the card.

    Args:
        probe: its layers are those whose activations tell samples apart where contents are not
            known of all sets.
        train: what the direction was fitted on.
        selection: what the layer was chosen on.
        control: what the threshold was set on.

    Returns:
        The record.
    """
    sets = (train, selection, control)
    by: Literal["content", "activations"] = "content"
    if not all(data.contents for data in sets):
        by = "activations"
    first, second, third = (data.shown(by, probe.layers) or [] for data in sets)
    return SeenSamples.of(by, training=first, selection=second, control=third)


def count_seen(probe: AnyProbe, data: ActivationSet) -> int | None:
    """Samples of a set that took part in making a probe; None where that cannot be told."""
    found = _find(probe, data)
    return None if found is None else len({i for part in found.values() for i in part})


def refuse_seen(
    probe: AnyProbe,
    data: ActivationSet,
    *,
    roles: tuple[str, ...] = ("training", "selection", "control", "calibration"),
) -> None:
    """Refuse a set that holds samples which took part in making a probe.

    Args:
        probe: with or without a list of its samples.
        data: the set.
        roles: parts that count.

    Raises:
        SpecError: there are such samples; the message counts and names them.

    Example:
        ```python
        from inspect_lens.errors import SpecError
        from inspect_lens.train import ActivationSet, LDAProbe, refuse_seen, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        refuse_seen(probe, test)
        try:
            refuse_seen(probe, train)
        except SpecError as error:
            print(error)
        ```
    """
    found = {role: part for role, part in (_find(probe, data) or {}).items() if role in roles}
    if not found:
        return
    n, parts = len(data), []
    for role, part in found.items():
        names = ", ".join(repr(data.ids[i]) for i in part[:3])
        parts.append(f"{len(part)} of {n} samples {_DONE[role]}, such as {names}")
    raise SpecError(
        f"{data.name}: {'; '.join(parts)} (probe {probe.name!r}); allowed are samples that took no "
        "part in making the probe; leave these out, or pass allow_seen=True (--allow-seen) to "
        "measure on what it knows"
    )


def _find(probe: AnyProbe, data: ActivationSet) -> dict[str, list[int]] | None:
    seen = probe.card.seen
    shown = None if seen is None else data.shown(seen.by, probe.layers)
    return None if seen is None or shown is None else seen.find(shown)
