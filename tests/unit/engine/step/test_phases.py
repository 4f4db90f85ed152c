"""Steering by phase: a token's position decides, whatever step computes it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens.spec import EditsUse
from tests.kit.steps import HIDDEN, Worker, begin, rows, sealed

N_PROMPT, N_FED = 6, 10
KEYS = itertools.count()
VALUES = np.random.default_rng(3).normal(size=(4, HIDDEN)).astype(np.float32)


def vector(i: int, **fields: Any) -> SteeringVector:
    return SteeringVector(**{"activations": VALUES[i : i + 1], "layer_indices": [0]} | fields)


def steered(vectors: list[SteeringVector]) -> tuple[np.ndarray[Any, Any], int]:
    """Rows of layer 0, and how many tokens are steered, in the plainest way."""
    out = rows(1, 0, 0, N_FED).numpy().copy()
    touched = set()
    for v in vectors:
        for p in range(N_FED):
            is_phase = v.phase == "both" or (p < N_PROMPT) == (v.phase == "prefill")
            if is_phase and (v.positions == "all" or p in v.positions):
                out[p] += v.scale * v.vector.to_float32()[0]
                touched.add(p)
    return out, len(touched)


VECTORS = st.lists(
    st.builds(
        vector,
        st.integers(0, 3),
        phase=st.sampled_from(["prefill", "decode", "both"]),
        position_indices=st.sampled_from([None, None, (0, 4, 7)]),
        scale=st.sampled_from([1.0, -2.0]),
    ),
    min_size=1,
    max_size=3,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    VECTORS,
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
@example([vector(0, phase="decode")], [1], False, False)
@example([vector(0, phase="prefill"), vector(1)], [1], False, False)
def test_any_steps_steer_the_tokens_of_the_phase(
    worker: Worker,
    collector: Collector,
    vectors: list[SteeringVector],
    cuts: list[int],
    again: bool,
    is_crowded: bool,
) -> None:
    request = LensRequest(capture=CaptureSpec(layers=(0,)), edits=tuple(vectors))
    key = f"p{next(KEYS)}"
    begin(worker, collector, key, sealed(collector, request, N_PROMPT, N_FED - N_PROMPT + 1))
    expected, n_steered = steered(vectors)
    for _ in range(1 + again):
        fed = 0
        while fed < N_FED:
            # The second time all is known, so a chunk may hold prompt and sampled tokens.
            n = min(cuts[fed % len(cuts)], N_FED - fed)
            # Alone and token by token its steps repeat each other's plan.
            worker.step([("x", 2, 0, 1)] * is_crowded + [(key, 1, fed, n)])
            fed += n
    counts = {ROWS: N_FED, SCORES: 0}
    got = collector.take(key, counts=counts, n_fed=N_FED, timeout_s=10)
    np.testing.assert_allclose(got.tensors[ROWS].storage[0], expected, rtol=1e-5, atol=1e-5)
    assert got.n_steered == n_steered
    worker.stepper.remove(key)
    assert worker.stepper.rows_in_use == 0


def test_a_long_phase_costs_one_configuration(worker: Worker, collector: Collector) -> None:
    request = LensRequest(edits=(vector(0, phase="decode"),))
    begin(worker, collector, "long", sealed(collector, request, 100_000, 900_000))
    assert worker.stepper.rows_in_use == 1
    worker.step([("long", 1, 99_999, 3)])
    worker.stepper.remove("long")
    collector.discard("long")


def test_the_cache_key_has_the_phase_and_where_it_ends(collector: Collector) -> None:
    def key(n_prompt: int = 6, max_tokens: int = 4, **fields: Any) -> str | None:
        request = LensRequest(edits=(vector(0, **fields),))
        return sealed(collector, request, n_prompt, max_tokens).steer_hash

    assert len({key(), key(phase="prefill"), key(phase="decode")}) == 3
    # What another prompt's decoding left is no prompt steered, whatever the tokens are.
    assert key(phase="prefill") != key(7, phase="prefill")
    assert key(phase="decode") != key(7, phase="decode")
    assert key(phase="decode", max_tokens=9) == key(phase="decode")
    assert key() == key(7, 9)


def test_a_registered_vector_can_be_used_in_one_phase() -> None:
    (used,) = EditsUse(name="v", phase="decode").apply([vector(0)])
    assert used.phase == "decode"
    assert EditsUse(name="v").apply([used])[0] is used
    assert used.model_dump()["phase"] == used.reference()["phase"] == "decode"
