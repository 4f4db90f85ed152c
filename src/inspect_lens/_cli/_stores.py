"""Stores on disk as the commands read them, and which of them may be read together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.data import ActivationStore
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import SENTENCE_POOL, AnyProbe
from inspect_lens.train import ActivationSet, StoreSet
from inspect_lens.vector import Vector

MEMORY: Final = 4.0
"""GB that a command may hold: a fit, or the stores that it reads whole with the copies of a fit."""
COPIES: Final = 4
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
    """A store, with the sentence ends where the pool needs them, or a file of `ActivationSet.save`.

    It is held in memory, as float32, where it takes at most a quarter of `memory` GB together with
    the stores `beside` it; else it stays on disk, fits of it hold at most `memory`, and they are
    kept in `work`.
    """
    if not uri:
        raise SpecError(f"--{what} is missing; name the folder of a store that `collect` wrote")
    name = Path(uri.rstrip("/")).name
    if is_file(uri):
        return _of_file(uri, name, layers)
    store = ActivationStore.open(uri)
    texts = pieces(store, tokenizer) if pool == SENTENCE_POOL else None
    others = [ActivationStore.open(o) for o in beside if o != uri and not is_file(o)]
    every = [store, *others]
    n_layers = len(store.layers if layers is None else layers)
    size = 4e-9 * n_layers * store.hidden * sum(one.n_rows for one in every)
    if COPIES * size > memory:
        return StoreSet(
            store, name=name, layers=layers, pieces=texts, work=work or None, memory=memory
        )
    return ActivationSet.from_store(store, name=name, layers=layers, pieces=texts)


def manifest_of(uri: str) -> Mapping[str, Any]:
    """What is known of a store, or of a file that `ActivationSet.save` wrote."""
    if not is_file(uri):
        return ActivationStore.open(uri).manifest
    data = ActivationSet.load(uri)
    return {
        "model": {"name": data.model, "sha256": data.model_sha256},
        "layers": data.layers,
        "n_samples": len(data),
        "request": {"positions": data.positions or "completion"},
        # Whose texts these are, and who wrote them, is not in the file.
        "dataset": {"on_policy": False, "label_meaning": "", "text_overlap_group": ""},
    }


def is_file(uri: str) -> bool:
    """Whether it is what `ActivationSet.save` writes, and not the folder of a store."""
    return Path(uri).is_file()


def _of_file(uri: str, name: str, layers: Sequence[int] | None) -> ActivationSet:
    data = ActivationSet.load(uri)
    kept = data.layers if layers is None else tuple(sorted(layers))
    if missing := sorted(set(kept) - set(data.layers)):
        raise SpecError(
            f"{uri}: layer {missing[0]} is not in it; allowed are {list(data.layers)}; save that "
            "layer, too"
        )
    rows = [data.layers.index(layer) for layer in kept]
    return replace(
        data, name=name.removesuffix(".safetensors"), layers=kept,
        acts=tuple(a[rows] for a in data.acts),
    )  # fmt: skip


def pieces(store: ActivationStore, tokenizer: str) -> Callable[[Sequence[int]], list[str]]:
    """Texts of tokens, by the tokenizer that is named or that of the store's model."""
    name = tokenizer or str(store.manifest["model"]["name"])
    return TokenTexts.of("", tokenizer=name).texts


def judged_set(probe: AnyProbe, uri: str, *, any_model: bool, tokenizer: str = "") -> ActivationSet:
    """A store that a probe may be judged on: its model, its layers and its tokens."""
    refuse_other_source(probe, uri, any_model=any_model)
    data = read_set(uri, "store", layers=probe.layers, pool=probe.pool, tokenizer=tokenizer)
    refuse_other_tokens(probe, uri, data)
    return data


def refuse_other_model(made: AnyProbe | Vector, uri: str, *, any_model: bool) -> None:
    """A store of another model than that of a probe or a vector; nothing of its rows is read."""
    ours, theirs = made.card.model, manifest_of(uri)["model"]
    if ours is None or any_model:
        return
    known = ours.sha256 and theirs["sha256"]
    is_same = ours.sha256 == theirs["sha256"] if known else ours.name == theirs["name"]
    if not is_same:
        raise ArtifactError(
            f"{uri}: activations of {theirs['name']!r}; {made.name!r} belongs to "
            f"{ours.name!r}; allowed is that model; collect there, or pass --any-model"
        )


def refuse_other_source(probe: AnyProbe, uri: str, *, any_model: bool) -> None:
    """A store of another model, or without the probe's layers; nothing of its rows is read."""
    refuse_other_model(probe, uri, any_model=any_model)
    captured = manifest_of(uri)["layers"]
    if missing := [layer for layer in probe.layers if layer not in captured]:
        raise ArtifactError(
            f"{uri}: layer {missing[0]} was not captured, only {list(captured)}; probe "
            f"{probe.name!r} reads {list(probe.layers)}; collect these layers"
        )


def refuse_other_tokens(probe: AnyProbe, uri: str, data: ActivationSet) -> None:
    """Rows at other positions than the probe reads."""
    if not data.reads(probe.card.positions):
        raise ArtifactError(
            f"{uri}: tokens at positions {data.positions!r}; probe {probe.name!r} reads "
            f"{probe.card.positions!r}; allowed are these; collect them"
        )


def refuse_shared_stores(train: str, uri: str, disjoint: Mapping[str, Any]) -> None:
    """`refuse_shared_texts` of the sets in two stores."""
    groups = [str(manifest_of(u)["dataset"]["text_overlap_group"]) for u in (train, uri)]
    columns = ((r.columns for r in ActivationStore.open(u).records()) for u in (train, uri))
    refuse_shared_texts(Path(uri.rstrip("/")).name, groups, columns, disjoint)


def refuse_shared_texts(
    name: str,
    groups: Sequence[str],
    columns: Iterable[Iterable[Mapping[str, str]]],
    disjoint: Mapping[str, Any],
) -> None:
    """Sets that are known to share texts need a column, named, that keeps them apart.

    `group`, `id` and `content` are not enough: these always differ where a text is told in other
    words, and the first is what every set is kept apart by.
    """
    is_shared = bool(groups[0]) and groups[0] == groups[1]
    if is_shared and disjoint.get(name, "group") in ("group", "id", "content"):
        apart = _columns_apart(columns)
        advice = f"as in --disjoint {name}={apart[0]}" if apart else "and these sets have none"
        more = f" (or {', '.join(apart[1:])})" if apart[1:] else ""
        raise SpecError(
            f"{name}: shares its text-overlap group {groups[1]!r} with the training set, so texts "
            f"may be in both; allowed is a set of another group, or a column that keeps them "
            f"apart, {advice}{more}"
        )


def _columns_apart(columns: Iterable[Iterable[Mapping[str, str]]]) -> list[str]:
    """Columns in which two sets share no value; those with most values first."""
    values: list[dict[str, set[str]]] = [{}, {}]
    for found, rows in zip(values, columns, strict=True):
        for row in rows:
            for key, value in row.items():
                found.setdefault(key, set()).add(value)
    ours, theirs = values
    apart = [key for key in ours if key in theirs and not ours[key] & theirs[key]]
    return sorted(apart, key=lambda key: -len(theirs[key]))


def unverified(stores: Sequence[str]) -> tuple[str, ...]:
    """What nobody could check about the data sets of stores, one note for each set."""
    facts = [manifest_of(uri)["dataset"] for uri in stores]
    notes = {f"{f['name']}, not verified: {f['unverified']}" for f in facts if f.get("unverified")}
    return tuple(sorted(notes))
