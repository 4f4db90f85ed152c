"""The kinds of results that a request may have, each as one class of `Readout`.

A `seal_…` function resolves what was asked against a prompt, in the front-end. A worker reads from
the result which rows of which taps it keeps and what it makes of them (`rows`, `made_of_rows`), and
the front-end what comes (`shape`, `wire`) and what it makes of that (`merge`).
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    REDUCTIONS,
    RESID_POST,
    CaptureSpec,
    DType,
    EngineFacts,
    EngineProbe,
    LogitLens,
    Positions,
    ProbeUse,
    QKSpec,
    Reduce,
    Reduction,
    ResolvedLens,
    Site,
    SiteWidth,
    TapPoint,
    TensorData,
    in_phase,
    is_mask,
    resolve_positions,
    rows_for,
    tap_order,
    tap_points,
)

from .programs import written

Combine = Literal["sum", "max"]
"""See `Reduction.combine`."""

Fold = Literal["sum", "max", "last"]
"""What grows in a worker, of sampled tokens, until a request is over."""

LAG = 2
"""Rows at the end of a request that stay apart from it: an engine may run ahead of the last."""


class RowPart(NamedTuple):
    """One row, as wide as the stream or as a head, of those that a token has at some taps.

    Workers send rows of one width. A wider row is cut into parts, and one of which ranks have
    shares comes from each of them. Those of a rank lie behind each other, so that it has one range.
    """

    rank: int
    """Tensor-parallel rank that sends it."""
    tap: TapPoint
    part: int
    """Of that rank's share; of a head, the one in which it begins."""
    column: int = 0
    """Of a head, the number of that part at which it begins."""


@dataclass(frozen=True, kw_only=True)
class Readout:
    """One kind of result of a request; see `READOUTS`."""

    lo: int
    """First position of the range; with `positions`, the smallest of them."""
    hi: int
    """End of the range, exclusive; with `positions`, one past the largest."""
    positions: tuple[int, ...] | None = None
    """Sorted explicit positions, or None for the whole range."""
    is_live: bool = False
    """Whether it is looked at while the request runs, so that no row may wait for the next. What a
    lens makes of rows never does."""

    is_read_by_all_ranks: ClassVar[bool] = False
    """Whether all ranks read the rows together, and the first one sends."""
    is_summed: ClassVar[bool] = False
    """Whether a worker sends one row for those that it has at all its taps."""

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        """The taps whose rows are read, in tap order."""
        raise NotImplementedError

    @property
    def rows(self) -> tuple[RowPart, ...]:
        """Rows of a token that workers read, in their order; see `RowPart`."""
        return tuple(RowPart(0, tap, 0) for tap in self.taps)

    @property
    def head_size(self) -> int:
        """Width of each row where rows are heads; else 0."""
        return 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a token, and their width, of what workers send."""
        raise NotImplementedError

    @property
    def wire(self) -> DType:
        """Dtype of what workers send; ids and ranks of a lens are exact in float32."""
        return "float32"

    @property
    def is_merged(self) -> bool:
        """Whether a result is made of the rows that come by `merge`; else they are it."""
        return False

    def merge(
        self, rows: NDArray[Any] | None, covered: NDArray[np.bool_] | None, run: Callable[..., Any]
    ) -> TensorData:
        """Make the result of rows, (taps, positions, width), with a `map` of some threads."""
        raise NotImplementedError

    def n_partial(self, n_known: int, most: int) -> int:
        """Of `most` positions, `n_known` the prompt's: those whose rows may stand for several."""
        return 0

    @property
    def alike(self) -> bytes:
        """What the requests of a batch have in common."""
        raise NotImplementedError

    @property
    def is_plain(self) -> bool:
        """Whether two ends say which tokens it has, and each row stands for one of them."""
        return self.positions is None

    def fed(self, n_fed: int) -> Sequence[int]:
        """Positions read, ascending, of a request that fed `n_fed` tokens to the model."""
        if self.positions is not None:
            return self.positions[: bisect_left(self.positions, n_fed)]
        return range(self.lo, max(self.lo, min(self.hi, n_fed)))


