"""Captured prompts whose beginning was captured before: rows are taken from there.

vLLM's prefix cache has keys and values of a prompt's beginning, and a token that is not computed
has no rows. So a request asks for rows from the first token on that has none here. The engine
reads its cache as far as that token and no further. The known rows are put in front of those that
come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inspect_lens._engine.collect.row_cache import CachedRows, Prefix, RowCache
from inspect_lens._engine.protocol.envelope import CACHED_KEY, Envelope, Packed
from inspect_lens._engine.protocol.readouts import CaptureEnvelope
from inspect_lens._settings import Settings
from inspect_lens._vllm.cache_salt import salt_of
from inspect_lens._vllm.clients import TENANT
from inspect_lens._vllm.compat.connectors import transfers_by_request
from inspect_lens._vllm.compat.monkeypatches import is_engine_apart
from inspect_lens._vllm.metrics import add
from inspect_lens.spec import TensorData

HARMLESS = frozenset(
    {
        *("get_supported_tasks", "is_sleeping", "profile", "execute_dummy_batch"),
        *("add_lora", "remove_lora", "list_loras", "pin_lora"),
        *("reset_mm_cache", "reset_encoder_cache", "save_sharded_state"),
        *("is_scheduler_paused", "resume_scheduler", "get_weight_version"),
    }
)
"""What vLLM's front-end asks of an engine that changes neither weights nor the prefix cache."""


def keeps_rows(vllm_config: Any, settings: Settings) -> bool:
    """Whether rows of an engine's prompts are kept: it has a prefix cache, of its own process."""
    has_cache = bool(vllm_config.cache_config.enable_prefix_caching)
    if transfers_by_request(vllm_config) and getattr(vllm_config.model_config, "is_hybrid", False):
        # There the scheduler looks its cache up by a method of its own, which knows no limit.
        return False
    return has_cache and settings.cached_rows_bytes > 0 and is_engine_apart()


def is_harmless(method: str, args: Sequence[Any]) -> bool:
    """Whether rows stay true after a front-end has called something of an engine."""
    if method == "collective_rpc":
        return bool(args) and str(args[0]).startswith("inspect_lens_")
    return method in HARMLESS


@dataclass
class Reuse:
    """Of one request: rows that are known already, and where to put those that come."""

    cache: RowCache
    prefix: Prefix
    epoch: int
    """Of the cache, when the request was sealed."""
    asked: CaptureEnvelope
    """The capture that was asked for."""
    known: CachedRows | None

    @property
    def n_positions(self) -> int:
        """Captured positions whose rows are known already."""
        return 0 if self.known is None else self.known.n_tokens - self.asked.lo

    def whole(self, rows: TensorData, sampled: Sequence[int]) -> TensorData:
        """All rows that were asked for; they are kept for other requests."""
        storage, lo = rows.storage, self.asked.lo
        if self.known is not None:
            storage = self.known.before(storage, lo)
        self.prefix.extend(sampled)
        self.cache.keep_later(self.prefix, storage, lo, self.epoch)
        return rows if self.known is None else TensorData(storage, rows.dtype)


def with_known_rows(packed: Packed, core: Any, cache: RowCache) -> Packed:
    """Seal a request from the first token on whose rows its tenant does not have yet."""
    envelope = packed.envelope
    asked = envelope.capture
    if asked is None or not _is_kept(envelope, core):
        return packed
    salt = salt_of(core.cache_salt or "")
    callers = core.cache_salt if salt is None else salt.callers
    kind = (
        # What a tenant has captured, and that it has, is nobody else's to know.
        *(TENANT.get(), callers, asked.sites, asked.layers, asked.widths, asked.ranks),
        *(asked.hidden, asked.reduce, asked.wire, asked.heads),
    )
    prefix = Prefix(
        hashlib.blake2b(repr(kind).encode()).digest(),
        core.prompt_token_ids,
        apart=None if salt is None else (salt.first, salt.own.encode()),
    )
    epoch = cache.epoch
    # The last token of a prompt is computed in any case, and one row has to come.
    end = min(envelope.n_prompt, asked.hi)
    known = cache.find(prefix, end - 1)
    if known is not None and known.n_tokens <= asked.lo:
        known = None
    n_known = 0
    if known is not None:
        n_known = known.n_tokens
        envelope = replace(envelope, capture=replace(asked, lo=n_known))
    add("inspect_lens_row_cache_queries_total", end - asked.lo)
    add("inspect_lens_row_cache_hits_total", max(n_known - asked.lo, 0))
    if n_known:
        packed = packed.of(envelope)
    made = packed.beside(CACHED_KEY, n_known)
    made.reuse = Reuse(cache, prefix, epoch, asked, known)
    return made


def reuse_of(packed: Mapping[str, Any]) -> Reuse | None:
    """What `with_known_rows` noted for the process that sealed the request."""
    found: Reuse | None = getattr(packed, "reuse", None)
    return found


def _is_kept(envelope: Envelope, core: Any) -> bool:
    """Whether the rows that a request wants of its prompt are of the kind that is kept."""
    capture, last = envelope.capture, envelope.n_prompt - 1
    others = [p for p in envelope.read if p is not None and p is not capture]
    return (
        capture is not None
        and capture.positions is None
        and capture.combine is None
        and not capture.is_last
        and all(part.lo >= last for part in others)
        # An adapter may be replaced under its name; images are no tokens; choices get copies.
        and core.lora_request is None
        and not core.mm_features
        and core.sampling_params.n == 1
    )
