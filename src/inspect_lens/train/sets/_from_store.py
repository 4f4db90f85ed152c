"""A store as one array in memory: what `ActivationSet.from_store` is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from inspect_lens._base.untrusted import parse_json
from inspect_lens.data import ActivationStore, Captured, SampleRecord
from inspect_lens.errors import SpecError
from inspect_lens.probe import CaptureFacts, sentence_ends
from inspect_lens.spec import TensorData, parse_positions

Pieces: TypeAlias = Callable[[Sequence[int]], Sequence[str]]
"""From token ids to the text of each of them."""


def read_store(
    store: ActivationStore,
    *,
    name: str | None = None,
    layers: Sequence[int] | None = None,
    pieces: Pieces | None = None,
) -> dict[str, Any]:
    """Fields of an `ActivationSet`."""
    wanted = _layers(store, layers)
    at = [store.layers.index(layer) for layer in wanted]
    # The records are in the headers alone, so the size is known before any row is read.
    records = _records(store, name)
    stops = np.cumsum([r.n_rows for r in records])
    rows = np.empty((len(wanted), int(stops[-1]), store.hidden), dtype=np.float32)
    ends: list[NDArray[np.bool_]] = []
    raw = True
    for sample, record, stop in zip(_kept(store), records, stops.tolist(), strict=True):
        assert sample.acts is not None
        # Nothing was said: the prompt, a text as it stands, is all there is.
        raw = raw and len(sample.token_ids) == record.n_prompt
        acts = (
            sample.acts
            if layers is None
            else TensorData(sample.acts.storage[at], sample.acts.dtype)
        )
        rows[:, stop - record.n_rows : stop] = acts.to_float32()
        if pieces is not None:
            ends.append(_ends(sample, pieces))
    facts = _facts(store, records, name)
    return facts | {
        "layers": wanted, "acts": tuple(np.split(rows, stops[:-1], axis=1)), "ends": tuple(ends),
        "raw": raw,
    }  # fmt: skip


def read_facts(
    store: ActivationStore,
    *,
    name: str | None = None,
    layers: Sequence[int] | None = None,
    pieces: Pieces | None = None,
) -> dict[str, Any]:
    """What `read_store` gives, but for the activations, which stay on disk."""
    wanted, records = _layers(store, layers), _records(store, name)
    if list(wanted) != sorted(set(wanted)):
        raise SpecError(f"layers={list(wanted)}: allowed are unique layers in ascending order")
    ends = () if pieces is None else tuple(_ends(s, pieces) for s in _kept(store))
    return _facts(store, records, name) | {"layers": wanted, "ends": ends}


def _layers(store: ActivationStore, layers: Sequence[int] | None) -> tuple[int, ...]:
    wanted = tuple(store.layers if layers is None else layers)
    missing = [layer for layer in wanted if layer not in store.layers]
    if missing or not wanted:
        raise SpecError(
            f"layers={list(wanted)}: {store.uri} holds {list(store.layers)}; allowed is one or "
            "more of these; collect the others"
        )
    return wanted


def _records(store: ActivationStore, name: str | None) -> list[SampleRecord]:
    """Samples that have rows and a label."""
    records = [r for r in store.records() if r.n_rows and r.label is not None]
    if not records:
        title = name or str(store.manifest["dataset"]["name"])
        raise SpecError(
            f"{title}: no sample has rows and a label; allowed is one at least; check the "
            "positions that were captured"
        )
    return records


def _kept(store: ActivationStore) -> Iterator[Captured]:
    return (s for s in store.samples() if s.acts is not None and s.record.label is not None)


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


def encode_set(fields: Mapping[str, Any], *, origin: bool = True) -> bytes:
    """Content of the file."""
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "name": fields["name"],
        "model": fields["model"],
        "layers": fields["layers"],
        "groups": fields["groups"],
        "ids": fields["ids"],
        "columns": dict(fields["columns"]),
    }
    tensors = {
        "acts": np.ascontiguousarray(np.concatenate(fields["acts"], axis=1)),
        "lengths": np.array([a.shape[1] for a in fields["acts"]], dtype=np.int64),
        "labels": fields["labels"].astype(np.uint8),
        "mask": np.concatenate(fields["mask"]).astype(np.uint8),
    }
    if fields["contents"]:
        facts["contents"] = fields["contents"]
    if fields["ends"]:
        tensors["ends"] = np.concatenate(fields["ends"]).astype(np.uint8)
    if origin and fields["positions"] is not None:
        facts |= {"positions": fields["positions"], "raw": fields["raw"]}
    if origin and fields["model_sha256"] is not None:
        facts["model_sha256"] = fields["model_sha256"]
    if origin and fields["capture"] is not None:
        facts["capture"] = fields["capture"].model_dump(exclude_defaults=True)
    content: bytes = save_tensors(tensors, metadata={_KEY: json.dumps(facts, sort_keys=True)})
    return content


def decode_set(content: bytes) -> dict[str, Any]:
    """Fields of an `ActivationSet`, from the content of its file."""
    tensors = load_tensors(content)
    length = int.from_bytes(content[:8], "little")
    facts: dict[str, Any] = parse_json(parse_json(content[8 : 8 + length])["__metadata__"][_KEY])
    if facts["format"] != _FORMAT:
        raise ValueError(f"format {facts['format']!r}")
    stops = np.cumsum(tensors["lengths"])[:-1]
    positions = facts.get("positions")
    return {
        "name": facts["name"],
        "model": facts["model"],
        "layers": tuple(facts["layers"]),
        "acts": tuple(np.split(tensors["acts"], stops, axis=1)),
        "labels": tensors["labels"].astype(bool),
        "groups": tuple(facts["groups"]),
        "mask": tuple(np.split(tensors["mask"].astype(bool), stops)),
        "ids": tuple(facts["ids"]),
        "columns": {k: tuple(v) for k, v in facts["columns"].items()},
        "contents": tuple(facts.get("contents", ())),
        "ends": tuple(np.split(tensors["ends"].astype(bool), stops)) if "ends" in tensors else (),
        "positions": None if positions is None else parse_positions(positions, field="positions"),
        "raw": bool(facts.get("raw", False)),
        "model_sha256": facts.get("model_sha256"),
        "capture": CaptureFacts.known(facts["capture"]) if "capture" in facts else None,
    }
