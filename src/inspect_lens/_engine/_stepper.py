"""The worker's side of the lens: which requests use it, and what each step does for them.

Runs in the worker process. No method that the step loop calls raises: a fault fails the
requests it concerns, clears their rows, and the engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from inspect_lens.errors import CaptureError
from inspect_lens.spec import EnginePath

from . import _state
from ._bank import Bank
from ._envelope import Envelope
from ._exporter import Exporter
from ._maps import maps_for
from ._message import BlockHeader, FailureHeader, Span, StepHeader
from ._plan import (
    Batch,
    CaptureRule,
    GroupBlock,
    RequestRows,
    SteerRule,
    StepPlan,
    plan_step,
)
from ._state import TapState

__all__ = ["Stepper"]

logger = logging.getLogger("vllm.inspect_lens")


@dataclass
class _Request:
    reply: str
    salt: str | None = None
    is_new: bool = True
    rows: list[int] = field(default_factory=list)
    drafts_after: int | None = None
    """Where drafts may be rejected: the length of the prompt, which never is."""
    reported: int = 0
    """Up to where it was reported as settled."""
    until: int = 0
    """Up to where it has to be."""

    def settled(self, position: int, count: int) -> int:
        """One past the last token of a step that is not a draft."""
        end = position + count
        return end if self.drafts_after is None else min(end, max(position + 1, self.drafts_after))


class Stepper:
    """Tracks requests and drives the taps of one worker."""

    def __init__(self, state: TapState, exporter: Exporter, *, is_exporting: bool = True) -> None:
        """Store what the steps need.

        Args:
            state: the worker's buffers.
            exporter: where rows go.
            is_exporting: whether this rank sends rows; the residual stream is the same on
                all tensor-parallel ranks, so one of them does.
        """
        self.state = state
        self._exporter = exporter
        self._is_exporting = is_exporting
        self._bank = Bank(state.bank)
        self._site_of = {point: i for i, point in enumerate(state.taps)}
        self._requests: dict[str, _Request] = {}
        self._capture: dict[str, CaptureRule] = {}
        self._steer: dict[str, SteerRule] = {}
        self._maps = maps_for(state)
        self._region = 0
        self._plan: StepPlan | None = None
        self._fed: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        self._poisoned: set[str] = set()
        """Salts under which a request ran unsteered after it had failed here."""

    @property
    def is_watching(self) -> bool:
        """Whether any live request uses the lens."""
        return bool(self._requests)

    @property
    def keys(self) -> Mapping[str, object]:
        """Live requests that use the lens, by key."""
        return self._requests

    @property
    def rows_in_use(self) -> int:
        """Steering rows that live requests hold."""
        return self._bank.rows_in_use

    def add(self, key: str, packed: Mapping[str, Any]) -> None:
        """Take up a request; one that is known under the key is replaced."""
        self.remove(key)
        try:
            envelope = Envelope.unpack(packed)
            self._requests[key] = request = _Request(envelope.reply, envelope.steer_hash)
            if envelope.is_speculative:
                request.drafts_after = envelope.n_prompt
            if envelope.steer:
                rule, request.rows = self._bank.admit(envelope, self._site_of)
                # A pipeline stage reports on requests that it has something to do for.
                if rule.sites:
                    self._steer[key] = rule
                    request.until = rule.until
            if (capture := envelope.capture) is not None and self._is_exporting:
                # With pipeline parallelism a stage serves the layers it has.
                sites = [self._site_of[p] for p in capture.taps if p in self._site_of]
                positions = (
                    None
                    if capture.positions is None
                    else np.asarray(capture.positions, dtype=np.int64)
                )
                if sites:
                    wanted = CaptureRule(tuple(sites), capture.lo, capture.hi, positions)
                    self._capture[key] = wanted
                    request.until = max(request.until, wanted.hi)
        except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own request
            self._fail(key, error, reply=str(packed.get("reply", "")))

    def remove(self, key: str) -> None:
        """Forget a request; one that is not known is fine."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        self._capture.pop(key, None)
        self._steer.pop(key, None)
        self._bank.release(request.rows)

    def begin_step(self, batch: Batch) -> None:
        """Fill the maps for the step that is about to run.

        Args:
            batch: layout of the requests of this step that use the lens.
        """
        self._clear()
        try:
            batch = self._without_poisoned(batch)
            rows = self.state.region_rows
            plan = plan_step(
                batch,
                self._capture,
                self._steer,
                ring_rows=rows,
                first_row=self._region * rows,
            )
            if plan.capture:
                self._exporter.wait_for_region(self._region)
            # Set first: should writing fail half-way, `_clear` undoes what was written.
            self._plan = plan
            self.state.is_active = bool(plan.steer or plan.capture)
            if self.state.is_active:
                self._maps.write(plan)
        except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own requests
            self._clear()
            for key in batch.keys:
                self._fail(key, error)
            return
        self._fed = {
            key: self._requests[key].settled(int(batch.position[i]), int(batch.n_tokens[i]))
            for i, key in enumerate(batch.keys)
        }
        self._settled = self._take_settled()
        if not (plan.steered or plan.capture or self._settled):
            self._clear()
            return
        # Two engines may live in one process; the one that steps is the current one.
        _state.install(self.state)

    def end_step(self, path: EnginePath) -> None:
        """Send what the step captured, and leave the taps idle.

        Args:
            path: how the forward pass ran.
        """
        plan = self._plan
        if plan is None:
            return
        try:
            if self._is_exporting:
                self._export(plan, path)
            if plan.capture:
                self._exporter.release_region(self._region)
                self._region = (self._region + 1) % self.state.regions
        except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own requests
            for key in {r.key for b in plan.blocks for r in b.requests} | set(plan.steered):
                self._fail(key, error)
        finally:
            self._clear()

    def fail_all(self, error: Exception) -> None:
        """Fail every live request and leave the taps idle: the last resort of a fault."""
        try:
            self._clear()
        finally:
            for key in list(self._requests):
                self._fail(key, error)

    def _without_poisoned(self, batch: Batch) -> Batch:
        """Fail steered requests that begin behind blocks which a failed twin wrote unsteered."""
        kept = []
        for i, key in enumerate(batch.keys):
            request = self._requests[key]
            was_new, request.is_new = request.is_new, False
            if was_new and batch.position[i] > 0 and request.salt in self._poisoned:
                self._fail(
                    key,
                    CaptureError(
                        "the prefix cache holds blocks of a failed request with the same steering; "
                        "try again"
                    ),
                )
            else:
                kept.append(i)
        if len(kept) == len(batch.keys):
            return batch
        return Batch(
            [batch.keys[i] for i in kept],
            batch.offset[kept],
            batch.n_tokens[kept],
            batch.position[kept],
        )

    def _take_settled(self) -> dict[str, int]:
        """Requests with drafts that still have to report how far they are settled."""
        found = {}
        for key, fed in self._fed.items():
            request = self._requests[key]
            if request.drafts_after is not None and request.reported < request.until:
                found[key] = request.reported = fed
        return found

    def close(self) -> None:
        """Free sockets and the process-global state."""
        self._exporter.close()
        _state.uninstall(self.state)

    def _export(self, plan: StepPlan, path: EnginePath) -> None:
        replies = {self._requests[k].reply for k in plan.steered}
        replies |= {self._requests[k].reply for k in self._settled}
        replies |= {self._requests[r.key].reply for b in plan.blocks for r in b.requests}
        for reply in replies:
            headers: list[BlockHeader] = []
            tensors: list[torch.Tensor] = []
            for block in plan.blocks:
                mine = [r for r in block.requests if self._requests[r.key].reply == reply]
                if mine:
                    head, tensor = self._block(block, mine)
                    headers.append(head)
                    tensors.append(tensor)
            steered = {
                key: (self._fed[key], Span.of(where) if len(where) else None)
                for key, where in plan.steered.items()
                if self._requests[key].reply == reply
            }
            settled = {k: n for k, n in self._settled.items() if self._requests[k].reply == reply}
            header = StepHeader(path, headers, steered, settled)
            if not self._exporter.send_step(reply, header, tensors):
                gone = [k for k, r in self._requests.items() if r.reply == reply]
                logger.error("inspect_lens: front-end %s takes no rows; dropping %s", reply, gone)
                for key in gone:
                    self._fail(key, CaptureError("the front-end took no rows"))

    def _block(
        self, block: GroupBlock, mine: list[RequestRows]
    ) -> tuple[BlockHeader, torch.Tensor]:
        sites, n = len(block.sites), block.n_tokens
        rows = self.state.ring[block.base : block.base + sites * n].view(sites, n, -1)
        if len(mine) != len(block.requests):
            # Several front-ends share the block: each gets its own requests' rows only.
            index = np.concatenate([np.arange(r.start, r.start + len(r.positions)) for r in mine])
            rows = rows[:, torch.from_numpy(index)]
        header = BlockHeader(
            taps=tuple(self.state.taps[s] for s in block.sites),
            n_tokens=sum(len(r.positions) for r in mine),
            hidden=int(rows.shape[-1]),
            dtype=str(rows.dtype).removeprefix("torch."),
            requests=[(r.key, Span.of(r.positions)) for r in mine],
        )
        return header, rows

    def _clear(self) -> None:
        state, plan = self.state, self._plan
        self._plan = None
        if plan is None:
            return
        if state.is_active:
            state.is_active = False
            self._maps.clear(plan)

    def _fail(self, key: str, error: Exception, *, reply: str = "") -> None:
        request = self._requests.get(key)
        self.remove(key)
        if request is not None and request.salt is not None:
            # vLLM runs it to its end, unsteered, and its blocks are cached under this salt.
            self._poisoned.add(request.salt)
        logger.error("inspect_lens: request %s failed: %s", key, error)
        address = request.reply if request is not None else reply
        try:
            if address:
                header = FailureHeader(key, type(error).__name__, str(error))
                self._exporter.send_failure(address, header)
        except Exception:
            # Nobody can be told; the front-end's time-out fails the request.
            logger.exception("inspect_lens: the failure of %s could not be reported", key)
