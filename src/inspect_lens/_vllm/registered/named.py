"""From the rows of a request's taps to the tensors of its sites, by the names users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.to_torch import to_torch
from inspect_lens._engine.collect.placement import Collected
from inspect_lens._engine.protocol.messages import LENS, QK, Envelope
from inspect_lens._engine.protocol.readouts import (
    CaptureEnvelope,
    LensEnvelope,
    RowPart,
    narrowed,
    owners,
)
from inspect_lens.errors import CaptureError
from inspect_lens.spec import LENS_NAME, Site, TensorData, result_name, rows_for, tap_point


def tensors_by_name(rows: TensorData, capture: CaptureEnvelope) -> dict[str, TensorData]:
    """Split what was collected into one tensor per site.

    The stream after a block is the stream before the next one, so a tap may serve two sites;
    its rows stand in both tensors. Parts of wide rows are put together.
    """
    if capture.is_simple:
        return {result_name(capture.sites[0]): rows}
    if capture.heads:
        return {result_name(site): _of_heads(rows, capture, site) for site in capture.sites}
    rank = {row: i for i, row in enumerate(capture.rows)}
    return {result_name(site): _of_site(rows, capture, site, rank) for site in capture.sites}


def named_tensors(
    envelope: Envelope, kind: int, rows: TensorData, attention: Mapping[int, Mapping[str, Any]]
) -> dict[str, TensorData]:
    """What users get of the rows of one kind of result; see `ROWS`.

    Args:
        envelope: of the request.
        kind: of the result.
        rows: (rows of a token, tokens, width or columns).
        attention: by layer, what its pattern depends on.
    """
    if kind == QK:
        assert envelope.qk is not None
        return _by_head(rows, envelope.qk, attention)
    if kind == LENS:
        return {LENS_NAME: rows}
    assert envelope.capture is not None
    return tensors_by_name(rows, envelope.capture)


def _by_head(
    rows: TensorData, qk: CaptureEnvelope, attention: Mapping[int, Mapping[str, Any]]
) -> dict[str, TensorData]:
    """Queries and keys as (layers, tokens, heads, size); chosen ones as (heads, tokens, size)."""
    if qk.heads:
        at = {site: rows.storage[qk.heads_at(site)] for site in qk.sites}
        return {f"attn_{site}": TensorData(found, rows.dtype) for site, found in at.items()}
    sizes = {int(attention[layer]["head_size"]) for layer in qk.layers}
    if len(sizes) > 1:
        raise CaptureError("output_qk: layers have different heads; ask for layers of one kind")
    (size,) = sizes
    tensors = {}
    for name, found in tensors_by_name(rows, qk).items():
        layers, tokens, width = found.shape
        by_head = found.storage.reshape(layers, tokens, width // size, size)
        tensors[f"attn_{name}"] = TensorData(by_head, found.dtype)
    return tensors


def put_qk(completion: Any, qk: CaptureEnvelope, collected: Collected) -> None:
    """Put queries and keys on a choice: by head, and with what else a pattern depends on."""
    tensors = _by_head(collected.tensors[QK], qk, collected.attention)
    metas = [collected.attention[layer] for layer in qk.layers]
    plain: dict[str, Any] = {"qk_layers": list(qk.layers), "qk_meta": metas}
    for name, site in (("qk_heads", "q"), ("qk_key_heads", "k")) if qk.heads else ():
        plain[name] = [[layer, head] for at, layer, head in qk.heads if at == site]
    completion.inspect_lens_plain = plain
    _put(completion, tensors, qk.transport)
    completion.activations |= plain


def put_lens(completion: Any, lens: LensEnvelope, collected: Collected) -> None:
    """Put what a logit lens read on a choice, (layers, tokens, columns)."""
    _put(completion, {LENS_NAME: collected.tensors[LENS]}, lens.transport)


def _put(completion: Any, tensors: dict[str, TensorData], transport: str) -> None:
    """Put further tensors on a choice; the first that asked says how all of them travel."""
    completion.inspect_lens_tensors = completion.inspect_lens_tensors | tensors
    if not hasattr(completion, "activations"):
        completion.activations = {}
        completion.inspect_lens_transport = transport
    completion.activations |= {n: to_torch(t, copy=False) for n, t in tensors.items()}


def _of_site(
    rows: TensorData, capture: CaptureEnvelope, site: Site, rank: dict[RowPart, int]
) -> TensorData:
    size, width = capture.width_of(site), capture.reduction.width
    ranks, parts = owners(size, capture.ranks), range(rows_for(size, capture.hidden))
    taps = [tap_point(site, layer) for layer in capture.layers]
    at = np.asarray([[rank[RowPart(r, tap, p)] for r in ranks for p in parts] for tap in taps])
    own = size.width // size.shards
    if at.shape[1] == 1 and (own == capture.hidden or width is None):
        found = _taken(rows.storage, at[:, 0])[..., :own]
        is_held = own == capture.hidden or _has_whole_rows(capture)
        if not is_held or any(tap.site != site for tap in taps):
            # Parts of rows would keep the rest of these in memory, and rows that serve two sites
            # would change in both where somebody changes one.
            found = found.copy()
        return TensorData(found, rows.dtype)
    if width is not None:
        wide = TensorData(np.ascontiguousarray(rows.storage[at]), rows.dtype).to_float32()
        return narrowed(capture.reduction.join(wide), rows.dtype)
    # (layers, parts, tokens, hidden) to (layers, tokens, parts, hidden).
    found = rows.storage[at].swapaxes(1, 2)
    layers, tokens = found.shape[:2]
    shares = found.reshape(layers, tokens, size.shards, len(parts) * capture.hidden)
    return TensorData(shares[..., :own].reshape(layers, tokens, size.width), rows.dtype)


def _of_heads(rows: TensorData, capture: CaptureEnvelope, site: Site) -> TensorData:
    """(layers, tokens, heads * head size), heads in the order in which they were named."""
    at = np.asarray(capture.heads_at(site)).reshape(len(capture.layers), -1)
    parts = rows.storage[at]
    if capture.reduction.width is not None:
        wide = TensorData(np.ascontiguousarray(parts), rows.dtype).to_float32()
        return narrowed(capture.reduction.join(wide), rows.dtype)
    return TensorData(parts.swapaxes(1, 2).reshape(*parts.shape[::2], -1), rows.dtype)


def _has_whole_rows(capture: CaptureEnvelope) -> bool:
    """Whether a site's tensor keeps the memory of all sites in any case."""
    return any(capture.width_of(site)[1:3] == (capture.hidden, 1) for site in capture.sites)


def _taken(storage: NDArray[Any], at: NDArray[np.int64]) -> NDArray[Any]:
    """Rows of some taps, where they lie if these are evenly spaced.

    A copy costs as much as rows.
    """
    step = int(at[1] - at[0]) if len(at) > 1 else 1
    if (np.diff(at) == step).all():
        return storage[int(at[0]) : int(at[-1]) + 1 : step]
    taken: NDArray[Any] = storage[at]
    return taken
