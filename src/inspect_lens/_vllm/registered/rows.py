"""The rows of a result: known ones in front, then tensors by the names that users know.

vLLM's prefix cache has keys and values of a prompt's beginning, and a token that is not computed
has no rows. So a request asks for rows from the first token on that has none here. The engine
reads its cache as far as that token and no further. The known rows are put in front of those that
come.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.collect.placement import Collected
from inspect_lens._engine.protocol.messages import CACHED_KEY, LENS, QK, Envelope, Packed
from inspect_lens._engine.protocol.readouts import (
    CaptureEnvelope,
    LensEnvelope,
    RowPart,
    narrowed,
    owners,
)
from inspect_lens._settings import Settings
from inspect_lens._vllm.cache_salt import salt_of
from inspect_lens._vllm.compat.connectors import transfers_by_request
from inspect_lens._vllm.compat.monkeypatches import is_engine_apart
from inspect_lens._vllm.sinks.sink import own_memory
from inspect_lens._vllm.telemetry import CALLER, add
from inspect_lens.errors import CaptureError
from inspect_lens.spec import LENS_NAME, Site, TensorData, result_name, rows_for, tap_point

logger = logging.getLogger("vllm.inspect_lens")

BLOCK = 16
"""Tokens of a block."""
_WAITING_MOST = 64
"""Requests whose rows wait to be kept, and hold memory of results as long."""
_PARTS = 8
"""A result that takes more than one of so many parts of the cache is copied, block by block."""
_SEEN_MOST = 1 << 17
"""Blocks that are remembered without their rows: some 20 MB."""


class Prefix:
    """The tokens of a request, and the hash of each block of them with all that is before it."""

    def __init__(
        self, kind: object, tokens: Sequence[int], *, apart: tuple[int, bytes] | None = None
    ) -> None:
        """Rows are of a kind, told by its text; from the position of `apart` on of another."""
        # Nothing is worked out here, since the engine does not have the request yet.
        self._kind, self._tokens = kind, list(tokens)
        self._last, self._hashes = b"", list[bytes]()
        self._apart_at, self._apart = (-1, b"") if apart is None else apart

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that were sampled."""
        self._tokens += tokens

    def hashes(self) -> Iterator[bytes]:
        """Of each whole block, in order; worked out once, as far as it is asked for."""
        yield from self._hashes
        if not self._hashes:
            self._last = hashlib.blake2b(repr(self._kind).encode()).digest()
        for i in range(len(self._hashes), len(self._tokens) // BLOCK):
            block = array("q", self._tokens[i * BLOCK : (i + 1) * BLOCK]).tobytes()
            if i == self._apart_at // BLOCK:
                block += self._apart
            self._last = hashlib.blake2b(self._last + block, digest_size=16).digest()
            self._hashes.append(self._last)
            yield self._last


@dataclass(frozen=True)
class CachedRows:
    """Rows of the first tokens of a prompt, which a request need not compute."""

    blocks: tuple[NDArray[Any], ...]
    """Each (rows of a token, `BLOCK`, width), in the storage of the capture's dtype."""

    @property
    def n_tokens(self) -> int:
        """How many tokens these are."""
        return len(self.blocks) * BLOCK

    def before(self, rows: NDArray[Any], lo: int) -> NDArray[Any]:
        """These rows from position `lo` on, and behind them those that were computed."""
        first, offset = divmod(lo, BLOCK)
        blocks = [self.blocks[first][:, offset:], *self.blocks[first + 1 :]]
        return np.concatenate((*blocks, rows), axis=1)


@dataclass(slots=True)
class _Memory:
    """What blocks lie in, which counts until the last of them goes."""

    nbytes: int
    keys: set[bytes] = field(default_factory=set)


class RowCache:
    """Rows of blocks, the least recently used of which go first. Any thread may ask."""

    def __init__(
        self, most_bytes: int, *, is_served: bool, on_change: Callable[[], None] | None = None
    ) -> None:
        """Make one; `is_served` where results go to clients as bytes, and nobody changes them.

        A server keeps rows at the first time, and most of them where they lie: a copy would take
        longer than all else that is done for a request.
        """
        self.most_bytes = most_bytes
        self._is_served = is_served
        self._on_change = on_change
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, tuple[NDArray[Any], _Memory]] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = self._n_bytes = 0
        self._waiting: deque[tuple[Prefix, NDArray[Any], int, int, bool]] = deque()
        self.weights = 0
        """Changes where the weights may be others, of which rows that were found are not."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspect-lens-rows")

    @property
    def epoch(self) -> int:
        """Changes with `clear`; rows of a request that began before are not kept."""
        return self._epoch

    @property
    def n_bytes(self) -> int:
        """Bytes of rows that are kept."""
        return self._n_bytes

    def find(self, prefix: Prefix, most: int) -> CachedRows | None:
        """Rows of a prompt's first tokens."""
        found = []
        with self._lock:
            if not self._rows:
                return None
            for key in islice(prefix.hashes(), most // BLOCK):
                kept = self._rows.get(key)
                if kept is None:
                    break
                found.append((key, kept[0]))
            # What is nearer to the beginning is of use to more requests, and stays longer.
            for key, _ in reversed(found):
                self._rows.move_to_end(key)
        return CachedRows(tuple(rows for _, rows in found)) if found else None

    def keep(
        self, prefix: Prefix, rows: NDArray[Any], lo: int, epoch: int, *, copies: bool = False
    ) -> None:
        """Keep the rows of a request; `copies` where somebody may change them."""
        if not rows.shape[0] * rows.shape[2]:
            return
        first, end = -(-lo // BLOCK), (lo + rows.shape[1]) // BLOCK
        keys = list(islice(prefix.hashes(), end))
        with self._lock:
            if epoch != self._epoch:
                return
            wanted = [i for i in reversed(range(first, len(keys))) if self._wants(keys[i])]
        memory = None
        # Where most of it was kept before, the rest is copied, and does not hold all of it.
        is_new = 2 * len(wanted) * BLOCK >= rows.shape[1]
        if self._is_served and not copies and is_new and rows.nbytes <= self.most_bytes // _PARTS:
            rows = own_memory(rows)
            base: Any = rows if rows.base is None else rows.base
            memory = _Memory(memoryview(base).nbytes)
        for i in wanted:
            block = rows[:, i * BLOCK - lo :][:, :BLOCK]
            if memory is None:
                block = block.copy()
            self._put(keys[i], block, memory or _Memory(block.nbytes), epoch)
        self._tell()

    def keep_later(
        self, prefix: Prefix, rows: NDArray[Any], lo: int, epoch: int, *, copies: bool = False
    ) -> None:
        """`keep`, in a thread of its own; nothing is kept while that is far behind."""
        if copies or not self._is_served:  # before anybody has them, who may change them at once
            self._keep_one(prefix, rows, lo, epoch, copies)
            return
        with self._lock:
            if len(self._waiting) >= _WAITING_MOST:
                return
            self._waiting.append((prefix, rows, lo, epoch, copies))
            is_first = len(self._waiting) == 1
        # A process that ends takes no work any more, and its last requests have their rows.
        with contextlib.suppress(RuntimeError):
            if is_first:  # once for those that end together: each call wakes the thread
                self._thread.submit(self._keep_waiting)

    def _keep_waiting(self) -> None:
        while True:
            self._keep_one(*self._waiting[0])
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _keep_one(
        self, prefix: Prefix, rows: NDArray[Any], lo: int, epoch: int, copies: bool
    ) -> None:
        try:
            self.keep(prefix, rows, lo, epoch, copies=copies)
        except Exception:
            logger.exception("inspect_lens: rows of a request could not be kept")

    def settle(self) -> None:
        """Wait until all rows are kept that were to be kept later."""
        self._thread.submit(lambda: None).result()

    def clear(self, *, keeps_weights: bool = False) -> None:
        """Forget all: the model may be another one from now on."""
        with self._lock:
            self._epoch += 1
            self.weights += not keeps_weights
            gone, self._rows = self._rows, OrderedDict()
            self._seen.clear()
            self._n_bytes = 0
        gone.clear()  # without the lock: memory goes back to the system, which takes a while
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _wants(self, key: bytes) -> bool:
        if key in self._rows:
            return False
        if self._is_served or key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _SEEN_MOST:
            self._seen.popitem(last=False)
        return False

    def _put(self, key: bytes, block: NDArray[Any], memory: _Memory, epoch: int) -> None:
        gone: list[NDArray[Any]] = []  # let go of without the lock, as in `clear`
        left: dict[bytes, NDArray[Any]] = {}
        with self._lock:
            if epoch != self._epoch or key in self._rows or memory.nbytes > self.most_bytes:
                return
            self._rows[key] = block, memory
            self._n_bytes += 0 if memory.keys else memory.nbytes
            memory.keys.add(key)
            while self._n_bytes > self.most_bytes:
                oldest, (block, memory) = self._rows.popitem(last=False)
                gone.append(block)
                memory.keys.remove(oldest)
                left |= self._left_of(memory)
                self._n_bytes -= 0 if memory.keys else memory.nbytes
        for key, block in left.items():
            copied = block.copy()
            with self._lock:
                kept = self._rows.get(key)
                if kept is not None and kept[0] is block:
                    self._rows[key] = copied, kept[1]

    def _left_of(self, memory: _Memory) -> dict[bytes, NDArray[Any]]:
        """Blocks in use that alone hold a result, most of which has gone; they get own memory."""
        if not memory.keys or next(iter(self._rows.values()))[1] is memory:
            return {}
        left = {key: self._rows[key][0] for key in memory.keys}
        n_bytes = sum(block.nbytes for block in left.values())
        if 2 * n_bytes > memory.nbytes:
            return {}
        for key, block in left.items():
            self._rows[key] = block, _Memory(block.nbytes, {key})
        self._n_bytes += n_bytes
        memory.keys.clear()
        return left


HARMLESS = frozenset(
    {
        *("get_supported_tasks", "is_sleeping", "profile", "execute_dummy_batch"),
        *("add_lora", "remove_lora", "list_loras", "pin_lora"),
        *("reset_mm_cache", "reset_encoder_cache", "save_sharded_state"),
        *("is_scheduler_paused", "resume_scheduler", "get_weight_version"),
    }
)
"""What vLLM's front-end asks of an engine that changes neither weights nor the prefix cache."""


KEEPS_WEIGHTS = frozenset(
    {
        *("reset_prefix_cache", "release_kv_cache_memory", "sleep", "wake_up"),
        *("pause_scheduler", "pause_generation"),
    }
)
"""What it asks beside that, and changes no weights; sleep may lose them, and another call brings
them back."""


def keeps_rows(vllm_config: Any, settings: Settings) -> bool:
    """Whether rows of an engine's prompts are kept: it has a prefix cache, of its own process."""
    has_cache = bool(vllm_config.cache_config.enable_prefix_caching)
    if transfers_by_request(vllm_config) and vllm_config.model_config.is_hybrid:
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
    weights: int
    """Both of the cache, when the request was sealed."""
    asked: CaptureEnvelope
    """The capture that was asked for."""
    known: CachedRows | None

    @property
    def n_positions(self) -> int:
        """Captured positions whose rows are known already."""
        return 0 if self.known is None else self.known.n_tokens - self.asked.lo

    def whole(
        self, rows: TensorData, sampled: Sequence[int], *, copies: bool = False
    ) -> TensorData:
        """All rows that were asked for; they are kept for other requests, see `RowCache.keep`."""
        storage, lo = rows.storage, self.asked.lo
        if self.known is not None:
            if self.weights != self.cache.weights:
                raise CaptureError(
                    f"capture: rows of the first {self.known.n_tokens} tokens were kept from an "
                    "earlier request, and the engine's weights may have changed while this one "
                    "was under way; ask again"
                )
            storage = self.known.before(storage, lo)
        self.prefix.extend(sampled)
        self.cache.keep_later(self.prefix, storage, lo, self.epoch, copies=copies)
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
        *(CALLER.get().tenant, callers, asked.sites, asked.layers, asked.widths, asked.ranks),
        *(asked.hidden, asked.reduce, asked.wire, asked.heads),
    )
    prefix = Prefix(
        kind,
        core.prompt_token_ids,
        apart=None if salt is None else (salt.first, salt.own.encode()),
    )
    epoch, weights = cache.epoch, cache.weights
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
    if n_known:
        add("inspect_lens_row_cache_hits_total", n_known - asked.lo)
        packed = packed.of(envelope)
    made = packed.beside(CACHED_KEY, n_known)
    made.reuse = Reuse(cache, prefix, epoch, weights, asked, known)
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
    """What users get of the rows of one kind of result; see `ROWS`."""
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


def put_lens(completion: Any, lens: LensEnvelope, collected: Collected) -> None:
    """Put what a logit lens read on a choice, (layers, tokens, columns)."""
    _put(completion, {LENS_NAME: collected.tensors[LENS]}, lens.transport)


def _put(completion: Any, tensors: dict[str, TensorData], transport: str) -> None:
    """Put further tensors on a choice, which travel as those that it has."""
    if not completion.inspect_lens_tensors:
        completion.inspect_lens_transport = transport
    completion.inspect_lens_tensors = completion.inspect_lens_tensors | tensors


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
    """Rows of some taps, where they lie if these are evenly spaced."""
    # A copy costs as much as rows.
    step = int(at[1] - at[0]) if len(at) > 1 else 1
    if (np.diff(at) == step).all():
        return storage[int(at[0]) : int(at[-1]) + 1 : step]
    taken: NDArray[Any] = storage[at]
    return taken
