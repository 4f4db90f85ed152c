"""Activations with labels and groups, in memory; their file, and how a store is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from inspect_lens._base.arguments import judged_value
from inspect_lens._base.untrusted import metadata_of, parse_json, parsing, read_regular
from inspect_lens.data import ActivationStore, Captured, SampleRecord
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    SENTENCE_POOL,
    AnyProbe,
    CaptureFacts,
    Statistic,
    sentence_ends,
    write_atomic,
)
from inspect_lens.spec import Positions, TensorData, as_indices, parse_positions

__all__ = ["ActivationSet"]

Pieces: TypeAlias = Callable[[Sequence[int]], Sequence[str]]
"""From token ids to the text of each of them."""


def read_facts(
    store: ActivationStore,
    *,
    name: str | None = None,
    layers: Sequence[int] | None = None,
    pieces: Pieces | None = None,
) -> dict[str, Any]:
    """Fields of an `ActivationSet` but the activations, which stay on disk."""
    wanted, records = _layers(store, layers), _records(store, name)
    if list(wanted) != sorted(set(wanted)):
        raise SpecError(f"layers={list(wanted)}: allowed are unique layers in ascending order")
    ends = () if pieces is None else tuple(_ends(s, pieces) for s in _kept(store))
    return _facts(store, records, name) | {"layers": wanted, "ends": ends}


def _layers(store: ActivationStore, layers: Sequence[int] | None) -> tuple[int, ...]:
    wanted = tuple(store.layers if layers is None else judged_value("layers", layers, list[int]))
    missing = [layer for layer in wanted if layer not in store.layers]
    if missing or not wanted:
        raise SpecError(
            f"layers={list(wanted)}: {store.uri} holds {list(store.layers)}; allowed is one or "
            "more of these; collect the others"
        )
    return wanted


def numbered(name: str, n: int) -> tuple[str, ...]:
    """Names of the samples of a set that has none: those of another set are others."""
    return tuple(f"{name}-{i}" for i in range(n))


def _is_kept(record: SampleRecord, ids: Collection[str] | None) -> bool:
    return record.label is not None and (ids is None or record.id in ids)


def _records(
    store: ActivationStore, name: str | None, ids: Collection[str] | None = None
) -> list[SampleRecord]:
    """Samples that have rows and a label."""
    records = [r for r in store.records() if r.n_rows and _is_kept(r, ids)]
    if not records:
        title = name or str(store.manifest["dataset"]["name"])
        raise SpecError(
            f"{title}: no sample has rows and a label; allowed is one at least; check the "
            "positions that were captured"
        )
    return records


def _kept(store: ActivationStore, ids: Collection[str] | None = None) -> Iterator[Captured]:
    return (s for s in store.samples() if s.acts is not None and _is_kept(s.record, ids))


def _ends(sample: Captured, pieces: Pieces) -> NDArray[np.bool_]:
    # Of all tokens: where a sentence ends shows at the token behind it.
    texts = list(pieces(sample.token_ids))
    if len(texts) != len(sample.token_ids):
        raise SpecError(
            f"pieces: {len(texts)} texts for {len(sample.token_ids)} tokens; allowed is one text "
            "per token"
        )
    return sentence_ends(texts)[list(sample.positions)]


def _facts(
    store: ActivationStore, records: Sequence[SampleRecord], name: str | None
) -> dict[str, Any]:
    """All that the headers and the manifest say."""
    positions = store.manifest.get("request", {}).get("positions")
    keys = set.intersection(*(set(r.columns) for r in records))
    return {
        "name": name or str(store.manifest["dataset"]["name"]),
        "model": str(store.manifest["model"]["name"]),
        "labels": np.array([bool(r.label) for r in records]),
        "groups": tuple(r.group for r in records),
        "ids": tuple(r.id for r in records),
        "columns": {k: tuple(r.columns[k] for r in records) for k in sorted(keys)}
        | {
            "completion": tuple(r.completion for r in records),
            "prompt_text": tuple(r.prompt for r in records),
        },
        "contents": tuple(r.content for r in records) if all(r.content for r in records) else (),
        "positions": None if positions is None else parse_positions(positions, field="positions"),
        "raw": not any(r.completion for r in records),
        "model_sha256": store.manifest["model"].get("sha256"),
        "capture": _capture(store),
        "label_source": str(store.manifest["dataset"].get("label_source", "")),
    }


def _capture(store: ActivationStore) -> CaptureFacts | None:
    """Engine, and sampling where the model wrote the answers, as the manifest has them."""
    told = dict(store.manifest.get("computed_with", {}))
    if not told:
        return None
    if store.manifest["dataset"].get("on_policy", True):
        request = store.manifest.get("request", {})
        told |= {key: request.get(key) for key in ("temperature", "max_tokens", "seed")}
    return CaptureFacts.known(told)


_FORMAT: Final = "inspect_lens.activations/1"
_KEY: Final = "inspect_lens"
_FACTS: Final = ("name", "model", "layers", "groups", "ids", "columns")
_MORE: Final = ("contents", "raw", "model_sha256", "label_source")


@dataclass(frozen=True, eq=False, kw_only=True)
class ActivationSet:
    """Activations of samples of one model, in the order given.

    Args:
        name: of the set, as cards show it.
        model: name or path of the model.
        layers: layers of the first axis, ascending.
        acts: per sample (layers, tokens, hidden) float32, raw residual stream.
        labels: (samples,) 0 and 1, or bools; 1 is what the probe should find.
        groups: (samples,) what must not straddle a split, such as the scenario.
        mask: per sample (tokens,) bool, the tokens that the probe reads; all by default.
        ids: (samples,) names of the samples; that of the set and a number by default.
        columns: more keys that sets can be disjoint by, each with (samples,) values.
        contents: (samples,) what tells samples apart whatever they are called, such as
            `ProbeSample.content_id`; without it samples are the same where activations are.
        ends: per sample (tokens,) bool, with which tokens a sentence ends; for probes with the
            pool `sentence_mean_max`.
        positions: which tokens were captured, as `collect` takes them; None: not known.
        raw: texts were read as they stand, so that `completion` and `prompt` are the same tokens.
        model_sha256: `fingerprint_model` of the weights; None: not known.
        capture: what computed the activations, for cards; None: not known.
        label_source: what says which samples are positive: an `instruction`, a `judge`, or the
            `ground truth`, for cards; empty: not said.

    Raises:
        SpecError: lengths or shapes disagree, a value is NaN, or a sample has no token.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import ActivationSet

        rng = np.random.default_rng(0)
        data = ActivationSet(
            name="mine",
            model="my-model",
            layers=(10, 12),
            acts=tuple(rng.standard_normal((2, n, 16)) for n in (5, 7)),  # (layers, tokens, hidden)
            labels=[0, 1],
            groups=["a", "b"],
        )
        path = data.save("mine.safetensors")
        assert ActivationSet.load(path).sha256 == data.sha256
        ```
    """

    name: str
    model: str
    layers: tuple[int, ...]
    acts: tuple[NDArray[np.float32], ...]
    labels: NDArray[np.bool_]
    groups: tuple[str, ...]
    mask: tuple[NDArray[np.bool_], ...] = ()
    ids: tuple[str, ...] = ()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    contents: tuple[str, ...] = ()
    ends: tuple[NDArray[np.bool_], ...] = ()
    positions: Positions | None = None
    raw: bool = False
    model_sha256: str | None = None
    capture: CaptureFacts | None = None
    label_source: str = ""

    def __post_init__(self) -> None:
        n = len(self.acts)
        acts = tuple(np.asarray(a, dtype=np.float32) for a in self.acts)
        set_ = object.__setattr__
        set_(self, "acts", acts)
        set_(self, "layers", tuple(judged_value("layers", n, int) for n in self.layers))
        set_(self, "labels", _labels(self.labels, self.name))
        set_(self, "groups", tuple(map(str, self.groups)))
        set_(self, "ids", tuple(map(str, self.ids)) or numbered(self.name, n))
        masks = self.mask or tuple(np.ones(a.shape[1], dtype=bool) for a in acts if a.ndim == 3)
        set_(self, "mask", tuple(np.asarray(m, dtype=bool) for m in masks))
        columns = {key: tuple(map(str, values)) for key, values in self.columns.items()}
        set_(self, "columns", MappingProxyType(columns))
        set_(self, "contents", tuple(map(str, self.contents)))
        set_(self, "ends", tuple(np.asarray(e, dtype=bool) for e in self.ends))
        self._check(n)

    def _check(self, n: int) -> None:
        if list(self.layers) != sorted(set(self.layers)):
            raise SpecError(
                f"{self.name}.layers={self.layers}; allowed are unique layers in ascending order; "
                "sort the layers and the first axis of acts"
            )
        lengths = {"labels": len(self.labels), "groups": len(self.groups), "ids": len(self.ids)}
        lengths |= {key: len(values) for key, values in self.columns.items()}
        optional = {"contents": len(self.contents), "ends": len(self.ends)}
        lengths |= {key: length for key, length in optional.items() if length}
        for key, length in lengths.items():
            if length != n:
                raise SpecError(
                    f"{self.name}.{key}: {length} values for {n} samples; allowed is one each; "
                    "build all of them in one loop over the samples"
                )
        hidden = {a.shape[-1] for a in self.acts}
        for i, (acts, name) in enumerate(zip(self.acts, self.ids, strict=True)):
            if acts.ndim != 3 or acts.shape[0] != len(self.layers) or len(hidden) != 1:
                raise SpecError(
                    f"{self.name}.acts[{i}] ({name}): shape {acts.shape}; allowed is "
                    f"({len(self.layers)}, tokens, hidden) with one width, widths here are "
                    f"{sorted(hidden)}; capture the same layers for every sample"
                )
            if not np.isfinite(acts).all():
                raise SpecError(
                    f"{self.name}.acts[{i}] ({name}): holds NaN or infinity; allowed are finite "
                    "numbers; leave the sample out"
                )
        for i, (acts, mask) in enumerate(zip(self.acts, self.mask, strict=True)):
            if mask.shape != (acts.shape[1],) or not mask.any():
                raise SpecError(
                    f"{self.name}.mask[{i}] ({self.ids[i]}): shape {mask.shape} with "
                    f"{int(mask.sum())} tokens selected for {acts.shape[1]} tokens; allowed is "
                    "one bool per token, one of them true; leave out a sample without tokens"
                )
        for i, (ends, mask) in enumerate(zip(self.ends, self.mask, strict=False)):
            if ends.shape != mask.shape:
                raise SpecError(
                    f"{self.name}.ends[{i}] ({self.ids[i]}): shape {ends.shape} for {mask.size} "
                    "tokens; allowed is one bool per token; make them with sentence_ends(pieces)"
                )

    def __len__(self) -> int:
        return len(self.acts)

    @property
    def hidden(self) -> int:
        """Width of the residual stream; 0 for an empty set."""
        return int(self.acts[0].shape[2]) if self.acts else 0

    @property
    def n_positive(self) -> int:
        """Samples with label 1."""
        return int(self.labels.sum())

    @property
    def n_negative(self) -> int:
        """Samples with label 0."""
        return len(self) - self.n_positive

    def reads(self, positions: Positions | None, *, raw: bool = False) -> bool:
        """Whether its tokens are those at the positions, as far as both are known.

        Args:
            positions: of a probe or of another set.
            raw: these are of texts that were read as they stand, too.
        """
        if None in (positions, self.positions) or positions == self.positions:
            return True
        return (raw or self.raw) and {positions, self.positions} == {"completion", "prompt"}

    def key(self, name: str) -> tuple[str, ...]:
        """Values (samples,) of `group`, `id`, a column, or `content`; SpecError for other keys."""
        known = {**self.columns, "group": self.groups, "id": self.ids}
        known |= {"content": self.contents} if self.contents else {}
        if name not in known:
            raise SpecError(
                f"{self.name}: has no key {name!r}; allowed are {sorted(known)}; take one of "
                "these, or collect the set anew with that column"
            )
        return known[name]

    def rows(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.str_]]:
        """Selected tokens (tokens, hidden) float32 of all samples at a layer, labels and groups.

        Raises:
            SpecError: the layer is not in the set.
        """
        index = self._index(layer)
        x = np.concatenate([a[index, m] for a, m in zip(self.acts, self.mask, strict=True)])
        lengths = [int(m.sum()) for m in self.mask]
        return x, np.repeat(self.labels, lengths), np.repeat(np.array(self.groups), lengths)

    def scores(self, probe: AnyProbe) -> NDArray[np.float64]:
        """Score (samples,) of every sample with a probe, over its selected tokens.

        Raises:
            SpecError: layers or width do not fit, or the probe's pool is `sentence_mean_max` and
                the set has no sentence ends.
        """
        return np.asarray(self.scores_of([probe])[0])

    def statistic(
        self, probe: AnyProbe, statistic: Statistic, *, length: int | None = None
    ) -> list[NDArray[np.float64]]:
        """What a threshold for a statistic is compared with: a number a sample, or a token.

        Args:
            probe: that scores.
            statistic: of its thresholds.
            length: tokens of each sample that are read at most; all by default.

        Raises:
            SpecError: as `scores`.
        """
        if statistic == Statistic(over="answer", pool=probe.pool) and length is None:
            return list(self.scores(probe)[:, None])
        if SENTENCE_POOL in statistic.pool and not self.ends:
            raise no_ends(self.name, probe.name)
        made = [np.zeros(0)] * len(self)
        for i, acts in self.selected(probe.layers):
            running = probe.running_scores(acts[:, :length], probe.layers, pool=statistic.pool)
            ends = self.ends[i][self.mask[i]][:length] if self.ends else None
            one = running if statistic.over == "token" else [statistic.of(running, ends=ends)]
            made[i] = np.asarray(one, dtype=np.float64)
        return made

    def selected(self, layers: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Place of each sample, and its selected tokens (layers, tokens, hidden) at some layers.

        Raises:
            SpecError: a layer is not in the set.
        """
        index = [self._index(layer) for layer in layers]
        for i, (acts, mask) in enumerate(zip(self.acts, self.mask, strict=True)):
            yield i, acts[index][:, mask]

    def scores_of(self, probes: Sequence[AnyProbe]) -> NDArray[np.float64]:
        """Scores (probes, samples) of one or more probes that read the same layers."""
        layers = probes[0].layers
        for probe in probes:
            if probe.pool == SENTENCE_POOL and not self.ends:
                raise no_ends(self.name, probe.name)
            if probe.layers != layers:
                raise SpecError(
                    f"probes: read layers {list(layers)} and {list(probe.layers)}; allowed are "
                    "probes of the same layers"
                )
        made = np.full((len(probes), len(self)), np.nan)
        for i, acts in self.selected(layers):
            ends = self.ends[i][self.mask[i]] if self.ends else None
            made[:, i] = [probe.score(acts, layers, ends=ends) for probe in probes]
        return made

    def shown(self, by: str, layers: Sequence[int]) -> list[bytes] | None:
        """What tells samples apart, (samples,), for `SeenSamples`; None for unknown contents.

        Args:
            by: `content`, or `activations` of the selected tokens.
            layers: of the activations.
        """
        if by == "content":
            return [c.encode() for c in self.contents] if self.contents else None
        made = [b""] * len(self)
        for i, acts in self.selected(layers):
            made[i] = acts.tobytes()
        return made

    def subset(self, index: ArrayLike, *, name: str | None = None) -> Self:
        """The samples at the given indices, in that order, or those that a mask sets."""
        picks = as_indices("index", index, len(self), low=-len(self)).tolist()
        return type(self)(acts=tuple(self.acts[i] for i in picks), **self._part(picks, name))

    def _part(self, picks: Sequence[int], name: str | None) -> dict[str, Any]:
        """All but the activations of some samples, by field."""
        facts = {f.name: getattr(self, f.name) for f in fields(ActivationSet) if f.name != "acts"}
        for key in ("groups", "mask", "ids", "contents", "ends"):
            facts[key] = tuple(facts[key][i] for i in picks) if facts[key] else ()
        return facts | {
            "name": name or self.name,
            "labels": self.labels[list(picks)],
            "columns": {k: tuple(v[i] for i in picks) for k, v in self.columns.items()},
        }

    def negatives(self) -> Self:
        """The samples with label 0; itself where all are.

        Raises:
            SpecError: there is none.
        """
        if not self.n_negative:
            raise SpecError(
                f"{self.name}: all {len(self)} samples are positive; allowed as a control set are "
                "sets with negative ones, as a false positive is one of these; choose another set"
            )
        return self.subset(np.flatnonzero(~self.labels)) if self.n_positive else self

    @cached_property
    def sha256(self) -> str:
        """Hash of values, labels, groups and names; not of where they come from."""
        return hashlib.sha256(self._to_bytes(origin=False)).hexdigest()

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all; its folder is made when missing."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, self._to_bytes())
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote, bit-equal.

        Raises:
            ArtifactError: missing, damaged, or another format.
        """
        allowed = "allowed is what ActivationSet.save writes; collect the activations again"
        with parsing(path, "an activation set", allowed):
            content = read_regular(path)
            tensors, facts = load_tensors(content), parse_json(metadata_of(content)[_KEY])
            if facts["format"] != _FORMAT:
                raise ValueError(f"format {facts['format']!r}")
            stops = np.cumsum(tensors["lengths"])[:-1]
            made = {name: facts[name] for name in _FACTS}
            made |= {name: facts[name] for name in _MORE if name in facts}
            made |= {"acts": tuple(np.split(tensors["acts"], stops, axis=1))}
            made |= {"labels": tensors["labels"], "mask": tuple(np.split(tensors["mask"], stops))}
            if "ends" in tensors:
                made["ends"] = tuple(np.split(tensors["ends"], stops))
            if (positions := facts.get("positions")) is not None:
                made["positions"] = parse_positions(positions, field="positions")
            if "capture" in facts:
                made["capture"] = CaptureFacts.known(facts["capture"])
            return cls(**made)

    @classmethod
    def from_store(
        cls,
        store: ActivationStore | str | Path,
        *,
        name: str | None = None,
        layers: Sequence[int] | None = None,
        pieces: Pieces | None = None,
        ids: Collection[str] | None = None,
    ) -> Self:
        """Read a store that fits into memory.

        It takes the memory of its rows as float32, of the layers that are read, and while it
        reads that of one shard.

        Args:
            store: what `collect` wrote, or its folder; larger ones are for `StoreSet`.
            name: of the set; that of the data set by default.
            layers: to read, in this order; all of the store by default.
            pieces: from token ids to the text of each, as many; makes the sentence ends, for
                probes with the pool `sentence_mean_max`.
            ids: of the samples that are read; all by default.

        Returns:
            The set; samples without rows or without a label are left out. Its columns are those
            that all samples have, and the texts `completion` and `prompt_text`.

        Raises:
            ArtifactError: the store is incomplete or damaged.
            SpecError: a layer is not in the store, or no sample has both rows and a label.
        """
        opened = store if isinstance(store, ActivationStore) else ActivationStore.open(store)
        wanted = _layers(opened, layers)
        at = [opened.layers.index(layer) for layer in wanted]
        # The records are in the headers alone, so the size is known before any row is read.
        records = _records(opened, name, ids)
        stops = np.cumsum([r.n_rows for r in records])
        rows = np.empty((len(wanted), int(stops[-1]), opened.hidden), dtype=np.float32)
        ends: list[NDArray[np.bool_]] = []
        raw = True
        for sample, record, stop in zip(_kept(opened, ids), records, stops.tolist(), strict=True):
            assert sample.acts is not None
            # Nothing was said: the prompt, a text as it stands, is all there is.
            raw = raw and len(sample.token_ids) == record.n_prompt
            acts = sample.acts
            if layers is not None:
                acts = TensorData(acts.storage[at], acts.dtype)
            rows[:, stop - record.n_rows : stop] = acts.to_float32()
            if pieces is not None:
                ends.append(_ends(sample, pieces))
        facts = _facts(opened, records, name) | {"layers": wanted, "ends": tuple(ends), "raw": raw}
        return cls(acts=tuple(np.split(rows, stops[:-1], axis=1)), **facts)

    def sequences(self, layer: int) -> list[NDArray[np.float32]]:
        """Selected tokens (tokens, hidden) of each sample at one layer."""
        index = self._index(layer)
        return [a[index, m] for a, m in zip(self.acts, self.mask, strict=True)]

    def pooled(self, layer: int, rows: str) -> NDArray[np.float32]:
        """One row (samples, hidden) of each sample at one layer.

        Args:
            layer: one of `layers`.
            rows: `mean` of its selected tokens, or the `last` one.
        """
        made = np.empty((len(self), self.hidden), dtype=np.float32)
        for i, (sample,) in self.selected([layer]):
            made[i] = sample.mean(axis=0) if rows == "mean" else sample[-1]
        return made

    def _to_bytes(self, *, origin: bool = True) -> bytes:
        acts = self.acts  # of a store read from disk
        if not acts:
            raise SpecError(f"{self.name}: is empty; allowed is one sample or more; check filters")
        names = [*_FACTS, *(["contents"] if self.contents else [])]
        if origin:
            names += ["positions", "raw"] if self.positions is not None else []
            names += ["model_sha256"] if self.model_sha256 is not None else []
            names += ["label_source"] if self.label_source else []
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        facts |= {"format": _FORMAT, "columns": dict(self.columns)}
        if origin and self.capture is not None:
            facts["capture"] = self.capture.model_dump(exclude_defaults=True)
        tensors = {
            "acts": np.ascontiguousarray(np.concatenate(acts, axis=1)),
            "lengths": np.array([a.shape[1] for a in acts], dtype=np.int64),
            "labels": self.labels.astype(np.uint8),
            "mask": np.concatenate(self.mask).astype(np.uint8),
        }
        if self.ends:
            tensors["ends"] = np.concatenate(self.ends).astype(np.uint8)
        content: bytes = save_tensors(tensors, metadata={_KEY: json.dumps(facts, sort_keys=True)})
        return content

    def _index(self, layer: int) -> int:
        layer = judged_value("layer", layer, int)
        if layer not in self.layers:
            raise SpecError(
                f"layer={layer}: {self.name} holds {list(self.layers)}; allowed is one of these; "
                "capture that layer too"
            )
        return self.layers.index(layer)


def no_ends(name: str, probe: str) -> SpecError:
    """A set without sentence ends, and a probe that pools by sentence."""
    return SpecError(
        f"{name}: has no sentence ends, and probe {probe!r} pools by {SENTENCE_POOL}; allowed is a "
        "set with ends=; make them with sentence_ends(pieces), or name the tokenizer with which a "
        "store is read"
    )


def _labels(values: ArrayLike, name: str) -> NDArray[np.bool_]:
    labels = np.asarray(values)
    if labels.ndim != 1 or (labels.size and not np.isin(labels, (0, 1)).all()):
        raise SpecError(
            f"{name}.labels: shape {labels.shape}; allowed is (samples,) of 0 and 1 or bools; map "
            "your classes to them first"
        )
    return labels.astype(bool)
