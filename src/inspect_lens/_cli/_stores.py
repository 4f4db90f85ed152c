"""Stores as the commands read them, and what they may be used for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from inspect_lens.data import ActivationStore
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import SENTENCE_POOL, AnyProbe
from inspect_lens.train import ActivationSet, StoreSet

__all__ = ["MEMORY", "judged_set", "pieces", "read_set", "refuse_shared_texts", "unverified"]

MEMORY: Final = 4.0
"""GB that a command may hold: a fit, or the stores that it reads whole with the copies of a fit."""
_COPIES: Final = 4
"""How often a fit in memory holds the rows of its stores, about."""


def read_set(
    uri: str,
    what: str,
    *,
    layers: Sequence[int] | None = None,
    pool: str = "",
    tokenizer: str = "",
    memory: float = MEMORY,
    work: str = "",
    beside: Sequence[str] = (),
) -> ActivationSet:
    """A store, with the sentence ends where the pool needs them.

    It is held in memory, as float32, where it takes at most a quarter of `memory` GB together with
    the stores `beside` it; else it stays on disk, fits of it hold at most `memory`, and they are
    kept in `work`.
    """
    if not uri:
        raise SpecError(f"--{what}: is missing; allowed is the folder of a store")
    store = ActivationStore.open(uri)
    texts = pieces(store, tokenizer) if pool == SENTENCE_POOL else None
    name = Path(uri.rstrip("/")).name
    every = [store, *(ActivationStore.open(other) for other in beside if other != uri)]
    n_layers = len(store.layers if layers is None else layers)
    size = 4e-9 * n_layers * store.hidden * sum(one.n_rows for one in every)
    if _COPIES * size > memory:
        return StoreSet(
            store, name=name, layers=layers, pieces=texts, work=work or None, memory=memory
        )
    return ActivationSet.from_store(store, name=name, layers=layers, pieces=texts)


def pieces(store: ActivationStore, tokenizer: str) -> Callable[[Sequence[int]], list[str]]:
    """Texts of tokens, by the tokenizer that is named or that of the store's model."""
    from inspect_lens._token_texts import TokenTexts

    name = tokenizer or str(store.manifest["model"]["name"])
    return TokenTexts.of("", tokenizer=name).texts


def judged_set(probe: AnyProbe, uri: str, *, any_model: bool, tokenizer: str = "") -> ActivationSet:
    """A store that a probe may be judged on: its model, its layers and its tokens."""
    store = ActivationStore.open(uri)
    ours, theirs = probe.card.model, store.manifest["model"]
    known = ours is not None and ours.sha256 and theirs["sha256"]
    other = ours is not None and (
        ours.sha256 != theirs["sha256"] if known else ours.name != theirs["name"]
    )
    if other and not any_model:
        assert ours is not None
        raise ArtifactError(
            f"{uri}: activations of {theirs['name']!r}; probe {probe.name!r} belongs to "
            f"{ours.name!r}; allowed is that model; collect there, or pass --any-model"
        )
    missing = [layer for layer in probe.layers if layer not in store.layers]
    if missing:
        raise ArtifactError(
            f"{uri}: layer {missing[0]} was not captured, only {list(store.layers)}; probe "
            f"{probe.name!r} reads {list(probe.layers)}; collect these layers"
        )
    data = read_set(uri, "store", layers=probe.layers, pool=probe.pool, tokenizer=tokenizer)
    if not data.reads(probe.card.positions):
        raise ArtifactError(
            f"{uri}: tokens at positions {data.positions!r}; probe {probe.name!r} reads "
            f"{probe.card.positions!r}; allowed are these; collect them"
        )
    return data


def refuse_shared_texts(train: str, uri: str, disjoint: Mapping[str, Any]) -> None:
    """Sets that are known to share texts need a column, named, that keeps them apart.

    `group`, `id` and `content` are not enough: these always differ where a text is told in other
    words, and the first is what every set is kept apart by.
    """
    stores = [ActivationStore.open(u) for u in (train, uri)]
    groups = [store.manifest["dataset"]["text_overlap_group"] for store in stores]
    name = Path(uri.rstrip("/")).name
    if groups[0] == groups[1] and disjoint.get(name, "group") in ("group", "id", "content"):
        apart = _columns_apart(*stores)
        advice = f"as in --disjoint {name}={apart[0]}" if apart else "and these sets have none"
        more = f" (or {', '.join(apart[1:])})" if apart[1:] else ""
        raise SpecError(
            f"{name}: shares its text-overlap group {groups[1]!r} with the training set, so texts "
            f"may be in both; allowed is a set of another group, or a column that keeps them "
            f"apart, {advice}{more}"
        )


def _columns_apart(one: ActivationStore, other: ActivationStore) -> list[str]:
    """Columns in which two sets share no value; those with most values first."""
    values: list[dict[str, set[str]]] = [{}, {}]
    for found, store in zip(values, (one, other), strict=True):
        for record in store.records():
            for key, value in record.columns.items():
                found.setdefault(key, set()).add(value)
    ours, theirs = values
    apart = [key for key in ours if key in theirs and not ours[key] & theirs[key]]
    return sorted(apart, key=lambda key: -len(theirs[key]))


def unverified(stores: Sequence[str]) -> tuple[str, ...]:
    """What nobody could check about the data sets of stores, one note for each set."""
    facts = [ActivationStore.open(uri).manifest["dataset"] for uri in stores]
    notes = {f"{f['name']}, not verified: {f['unverified']}" for f in facts if f.get("unverified")}
    return tuple(sorted(notes))