def span_of(where: Sequence[int]) -> tuple[int, int, tuple[int, ...] | None]:
    """`lo`, `hi` and `positions` of a readout."""
    if isinstance(where, range):
        return where.start, max(where.start, where.stop), None
    listed = tuple(sorted(where))
    return (listed[0], listed[-1] + 1, listed) if listed else (0, 0, listed)


@dataclass(frozen=True, kw_only=True)
class PromptRead(Readout):
    """What gates read of a prompt: it stays in the worker, and nothing comes of it."""

    read: tuple[TapPoint, ...]
    """The taps, each once, in tap order."""

    is_read_by_all_ranks: ClassVar[bool] = True

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        return self.read

    @cached_property
    def alike(self) -> bytes:
        return written(self.read)


@dataclass(frozen=True, kw_only=True)
class CaptureEnvelope(Readout):
    """Rows to send back."""

    sites: tuple[Site, ...]
    layers: tuple[int, ...]
    """Global layer numbers asked for at each site, ascending."""
    hidden: int
    dtype: DType
    transport: str
    """How the response carries the tensor; the worker does not care."""
    reduce: Reduce = "none"
    """What was asked to be made of the rows."""
    is_last: bool = False
    """Whether the result is that of the last of the positions that were fed. Which one that is is
    known at the end, so all that may be it are sent."""
    token: int = 0
    """Tells this request from another one under its key; 0 where no row stands for several."""
    is_folded: bool = False
    """Whether rows of sampled tokens stay in the worker, where it has room, until the request is
    over."""
    widths: tuple[tuple[int, int], ...] = ()
    """Of each site, numbers of a row and `SiteWidth.shards`; none where all are the stream's."""
    ranks: int = 1
    heads: tuple[tuple[Site, int, int], ...] = ()
    """Heads to send, as (site, layer, head); none where whole rows are sent."""
    head_size: int = 0

    def width_of(self, site: Site) -> SiteWidth:
        if not self.widths:
            return SiteWidth(site, self.hidden)
        return SiteWidth(site, *self.widths[self.sites.index(site)])

    @cached_property
    def is_simple(self) -> bool:
        """Whether the rows that come are the one tensor that was asked for."""
        is_one = len(self.sites) == 1 and not self.heads
        return is_one and self.width_of(self.sites[0])[1:3] == (self.hidden, 1)

    @cached_property
    def rows(self) -> tuple[RowPart, ...]:
        return self._of_heads[0] if self.heads else self.whole_rows

    @property
    def whole_rows(self) -> tuple[RowPart, ...]:
        """Rows of a token that a step keeps, also where heads alone are sent."""
        return _rows_of(self.sites, self.layers, self.widths, self.hidden, self.ranks)

    def heads_at(self, site: Site) -> list[int]:
        """Which of `rows` the heads of a site are, in the order of `heads`."""
        at = zip(self.heads, self._of_heads[1], strict=True)
        return [row for head, row in at if head[0] == site]

    @property
    def _of_heads(self) -> tuple[tuple[RowPart, ...], tuple[int, ...]]:
        widths = tuple([self.width_of(site) for site in self.sites])
        return _rows_of_heads(self.heads, self.head_size, widths, self.hidden, self.ranks)

    @cached_property
    def taps(self) -> tuple[TapPoint, ...]:
        return _taps_of(self.sites, self.layers)

    @cached_property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.reduction.columns(self.row_width)

    @property
    def row_width(self) -> int:
        """Numbers of a row of which a worker makes what it sends."""
        return self.head_size or self.hidden

    @cached_property
    def reduction(self) -> Reduction:
        """What is made of the rows."""
        made = REDUCTIONS[self.reduce]
        return REDUCTIONS["last"] if self.is_last and not made.makes_numbers else made

    @cached_property
    def combine(self) -> Combine | None:
        """How rows of several tokens become one; None where they do not."""
        return None if self.is_last else self.reduction.combine

    @property
    def fold(self) -> Fold | None:
        """What is made of sampled tokens in the worker; None where their rows are sent."""
        if not self.is_folded:
            return None
        return "last" if self.is_last else self.combine

    @cached_property
    def wire(self) -> DType:
        # Sums are rounded when they are complete.
        return "float32" if self.reduction.combine == "sum" else self.dtype

    @property
    def is_plain(self) -> bool:
        return super().is_plain and not self.token

    @cached_property
    def is_merged(self) -> bool:
        return self.is_last or self.combine is not None

    def merge(
        self, rows: NDArray[Any] | None, covered: NDArray[np.bool_] | None, run: Callable[..., Any]
    ) -> TensorData:
        reduction, taps = self.reduction, len(self.rows)
        # Of a result; what workers send of a row may be wider.
        width = reduction.width or self.row_width
        if rows is None:
            return narrowed(np.zeros((taps, 0, width), dtype=np.float32), self.dtype)
        n_tokens = rows.shape[1]
        if self.is_last:
            rows, covered, n_tokens = rows[:, -1:], None, 1
        if reduction.combine is None:
            return TensorData(np.ascontiguousarray(rows), self.dtype)
        out = np.empty((taps, 1, width), dtype=np.float32)

        def merge(tap: int) -> None:
            own = rows[tap] if covered is None else rows[tap][~covered[tap]]
            wide = TensorData(own, self.wire).to_float32()
            is_sum = reduction.combine == "sum"
            found = wide.sum(axis=0, dtype=np.float64) if is_sum else wide.max(axis=0)
            out[tap, 0] = reduction.finish(found, n_tokens)

        list(run(merge, range(taps)))
        return narrowed(out, self.dtype)

    def n_partial(self, n_known: int, most: int) -> int:
        if self.is_folded:
            return most
        return n_known if self.combine is not None else 0

    def n_bytes(self, n_fed: int) -> int:
        """Size of the results of a request that fed `n_fed` tokens to the model."""
        rows = len(self.fed(n_fed))
        if self.is_merged:
            rows = min(rows, 1)
        itemsize = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        if self.heads:
            return math.prod(self.shape) * rows * itemsize
        wide = sum(self.reduction.width or self.width_of(site).width for site in self.sites)
        return wide * len(self.layers) * rows * itemsize

    @cached_property
    def alike(self) -> bytes:
        return written(tuple([getattr(self, name) for name in _ALIKE]))


