"""Is a request that cannot be served an error, and never an answer? Test 6."""

from __future__ import annotations

import numpy as np

from .alignment import unique_asks
from .isolation import distance
from .protocol import Answer, Ask, Engine, Suite, Vector, Verdict

__all__ = ["hook_failure", "impossible_asks"]


def impossible_asks(hidden: int) -> dict[str, Ask]:
    """Requests that nobody can serve, by what is wrong with them."""
    prompt = unique_asks([20], max_tokens=1, capture=(), seed=60)[0].prompt
    ones = np.ones((1, hidden), np.float32)
    nan = ones.copy()
    nan[0, 3] = np.nan

    def steer(values: np.ndarray, layer: int = 1) -> Ask:
        return Ask(prompt, max_tokens=4, vectors=(Vector(values, layers=(layer,)),))

    return {
        "vector of another width": steer(np.ones((1, hidden + 1), np.float32)),
        "vector at layer 999": steer(ones, layer=999),
        "NaN in a vector": steer(nan),
        "capture of layer 999": Ask(prompt, max_tokens=4, capture=(999,)),
    }


def is_refused(answer: Answer) -> bool:
    """An exception, or an HTTP status of 4xx: a server's own error is no refusal."""
    return answer.error is not None and (answer.status is None or 400 <= answer.status < 500)


def hook_failure(engine: Engine, suite: Suite) -> Verdict:
    """Test 6: a wrong width, a layer that is not there, NaN; and the engine lives."""
    plain = Ask(unique_asks([30], max_tokens=1, capture=(), seed=61)[0].prompt, 6, logprobs=5)
    before = engine.generate([plain])[0]
    accepted, problems = [], []
    cases = impossible_asks(suite.truth.hidden)
    answers = {}
    for name, ask in cases.items():
        answers[name] = answer = engine.generate([ask])[0]
        if not is_refused(answer):
            accepted.append(name)
            how = f"HTTP {answer.status}" if answer.error else "answered as if served"
            problems.append(f"{name}: {how}")
    after = engine.generate([plain])[0]
    lives = distance(before, after) <= 0.1
    if not lives:
        problems.append(f"afterwards a plain request differs or fails: {after.error or ''}")
    return Verdict(
        "6 hook failure",
        not accepted and lives,
        f"{len(cases) - len(accepted)} of {len(cases)} refused",
        "all refused, and the next request served",
        "; ".join(problems),
        {name: (answer.error or "")[:300] for name, answer in answers.items()},
    )
