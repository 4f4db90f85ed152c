"""From the rows of a request's taps to the tensors of its sites, by the names users know."""

from __future__ import annotations

from inspect_lens._engine.protocol.capture import CaptureEnvelope
from inspect_lens.spec import TensorData, result_name, tap_point

__all__ = ["tensors_by_name"]


def tensors_by_name(rows: TensorData, capture: CaptureEnvelope) -> dict[str, TensorData]:
    """Split what was collected into one tensor per site.

    The stream after a block is the stream before the next one, so a tap may serve two sites;
    its rows stand in both tensors.

    Args:
        rows: (taps, tokens, hidden), in the order of `capture.taps`.
        capture: what was asked for.

    Returns:
        (layers ascending, tokens, hidden) by result name, in the order of a block.
    """
    if len(capture.sites) == 1:
        return {result_name(capture.sites[0]): rows}
    rank = {tap: i for i, tap in enumerate(capture.taps)}
    return {
        result_name(site): TensorData(
            rows.storage[[rank[tap_point(site, layer)] for layer in capture.layers]], rows.dtype
        )
        for site in capture.sites
    }
