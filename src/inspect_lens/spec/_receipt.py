"""The receipt: what the engine really did for a request."""

from __future__ import annotations

from typing import Literal

from ._capture import REDUCTIONS, QKReceipt, Reduce, SinkReceipt, SiteChoice
from ._engine import RESID_POST, Site
from ._hook import HookReceipt
from ._lens import LensReceipt
from ._probe import ProbeReceipt
from ._values import Value

__all__ = ["CaptureReceipt", "EnginePath", "GateReceipt", "Receipt", "SteerReceipt", "TierReceipt"]

EnginePath = Literal["eager", "compiled", "piecewise", "graph"]
"""How the forward passes of a request ran."""


class CaptureReceipt(Value):
    """Part of the receipt about captured rows: layers, positions, dtype, number of rows."""

    site: SiteChoice = RESID_POST
    """The site, or the sites; each has a tensor."""
    layers: tuple[int, ...]
    """Layers, ascending: the first axis of each tensor."""
    heads: tuple[int, ...] | None = None
    """Heads that came of each site, in the order of the last axis; None for whole rows."""
    n_positions: int
    """Tokens that the result is made of; see `n_rows`."""
    first_position: int | None = None
    """Position of the first token when they are consecutive."""
    positions: tuple[int, ...] | None = None
    """Positions of the tokens when they are not consecutive."""
    reduce: Reduce = "none"
    """What was made of the tokens' rows."""
    dtype: str
    """dtype of the tensor."""
    rows: int
    """Rows that the engine delivered for these positions: taps times tokens. The stream after
    a block is the stream before the next one, so a row may stand in two tensors."""
    cached_positions: int = 0
    """How many of the first positions have rows that an earlier request with the same beginning
    captured. The engine need not compute them: vLLM's prefix cache may have them."""

    @property
    def n_rows(self) -> int:
        """The second axis of the tensor: 1 where `reduce` makes one row of all tokens."""
        is_one = REDUCTIONS[self.reduce].combine is not None
        return min(self.n_positions, 1) if is_one else self.n_positions


class GateReceipt(Value):
    """Part of the receipt about a gate whose decisions last: when it fired, how long it acted."""

    layer: int
    """Layer at which it was read."""
    site: Site
    """Site at which it was read."""
    fired_at: int | None
    """Position of the first token at which it opened; None where it never did. Of a gate that reads
    the prompt it is that of the prompt's last token."""
    n_tokens: int | None
    """Tokens that were fed with the gate open: with scope `rest` those behind `fired_at`, with
    `next` those behind a token that opened it, and with `token` those that opened it. With
    `sharpness`, those above the threshold count. In shadow mode nothing acted on them. None where
    the engine went on for more than 16 tokens behind the end, so that it is not known."""
    sha256: str
    """Of the gate: direction, threshold, and what it reads."""
    began_open: bool = False
    """Whether the request brought its key, so that its edits acted from the first sampled token on
    that was fed; `fired_at` still says what it read in this request."""
    key: str | None = None
    """Of a gate with `conversation` that is open by now: with it in `open_gates` a later request
    begins with the gate open. None of all others."""


class SteerReceipt(Value):
    """Part of the receipt about steering: vectors, layers, sites, tokens edited."""

    layers: tuple[int, ...]
    """Layers that were edited, ascending."""
    sites: tuple[Site, ...] = (RESID_POST,)
    """Sites at which they were edited, in the order of a block."""
    n_tokens: int
    """Tokens that were edited at least at one layer, counted once each."""
    cached_tokens: int = 0
    """Prompt tokens from the first edited one on that came, steered, from this configuration's own
    prefix-cache entries. What lies in front of it is shared with plain requests."""
    vectors: tuple[str, ...]
    """Of each edit the sha256 of its tensor (dtype, shape and content), or of its program where it
    has none or several."""
    gates: tuple[GateReceipt, ...] = ()
    """Gates of scope `next` or `rest`, or with `ema` or `closes_below`, in the order of the
    request."""


class TierReceipt(Value):
    """Part of the receipt about edits and probes that the request did not bring itself."""

    tier: Literal["server", "named"]
    """`server`: what the operator has set for all requests; `named`: a registered configuration
    that the request chose, with `configs` or as `model@name`."""
    name: str | None = None
    """Of a configuration."""
    sha256: str
    """Of the configuration."""
    edits: int
    """How many of the edits are its own. In `steer.vectors` those of the server come first, then
    those of configurations in their order, then the request's."""
    probes: tuple[ProbeReceipt, ...] = ()
    """What the server's probes found. Those of a configuration are in the receipt's `probes`."""
    opted_out: bool = False
    """Whether the request left it out; then nothing of it acted."""
    denied_open_gates: tuple[str, ...] = ()
    """Keys of the request's `open_gates` that did not count, because rules of the server deny the
    gate (`none`). If they did count, a client could turn off the operator's edits with them."""


class Receipt(Value):
    """What the engine did for one request; every response that used the lens has one.

    Example:
        ```python
        from inspect_lens.model import read_activations

        receipt = read_activations("logs/honesty.eval")[0].activations.receipt
        assert receipt.capture.layers == (3, 4, 5)
        assert receipt.capture.n_positions == receipt.n_prompt + receipt.n_completion - 1
        ```
    """

    n_prompt: int
    """Prompt tokens."""
    n_completion: int
    """Sampled tokens, the last of which is never fed to the model."""
    capture: CaptureReceipt | None = None
    steer: SteerReceipt | None = None
    probes: tuple[ProbeReceipt, ...] = ()
    """What each probe found, in the order of the request."""
    hooks: HookReceipt | None = None
    qk: QKReceipt | None = None
    lens: LensReceipt | None = None
    sink: SinkReceipt | None = None
    """What became of the rows at a store or a function of the server."""
    tiers: tuple[TierReceipt, ...] = ()
    """What acted beside what the request brought itself, in this order."""
    cache_salted: bool
    """Whether the prefix cache was isolated for this request."""
    paths: tuple[EnginePath, ...]
    """Ways in which the steps of this request ran, sorted."""
    engine: str
    """`inspect_lens` or another backend's name."""
    version: str
    """Version of that backend."""
    vllm_version: str
