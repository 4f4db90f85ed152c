"""A stepper whose requests may ask what rows predict, and may bring functions of their own.

The rows of a step lie in the ring when it has run. Those of requests that ask go through the lens
that they name, if any, and the model's final norm and unembedding, in pieces, before the step's
results are sent. Nothing is done in other steps. Where the vocabulary is split over ranks all of
them take part: which requests of a step ask is known to each from the scheduler, so they agree in
words first, and then go on by what all of them said.

Functions run in eager steps, which the worker's glue arranges; here they begin and end with their
requests. One that has failed on this rank takes part until it is over, as others may not know.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.hooks.runner import EAGER_KEY, HookRunner
from inspect_lens._engine.plan import GroupBlock, Longs
from inspect_lens._engine.protocol.messages import LENS, SPLICED_KEY
from inspect_lens._engine.protocol.processes import as_exception, ends_process
from inspect_lens._engine.protocol.readouts import LENS_KEY, LensForm
from inspect_lens._engine.readout.logit_lens import (
    LensStore,
    Span,
    Translator,
    read_logits,
    rows_at_once,
)
from inspect_lens._engine.readout.reduce import Part
from inspect_lens.errors import CaptureError, LensError, UnsupportedError
from inspect_lens.spec import EnginePath

from .stages import Stages, missing_rows
from .stepper import Stepper

logger = logging.getLogger("vllm.inspect_lens")


class Unembedding(Protocol):
    """The model's final norm and unembedding."""

    vocab: int
    """Tokens of the vocabulary."""
    n_ranks: int
    """Ranks over which it is split; each of them has to make the same calls."""

    def say(self, text: str) -> list[str]:
        """Tell all ranks something, and hear them."""
        ...

    def logits(self, rows: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Logits of rows of the stream."""
        ...


@dataclass(frozen=True)
class _Rows:
    """What a step has of the requests that ask for one form, one behind the other."""

    keys: list[str]
    """Empty where no other rank has to agree."""
    slots: Longs
    counts: Longs
    """Tokens of each."""
    first: Longs
    index: NDArray[np.int64]
    """(layers, tokens of all); rows of the ring."""
    listed: Mapping[int, Longs]
    """By place of the request, positions that it names."""

    def taken(self, which: Sequence[int] | Longs) -> _Rows:
        """Some of the requests, in another order."""
        ends, counts = np.cumsum(self.counts), self.counts[which]
        shift = (ends - self.counts)[which] - (np.cumsum(counts) - counts)
        columns = np.repeat(shift, counts) + np.arange(counts.sum())
        return _Rows(
            [self.keys[i] for i in which] if self.keys else [],
            self.slots[which],
            counts,
            self.first[which],
            self.index[:, columns],
            {n: self.listed[i] for n, i in enumerate(which) if i in self.listed},
        )

    @classmethod
    def joined(cls, parts: Sequence[_Rows]) -> _Rows:
        if len(parts) == 1:
            return parts[0]
        keys: list[str] = []
        listed: dict[int, Longs] = {}
        n = 0
        for part in parts:
            listed |= {n + i: one for i, one in part.listed.items()}
            keys += part.keys
            n += len(part.slots)
        return cls(
            keys,
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.first for part in parts]),
            np.concatenate([part.index for part in parts], axis=1),
            listed,
        )


_Work = list[tuple[LensForm, _Rows]]


class RequestStepper(Stepper):
    """Reads rows with a lens before they are sent, and passes functions on to what runs them."""

    no_head = "the model has not been loaded"
    """Why there is none."""
    hooks: HookRunner | None = None
    """Set once, when the model is there."""
    stages: Stages | None = None
    """Set once, on a pipeline."""
    _asks: frozenset[str] = frozenset()
    """Requests of the running step with a lens, as the scheduler has them: alike on all ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head: Unembedding | None = None
        self._is_first = not options.get("rank")
        """Whether this rank sends what all of them have computed."""
        self._asking: set[str] = set()
        """Live requests with a lens; one that failed here is there until it is over."""
        self.lenses = LensStore(self.state.ring.device)
        """Registered lenses."""
        self._bank.splices.find = self.lenses.autoencoder
        self._until: dict[str, int] = {}
        """Of live requests that splice an autoencoder in, failed ones too, as ranks have to decide
        alike: one past the last position that they edit."""
        self._at: dict[str, int] = {}
        """Of these, position at which their latest step begins."""
        self._named: dict[str, tuple[str, Translator]] = {}
        """Of live requests that name a lens: its hash, and the lens itself, which they keep."""

    @property
    def head(self) -> Unembedding | None:
        """What reads rows; set once, when the model is there."""
        return self._head

    @head.setter
    def head(self, head: Unembedding | None) -> None:
        self._head = head
        if head is not None and head.n_ranks == 1:
            # No other rank has to agree: rows of a few steps wait for one product.
            self._sender.read = self._read_alone
            self._sender.rows_read = rows_at_once(head.vocab)

    @property
    def is_watching(self) -> bool:
        """See `Stepper.is_watching`; other ranks may go on with what has failed here."""
        has_hooks = self.hooks is not None and bool(self.hooks.live)
        return super().is_watching or bool(self._asking or self._until) or has_hooks

    def replays_none(self, keys: Container[str]) -> bool:
        """Whether a step with some requests replays no graph, so that autoencoders have a part."""
        return any(
            key in keys and self._at.get(key, 0) < until for key, until in self._until.items()
        )

    def add(self, key: str, envelope: Mapping[str, Any]) -> None:
        super().add(key, envelope)
        if (sha256 := envelope.get(LENS_KEY)) is not None:
            self._add_lens(key, sha256)
        if (until := envelope.get(SPLICED_KEY)) is not None:
            self._until[key] = until
        if EAGER_KEY in envelope:
            self._add_hooks(key, envelope)

    def _add_lens(self, key: str, sha256: str) -> None:
        if self.stages is not None and not self.stages.is_last:
            return  # its rows are read on the last stage
        self._asking.add(key)
        problem: LensError | None = None
        if self.head is None:
            problem = UnsupportedError(f"lens: {self.no_head}")
        elif sha256:
            try:
                self._named[key] = sha256, self.lenses.get(sha256)
            except LensError as error:
                problem = error
        if problem is not None:
            self.take_up()
            if key in self._live.by_key:
                self._fail(key, problem)

    def _add_hooks(self, key: str, envelope: Mapping[str, Any]) -> None:
        self.take_up()
        if self.hooks is None:
            if key in self._live.by_key:
                self._fail(key, UnsupportedError("hooks are off: see the log"))
            return
        with self._failing(key):
            # Also where the request has failed here: ranks take part in gathering alike.
            self.hooks.add(key, envelope)
        if key not in self._live.by_key:
            self.hooks.drop(key)

    def remove(self, key: str) -> None:
        if self.hooks is not None and key in self.hooks.live:
            with self._failing(key):
                self.hooks.remove(key)
        # First: rows that wait are read with the lens that it keeps.
        super().remove(key)
        self._asking.discard(key)
        self._named.pop(key, None)
        self._until.pop(key, None)
        self._at.pop(key, None)

    def flush(self, keys: Sequence[str]) -> None:
        """See `Stepper.flush`; what hooks have saved is sent, too."""
        super().flush(keys)
        for key in keys:
            if self.hooks is not None and key in self.hooks.live:
                with self._failing(key):
                    self.hooks.flush(key)

    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """The boundary: a fault fails its own request."""
        try:
            yield
        except BaseException as error:
            if ends_process(error, in_user_code=True):
                raise
            if key in self._live.by_key:
                self._fail(key, as_exception(error))
            else:  # its request has failed before, and heard why
                logger.exception("inspect_lens: hooks of request %s, which has failed before", key)

    def fail(self, key: str, error: Exception) -> None:
        self._fail(key, error)

    def _fail(self, key: str, error: Exception, reply: str = "", salt: str | None = None) -> None:
        if self.hooks is not None:
            self.hooks.drop(key)
        super()._fail(key, error, reply, salt)

    def begin(self, keys: Sequence[str], offset: Longs, n_tokens: Longs, position: Longs) -> None:
        self._asks = frozenset(self._asking.intersection(keys)) if self._asking else frozenset()
        if known := self._until:
            rows = zip(keys, position.tolist(), strict=False)
            self._at |= {key: at for key, at in rows if key in known}
        super().begin(keys, offset, n_tokens, position)

    def end_step(self, path: EnginePath) -> None:
        if self.stages is not None and self._plan is not None:
            groups = {block.group for block in self._plan.blocks}
            if any(self._groups[group].crosses for group in groups):
                self._cross(self.stages)
        if self._asks and self._sender.read is None:
            asks, self._asks = self._asks, frozenset()
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own requests
                self._sender.seen = []
                for key in asks & self._live.by_key.keys():
                    self._fail(key, error)
        super().end_step(path)

    def _cross(self, stages: Stages) -> None:
        """Take rows of other stages into the ring, and lend them some of this one."""
        blocks, first_row = self._rounds.current()
        live = self._live.by_slot

        def key_of(slot: int) -> str:
            return live[slot].key if slot in live else ""

        ring, copier = self.state.ring, self._exporter.copier
        try:
            missing = stages.cross(self._groups, blocks, first_row, ring, copier, key_of)
        except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own requests
            asking = [block for block in blocks if self._groups[block.group].crosses]
            self._fail_slots([s for block in asking for s in block.slots.tolist()], error)
        else:
            for key in missing:
                self._fail(key, missing_rows())

    def _read(self) -> None:
        head = self.head
        if head is None:
            return
        work: _Work = []
        problem: Exception | None = None
        try:
            work = self._work(*self._rounds.current())
        except Exception as error:  # noqa: BLE001 - the other ranks wait to be told
            problem = error
        said = "" if problem is not None else _digest(work)
        heard = head.say(said)
        if problem is None and set(heard) != {said}:
            problem = CaptureError(
                "lens: the tensor-parallel ranks have different rows of this step, as a "
                "request has failed on one of them; try again"
            )
        if problem is not None:
            raise problem
        self._sender.seen = list(self._parts(head, work))

    def _read_alone(
        self, blocks: Sequence[GroupBlock], first_row: int, steps: int, apart: int
    ) -> list[Part]:
        """What rows of some steps predict, where no other rank takes part."""
        assert self.head is not None
        return list(self._parts(self.head, self._work(blocks, first_row, steps, apart)))

    def _work(
        self, blocks: Sequence[GroupBlock], first_row: int, steps: int = 1, apart: int = 0
    ) -> _Work:
        """What there is to read, in an order that all ranks have; no Python for each request."""
        # Rows of the ring are counted from `first_row`, and `apart` lie from one to the next.
        found: dict[LensForm, list[_Rows]] = {}
        live, owner = self._live.by_slot, self._live.table.owner
        is_alone = self._sender.read is not None
        for block in blocks:
            is_there = owner[block.slots] >= 0
            if not is_there.any():
                continue
            if (lens := self._groups[block.group].results.get(LENS)) is None:
                continue
            cut = self._groups.cut(block, LENS)
            if cut is None:
                cut = np.arange(block.n_tokens), block.counts, block.first, block.listed
            index, counts, first, listed = cut
            tokens = block.n_tokens // steps
            starts = first_row + block.base + tokens * np.asarray(lens.ranks)
            at = starts[:, None] + (index // tokens * apart + index % tokens)
            slots = block.slots.tolist()
            keys = [] if is_alone else [live[s].key if s in live else "" for s in slots]
            # Copies: a step that is repeated goes on with the block's own.
            rows = _Rows(keys, block.slots.copy(), counts.copy(), first.copy(), at, listed)
            (which,) = ((rows.counts > 0) & is_there).nonzero()
            assert lens.lens is not None
            if len(which):
                taken = rows if len(which) == len(slots) else rows.taken(which)
                found.setdefault(lens.lens, []).append(taken)
        work = [(form, _Rows.joined(found[form])) for form in sorted(found)]
        return work if is_alone else [(form, _in_order(rows)) for form, rows in work]

    def _parts(self, head: Unembedding, work: _Work) -> Iterator[Part]:
        """What the rows of each form predict."""
        at_once = rows_at_once(head.vocab)
        problem: Exception | None = None
        lenses = dict(self._named.values())
        for form, asked in work:
            index = asked.index
            flat = index.reshape(-1)
            made: list[torch.Tensor] = []
            for a in range(0, len(flat), at_once):
                rows = partial(self._rows, flat[a : a + at_once], problem)
                if form.lens:
                    spans = _spans(form.layers, index.shape[1], a, min(a + at_once, len(flat)))
                    rows = partial(_translated, rows, lenses, form.lens, spans)
                logits = head.logits(rows)
                if not self._is_first:
                    continue
                try:
                    made.append(read_logits(logits, form))
                except Exception as error:  # noqa: BLE001 - the other ranks go on, and are told
                    problem = error
            if made and problem is None:
                numbers = torch.cat(made).view(*index.shape, form.columns)
                yield Part(numbers, asked.slots, asked.counts, asked.first, dict(asked.listed))
        if problem is not None:
            raise problem

    def _rows(self, index: NDArray[np.int64], problem: Exception | None) -> torch.Tensor:
        """Some rows of the ring; a problem that came up before is raised where ranks agree."""
        if problem is not None:
            raise problem
        return self._exporter.copier.select(self.state.ring[None], index)[0]


def _translated(
    rows: Callable[[], torch.Tensor],
    lenses: Mapping[str, Translator],
    sha256: str,
    spans: Sequence[Span],
) -> torch.Tensor:
    """Rows as a lens translates them; what is missing is told to all ranks, as by `rows`."""
    return lenses[sha256](rows(), spans)


def _spans(layers: Sequence[int], n: int, start: int, stop: int) -> list[Span]:
    """Layers of some of the rows of a form, which has `n` of each, one layer behind another."""
    of_each = ((layer, i * n, (i + 1) * n) for i, layer in enumerate(layers))
    return [
        Span(layer, max(a, start) - start, min(b, stop) - start)
        for layer, a, b in of_each
        if a < stop and b > start
    ]


def _in_order(rows: _Rows) -> _Rows:
    """By key, which ranks have alike."""
    return rows.taken(sorted(range(len(rows.keys)), key=rows.keys.__getitem__))


def _digest(work: _Work) -> str:
    """The work in so few letters that ranks can compare it."""
    told = [
        (form, list(zip(rows.keys, rows.counts.tolist(), rows.first.tolist(), strict=True)))
        for form, rows in work
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()
