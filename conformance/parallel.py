"""Do two ranks give what one gives? Test 8."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.kit.tiny_models import RESERVED

from .alignment import unique_asks
from .protocol import Answer, Ask, NotSupported, Suite, Verdict

__all__ = ["probe_scores", "tensor_parallel"]

TOLERANCE = 2e-2
N_PROBES = 8


def probe_scores(answers: list[Answer], n_prompt: list[int]) -> np.ndarray:
    """Mean-pooled scores of random linear probes on prompt tokens, (requests, probes).

    In units of the spread (root mean square) of the scores of single tokens.
    """
    scores = []
    for answer, n in zip(answers, n_prompt, strict=True):
        if answer.error is not None or answer.rows is None:
            raise RuntimeError(answer.error or "the response has no activations")
        rows = answer.rows[-1, :n, RESERVED:].astype(np.float64)
        probes = np.random.default_rng(8).standard_normal((rows.shape[1], N_PROBES))
        each = rows @ probes
        scores.append(each.mean(axis=0) / np.sqrt((each**2).mean(axis=0)))
    return np.array(scores)


def tensor_parallel(suite: Suite) -> Verdict:
    """Test 8: the same requests with tensor-parallel 1 and 2."""
    name, limit = "8 TP parity", f"scores within {TOLERANCE}; lists as long as with one rank"
    if suite.backend.max_ranks < 2:
        return Verdict(name, None, None, limit, "not run: no room for a second rank")
    last = (suite.truth.layers - 1,)
    asks = unique_asks([20, 33, 47, 64, 90, 128], max_tokens=4, capture=last, seed=8)
    hooked = Ask(asks[0].prompt, max_tokens=1, hook_layer=1)
    lengths = [len(a.prompt) for a in asks]
    scores, shapes, lists = [], [], []
    for size in (1, 2):
        with suite.backend.engine("wide", tensor_parallel=size) as engine:
            answers = engine.generate(asks, together=False)
            scores.append(probe_scores(answers, lengths))
            shapes.append([a.rows.shape for a in answers if a.rows is not None])
            try:
                lists.append(engine.generate([replace(hooked)])[0].hook_list)
            except NotSupported:
                lists.append(None)
    apart = float(np.abs(scores[0] - scores[1]).max())
    problems = []
    if shapes[0] != shapes[1]:
        problems.append(f"rows: {shapes[1]} with two ranks, {shapes[0]} with one")
    if lists[0] != lists[1]:
        problems.append(f"a hook's list: {lists[1]} with two ranks, {lists[0]} with one")
    note = "custom hooks not offered: no list to compare" if lists[0] is None else ""
    return Verdict(
        name, apart <= TOLERANCE and not problems, apart, limit, "; ".join(problems) or note
    )
