"""Requests that are edited and ask for nothing else: a batch of them is over in one step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inspect_lens._engine.export.overflow import COLUMN
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE

from .collected import Collected
from .pending import Pending
from .placement import Worker, paths_of

__all__ = ["told_of_edits"]


def told_of_edits(pending: Mapping[str, Pending], n_fed: Mapping[str, int]) -> dict[str, Collected]:
    """What workers have told of some requests, where that is all; looked up for all at once.

    Args:
        pending: running requests.
        n_fed: by request the tokens that were fed; they have edits, none with a gate that lasts,
            no other results, and no drafts.

    Returns:
        Of those that one worker has told all of. Others have failed, or have to be waited for.
    """
    by_worker: dict[str, tuple[Worker, list[str], list[int]]] = {}
    for key in n_fed:
        request = pending.get(key)
        if request is None or request.failure is not None or len(request.shares) != 1:
            continue
        opening, worker = request.shares[0]
        if opening.n_steered >= request.n_steered and worker.reader.is_told(opening.number):
            _, keys, numbers = by_worker.setdefault(worker.reader.name, (worker, [], []))
            keys.append(key)
            numbers.append(opening.number)
    found: dict[str, Collected] = {}
    for worker, keys, numbers in by_worker.values():
        known = np.asarray(numbers)
        ways = worker.paths_of(known)
        board = worker.reader.view.board[known % BOARD_SIZE, : COLUMN + 1].tolist()
        for key, number, (owner, first, last, _, fault), way in zip(
            keys, numbers, board, ways, strict=True
        ):
            request, n = pending[key], n_fed[key]
            if owner == number and not fault and last >= min(n, request.until):
                n_steered = request.steered_between(first, min(last, n))
                found[key] = Collected({}, n_steered, paths_of(way))
    return found
