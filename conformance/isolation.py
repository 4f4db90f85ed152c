"""Does a request change what another one gets, or leave something behind? Tests 5 and 7."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from .alignment import unique_asks
from .protocol import Answer, Ask, Engine, Suite, Usage, Vector, Verdict

__all__ = ["aborts", "distance", "kv_contamination", "strong_vector"]

N_PREFIXES = 4
N_SUFFIXES = 3
SLACK_DESCRIPTORS = 8
"""A leak of one descriptor or page per request is far more; thread pools open a few late."""
SLACK_BYTES = 1 << 20
SETTLE_S = 30.0


def strong_vector(hidden: int, seed: int = 0) -> Vector:
    """A vector that changes what a model says."""
    values = np.random.default_rng(seed).standard_normal((1, hidden)).astype(np.float32)
    return Vector(values, layers=(0,), scale=4.0)


def distance(a: Answer, b: Answer) -> float:
    """Largest difference of two answers' log-probabilities, as far as their tokens agree.

    At the first step whose sampled tokens differ, the log-probabilities still had the same
    past and are compared too; later ones had not.
    """
    if a.error or b.error or a.logprobs is None or b.logprobs is None:
        return float("inf")
    largest = 0.0
    if len(a.token_ids) != len(b.token_ids):
        return float("inf")
    for x, y, i, j in zip(a.logprobs, b.logprobs, a.token_ids, b.token_ids, strict=True):
        # A token that is not among the other's likeliest is less likely than all of those.
        gone = [x[k] - min(y.values()) for k in x.keys() - y.keys()]
        come = [y[k] - min(x.values()) for k in y.keys() - x.keys()]
        largest = max([largest, *(abs(x[k] - y[k]) for k in x.keys() & y.keys()), *gone, *come])
        if i != j:
            break
    return largest


def _prompts() -> list[Ask]:
    """Prompts of which several share a long prefix."""
    prefixes = unique_asks([160] * N_PREFIXES, max_tokens=1, capture=(), seed=5)
    suffixes = unique_asks([9] * (N_PREFIXES * N_SUFFIXES), max_tokens=1, capture=(), seed=6)
    return [
        Ask(prefixes[i % N_PREFIXES].prompt + suffix.prompt, max_tokens=4, logprobs=5)
        for i, suffix in enumerate(suffixes)
    ]


def kv_contamination(engine: Engine, suite: Suite) -> Verdict:
    """Test 5: plain requests after steered ones that share their prefix."""
    asks = _prompts()
    forgets = engine.reset_prefix_cache()

    def cold(tag: str) -> list[Answer]:
        """Every request without a cached prefix of another."""
        answers = []
        for i, ask in enumerate(asks):
            if forgets:
                engine.reset_prefix_cache()
            alone = ask if forgets else replace(ask, salt=f"{tag}-{i}")
            answers += engine.generate([alone])
        return answers

    fresh, again = cold("a"), cold("b")
    # The first of each prefix fills the cache, the others read it.
    if forgets:
        engine.reset_prefix_cache()
    warm_salt = None if forgets else "warm"
    warm = engine.generate([replace(a, salt=warm_salt) for a in asks], together=False)
    hits = sum(answer.cached_tokens or 0 for answer in warm)
    floor = max(
        distance(a, b) for other in (again, warm) for a, b in zip(fresh, other, strict=True)
    )
    name, limit = "5 KV contamination", "0 plain answers beyond the noise floor"
    if hits == 0:
        return Verdict(name, None, None, limit, "the engine never read its prefix cache")
    if forgets:
        engine.reset_prefix_cache()
    vector = strong_vector(suite.truth.hidden)
    steered = engine.generate([replace(a, vectors=(vector,)) for a in asks], together=False)
    after = engine.generate(asks, together=False)
    failed = [a.error for a in (*fresh, *again, *warm, *steered, *after) if a.error]
    if failed:
        return Verdict(name, False, None, limit, f"{len(failed)} requests failed: {failed[0]}")
    apart = [distance(a, b) for a, b in zip(fresh, after, strict=True)]
    effect = [distance(a, b) for a, b in zip(fresh, steered, strict=True)]
    # A clean engine stays within its own noise; a thousandth of a nat is below any effect.
    allowed = 2 * floor + 1e-3
    bad = sum(d > allowed for d in apart)
    data = {
        "noise_floor_nats": floor,
        "largest_difference_nats": max(apart),
        "smallest_effect_of_steering_nats": min(effect),
        "plain_requests": len(asks),
        "cached_tokens_of_plain_after_plain": hits,
        "cached_tokens_of_plain_after_steered": sum(a.cached_tokens or 0 for a in after),
    }
    if min(effect) <= allowed:
        return Verdict(name, False, bad, limit, "the steered requests were not steered", data)
    return Verdict(name, bad == 0, bad, limit, "", data)


def aborts(engine: Engine, suite: Suite) -> Verdict:
    """Test 7: clients that go away after the first token."""
    layers = tuple(range(suite.truth.layers))
    vector = strong_vector(suite.truth.hidden, seed=7)
    plain = unique_asks([60], max_tokens=8, capture=(), seed=70)[0]
    plain = replace(plain, capture=None, logprobs=5)
    asks = [
        replace(ask, vectors=(vector,) if i % 2 else ())
        for i, ask in enumerate(
            unique_asks([15 + i % 17 for i in range(64)], max_tokens=400, capture=layers, seed=7)
        )
    ]
    # Pools and buffers that are made on first use are there before the first reading.
    engine.generate([replace(a, max_tokens=4) for a in asks])
    engine.abort(asks[:50], concurrent=16)
    before_answer = engine.generate([plain])[0]
    _leftovers(engine)
    before = engine.usage()
    cut, n = 0, 0
    while n < suite.aborts:
        batch = asks[: min(len(asks), suite.aborts - n)]
        cut += engine.abort(batch, concurrent=16)
        n += len(batch)
    left = _leftovers(engine)
    grown = _growth(before, engine.usage())
    after = engine.generate([plain])[0]
    data = {"clients": n, "gone_before_the_end": cut, "left": left, **grown}
    problems = [f"{k}: {v} left" for k, v in left.items() if v]
    problems += [
        f"{name} grew by {grown[name]}"
        for name, slack in (("descriptors", SLACK_DESCRIPTORS), ("shared_bytes", SLACK_BYTES))
        if grown.get(name, 0) > slack
    ]
    if distance(before_answer, after) > 0.1:
        problems.append("a plain request answers otherwise than before")
    return Verdict(
        "7 abort",
        not problems and cut > 0,
        sum(left.values()),
        "0 slots and rows held; no growth of descriptors or shared memory",
        "; ".join(problems) or ("" if left else "the backend cannot be asked what it holds"),
        data,
    )


def _leftovers(engine: Engine) -> dict[str, int]:
    """What is held once it has had time to go."""
    deadline = time.monotonic() + SETTLE_S
    while any(engine.leftovers().values()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return dict(engine.leftovers())


def _growth(before: Usage | None, after: Usage | None) -> dict[str, int]:
    if before is None or after is None:
        return {}
    return {
        "descriptors": after.descriptors - before.descriptors,
        "shared_bytes": after.shared_bytes - before.shared_bytes,
    }