_ALIKE = tuple(
    field.name
    for field in fields(CaptureEnvelope)
    if field.name not in ("lo", "hi", "positions", "token")
)
"""Fields of a capture that the requests of a batch have in common."""


def seal_capture(
    capture: CaptureSpec | None,
    facts: EngineFacts,
    n_prompt: int,
    n_max: int,
    *,
    may_overrun: bool = False,
    is_live: bool = False,
) -> CaptureEnvelope | None:
    """Resolve a judged capture against its prompt."""
    if capture is None:
        return None
    is_last = REDUCTIONS[capture.reduce].picks_last or capture.positions == "last"
    named = "all" if capture.positions == "last" else capture.positions
    where = resolve_positions(named, n_prompt=n_prompt, n_max=n_max, field="capture.positions")
    where = in_phase(where, capture.phase, n_prompt=n_prompt, n_max=n_max)
    if not isinstance(where, range) and not where:
        raise SpecError(
            f"capture.phase={capture.phase!r} and none of capture.positions belongs to it, with a "
            f"prompt of {n_prompt} tokens; leave one of them out"
        )
    if is_last:
        where = _possible_last(where, n_prompt)
    lo, hi, listed = span_of(where)
    layers = tuple(range(facts.n_layers)) if capture.layers == "all" else capture.layers
    heads = [(s, n, h) for s in capture.sites for n in layers for h in capture.heads or ()]
    sealed = CaptureEnvelope(
        sites=capture.sites,
        layers=layers,
        lo=lo,
        hi=hi,
        positions=listed,
        hidden=facts.hidden,
        dtype=cast("DType", facts.dtype if capture.dtype == "model" else capture.dtype),
        transport=capture.transport,
        reduce=capture.reduce,
        is_last=is_last,
        is_live=is_live,
        widths=tuple([facts.width_of(site)[1:3] for site in capture.sites]) if facts.widths else (),
        ranks=facts.ranks,
        heads=tuple(heads),
        head_size=_head_size(capture.sites[0], facts) if heads else 0,
    )
    is_partial = sealed.combine is not None
    sampled = (
        range(max(lo, n_prompt), hi) if listed is None else [p for p in listed if p >= n_prompt]
    )
    is_folded = (
        (is_partial or is_last)
        # What is kept are the rows themselves.
        and not (sealed.reduction.makes_numbers or sealed.heads)
        and len(sampled) > LAG + 1
        # Which of their rows count is known too late.
        and not (may_overrun or facts.is_speculative)
    )
    if not is_partial and not is_folded:
        return sealed
    return replace(sealed, token=secrets.randbits(62), is_folded=is_folded)


