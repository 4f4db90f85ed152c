"""From the rows of a request's taps to the tensors of its sites, by the names users know."""

from __future__ import annotations

import numpy as np

from inspect_lens._engine.collect.merge import narrowed
from inspect_lens._engine.protocol.capture import CaptureEnvelope, RowPart, owners
from inspect_lens.spec import Site, TensorData, result_name, rows_for, tap_point

__all__ = ["tensors_by_name"]


def tensors_by_name(rows: TensorData, capture: CaptureEnvelope) -> dict[str, TensorData]:
    """Split what was collected into one tensor per site.

    The stream after a block is the stream before the next one, so a tap may serve two sites;
    its rows stand in both tensors. Parts of wide rows are put together.

    Args:
        rows: (rows of a token, tokens, hidden), in the order of `capture.rows`.
        capture: what was asked for.

    Returns:
        (layers ascending, tokens, width of the site) by result name, in the order of a block.
    """
    if capture.is_simple:
        return {result_name(capture.sites[0]): rows}
    rank = {row: i for i, row in enumerate(capture.rows)}
    return {result_name(site): _of_site(rows, capture, site, rank) for site in capture.sites}


def _of_site(
    rows: TensorData, capture: CaptureEnvelope, site: Site, rank: dict[RowPart, int]
) -> TensorData:
    width = capture.width_of(site)
    ranks, parts = owners(width, capture.ranks), range(rows_for(width, capture.hidden))
    taps = [tap_point(site, layer) for layer in capture.layers]
    at = np.asarray([[rank[RowPart(r, tap, p)] for r in ranks for p in parts] for tap in taps])
    if width[1:] == (capture.hidden, 1):
        return TensorData(rows.storage[at[:, 0]], rows.dtype)
    # (layers, parts, tokens, hidden) to (layers, tokens, parts, hidden).
    found = rows.storage[at].swapaxes(1, 2)
    if capture.operation == "norm":
        norms = TensorData(np.ascontiguousarray(found), rows.dtype).to_float32()
        return narrowed(np.linalg.norm(norms, axis=2), rows.dtype)
    layers, tokens = found.shape[:2]
    shares = found.reshape(layers, tokens, width.shards, len(parts) * capture.hidden)
    own = width.width // width.shards
    return TensorData(shares[..., :own].reshape(layers, tokens, width.width), rows.dtype)