def seal_qk(
    qk: QKSpec | None, facts: EngineFacts, n_prompt: int, n_max: int, *, is_live: bool = False
) -> CaptureEnvelope | None:
    """Queries and keys as the capture that they are: of `all` layers, those that are served."""
    if qk is None:
        return None
    layers = qk.layers_of(facts.layers)
    asked = CaptureSpec(layers=layers, site=("q", "k"), transport=qk.transport)
    sealed = seal_capture(asked, facts, n_prompt, n_max, is_live=is_live)
    if sealed is None or qk.heads is None:
        return sealed
    each = facts.width_of("q").heads // facts.width_of("k").heads
    queries: list[tuple[Site, int, int]] = [("q", *pair) for pair in qk.heads]
    keys: dict[tuple[Site, int, int], None] = {("k", n, head // each): None for n, head in qk.heads}
    return replace(sealed, heads=(*queries, *keys), head_size=_head_size("q", facts))


def _head_size(site: Site, facts: EngineFacts) -> int:
    width = facts.width_of(site)
    return width.width // width.heads


def _possible_last(where: range | tuple[int, ...], n_prompt: int) -> range | tuple[int, ...]:
    """Positions that may be the last one that is fed: one of the prompt, and all behind it."""
    if isinstance(where, range):
        return range(max(where.start, min(where.stop, n_prompt) - 1), where.stop)
    first = max((p for p in where if p < n_prompt), default=n_prompt)
    return tuple(p for p in where if p >= first)


@lru_cache(maxsize=1024)
def _rows_of(
    sites: tuple[Site, ...],
    layers: tuple[int, ...],
    widths: tuple[tuple[int, int], ...],
    hidden: int,
    ranks: int,
) -> tuple[RowPart, ...]:
    known = {s: SiteWidth(s, *width) for s, width in zip(sites, widths, strict=False)}
    found = []
    for tap in tap_points(sites, layers):
        width = known.get(tap.site) or SiteWidth(tap.site, hidden)
        n = rows_for(width, hidden)
        found += [RowPart(r, tap, p) for r in owners(width, ranks) for p in range(n)]
    return tuple(sorted(found, key=_row_order))


@lru_cache(maxsize=64)
def _rows_of_heads(
    heads: tuple[tuple[Site, int, int], ...],
    size: int,
    widths: tuple[SiteWidth, ...],
    hidden: int,
    ranks: int,
) -> tuple[tuple[RowPart, ...], tuple[int, ...]]:
    """Each head on the rank that has it, where it lies in its share; and which of these each is."""
    of_site = {width.site: width for width in widths}
    found = []
    for site, layer, head in heads:
        width = of_site[site]
        shard, at = divmod(head * size, width.width // width.shards)
        rank = owners(width, ranks)[shard]
        found.append(RowPart(rank, TapPoint(site, layer), *divmod(at, hidden)))
    rows = tuple(sorted(found, key=_row_order))
    numbers = {row: i for i, row in enumerate(rows)}
    return rows, tuple([numbers[row] for row in found])


def _row_order(row: RowPart) -> tuple[Any, ...]:
    return row.rank, tap_order(row.tap), row.part, row.column


def owners(width: SiteWidth, ranks: int) -> range:
    """Ranks that send the shares of a site's rows, in order."""
    return range(0, ranks if width.shards > 1 else 1, ranks // width.shards)


def share_of(width: SiteWidth, ranks: int, rank: int) -> tuple[int, int]:
    """The numbers of a site's rows that a rank has."""
    own = width.width // width.shards
    return rank * width.shards // ranks * own, own


CROSSING_PIECE: Final = 64 << 20
"""Bytes of rows that are on their way from what came with a step of a pipeline into the ring."""


def crossing_bytes(held: int, *, is_first: bool, is_last: bool) -> int:
    """Bytes that a stage needs for rows of so many bytes that cross with a step.

    What came, and a piece of it; and what leaves, twice: the engine holds that of the step before.
    """
    came = 0 if is_first else held + min(held, CROSSING_PIECE)
    return came + (0 if is_last else 2 * held)


@lru_cache(maxsize=1024)
def _taps_of(sites: tuple[Site, ...], layers: tuple[int, ...]) -> tuple[TapPoint, ...]:
    return tap_points(sites, layers)


def narrowed(values: NDArray[np.float32], dtype: DType) -> TensorData:
    """Numbers in another dtype, rounded to nearest, ties to even."""
    if dtype == "float32":
        return TensorData(values, dtype)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return TensorData(values.astype(np.float16), dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    kept = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return TensorData(kept.astype(np.uint16), dtype)


@dataclass(frozen=True, kw_only=True)
class ProbesEnvelope(Readout):
    """Probes to apply to the rows of a request."""

    names: tuple[str, ...]
    """sha256 of each registered probe."""
    points: tuple[TapPoint, ...]
    """What they read together, in tap order."""
    columns: int
    """Numbers per token that come back."""

    is_summed: ClassVar[bool] = True

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        return self.points

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.points), self.columns

    @cached_property
    def alike(self) -> bytes:
        return written((self.names, self.points, self.columns, self.is_live))


def removed(field: str, names: Iterable[str]) -> SpecError:
    """What a request is told whose weights have gone since it was judged, whatever they are of."""
    return SpecError(
        f"{field}: {', '.join(names)} removed or replaced while the request was on its way; send "
        "it again with a name that is registered, or register it with this engine again"
    )


@dataclass(frozen=True)
class AskedProbes:
    """What uses of registered probes come to, whatever the prompt: worked out once for a batch."""

    names: tuple[str, ...]
    """sha256 of the probe of each use."""
    taps: tuple[TapPoint, ...]
    columns: int
    positions: tuple[tuple[int, Positions], ...]
    """Different ones, each with the index of the first use that reads it."""

    @classmethod
    def of(cls, uses: Sequence[ProbeUse], registered: Mapping[str, EngineProbe]) -> AskedProbes:
        """Look the uses up."""
        if gone := sorted({use.name for use in uses} - registered.keys()):
            raise removed("probes", gone)
        used = [registered[use.name] for use in uses]
        read = {(probe.site, probe.layers) for probe in used}
        positions: dict[tuple[type, bool, Positions], int] = {}
        for i, use in enumerate(uses):
            # True is 1 to Python.
            positions.setdefault((type(use.positions), is_mask(use.positions), use.positions), i)
        return cls(
            names=tuple(probe.sha256 for probe in used),
            taps=tuple(
                sorted(
                    {t for site, layers in read for t in tap_points((site,), layers)}, key=tap_order
                )
            ),
            columns=sum(probe.columns for probe in used),
            positions=tuple((i, asked) for (*_, asked), i in positions.items()),
        )


def seal_probes(
    asked: AskedProbes, n_prompt: int, n_max: int, *, is_live: bool = False
) -> ProbesEnvelope:
    """Resolve what probes read against a prompt."""
    # One request reads all its probes over one range; what each uses of it is its own affair.
    lo, hi = n_max, 0
    for i, positions in asked.positions:
        where = resolve_positions(
            positions, n_prompt=n_prompt, n_max=n_max, field=f"probes[{i}].positions"
        )
        if len(where):
            # A range is as long as the request may become: it is not walked.
            is_range = isinstance(where, range)
            lo = min(lo, where[0] if is_range else min(where))
            hi = max(hi, (where[-1] if is_range else max(where)) + 1)
    return ProbesEnvelope(
        lo=lo,
        hi=max(lo, hi),
        names=asked.names,
        points=asked.taps,
        columns=asked.columns,
        is_live=is_live,
    )


LENS_KEY = "lens"
"""Of a packed envelope: hash of the lens that is asked for, empty for the logit lens, None without
one. All ranks read together."""


class LensForm(NamedTuple):
    """What is made of a row; requests that want the same are read together."""

    layers: tuple[int, ...]
    """Whose streams are read, ascending."""
    top_k: int
    tokens: tuple[int, ...]
    """Ids of the chosen tokens."""
    lens: str = ""
    """Hash of the lens that translates rows first; empty where none does."""

    @property
    def columns(self) -> int:
        """Numbers of a row: ids and log-probabilities, then log-probabilities and ranks."""
        return 2 * (self.top_k + len(self.tokens))

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        return tap_points((RESID_POST,), self.layers)


@dataclass(frozen=True, kw_only=True)
class LensEnvelope(Readout):
    """Rows to read."""

    layers: tuple[int, ...]
    top_k: int
    tokens: tuple[int, ...]
    transport: str
    """How the response carries the result; the worker does not care."""
    lens: str = ""
    """Hash of the registered lens that translates rows first; empty for the logit lens."""
    kind: str = "logit"
    """Which lens it is, for the receipt."""
    name: str | None = None
    """Under which it is registered, for the receipt."""

    is_read_by_all_ranks: ClassVar[bool] = True

    @property
    def form(self) -> LensForm:
        """What is made of each row."""
        return LensForm(self.layers, self.top_k, self.tokens, self.lens)

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        return self.form.taps

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.layers), self.form.columns

    @cached_property
    def alike(self) -> bytes:
        return written(tuple(self.form))


READOUTS: Final[Mapping[str, type[Readout]]] = {
    "capture": CaptureEnvelope,
    "probes": ProbesEnvelope,
    "qk": CaptureEnvelope,
    "lens": LensEnvelope,
}
"""Kinds of results by name, in the order of `ROWS`, `SCORES`, `QK` and `LENS`."""


def seal_lens(
    lens: LogitLens | None, facts: EngineFacts, n_prompt: int, n_max: int
) -> LensEnvelope | None:
    """Resolve a judged lens against its prompt."""
    if lens is None:
        return None
    where = resolve_positions(
        lens.positions, n_prompt=n_prompt, n_max=n_max, field="lens.positions"
    )
    lo, hi, listed = span_of(where)
    entry = lens.entry if isinstance(lens, ResolvedLens) else None
    if entry is None and lens.name is not None:
        raise SpecError(f"lens.name: {lens.name!r} has not been looked up")
    return LensEnvelope(
        layers=tuple(range(facts.n_layers)) if lens.layers == "all" else lens.layers,
        top_k=lens.top_k,
        tokens=lens.ids,
        lo=lo,
        hi=hi,
        positions=listed,
        transport=lens.transport,
        lens="" if entry is None else entry.sha256,
        kind="logit" if entry is None else entry.kind,
        name=lens.name,
    )
