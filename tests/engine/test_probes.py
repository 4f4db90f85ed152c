"""Probes inside the engine: scores equal the formula on captured rows; alarms end generations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inspect_lens import SteeringVector
from inspect_lens.engine import register, unregister
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.probe import pool_scores
from inspect_lens.spec import Ablate, Add, EngineEdits, EngineProbe

from .conftest import HIDDEN, LAYERS, Engine, tokens

pytestmark = pytest.mark.engine

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(2, HIDDEN)).astype(np.float32) / 10
LINEAR = EngineProbe(layers=(1, 3), tensors={"weight": WEIGHT, "bias": np.float32(0.5)})
MLP = EngineProbe(
    kind="mlp",
    layers=(2,),
    tensors={
        "w1": RNG.normal(size=(1, 6, HIDDEN)).astype(np.float32) / 10,
        "w2": RNG.normal(size=6).astype(np.float32),
    },
)
HEADS = EngineProbe(
    kind="attention",
    layers=(0,),
    tensors={n: RNG.normal(size=(2, HIDDEN)).astype(np.float32) / 10 for n in ("query", "value")},
)


@pytest.fixture(scope="module", autouse=True)
def _registered(engine: Engine) -> Iterator[None]:
    for name, probe in {"linear": LINEAR, "mlp": MLP, "heads": HEADS}.items():
        register(engine.llm, name, probe)
    yield
    for name in ("linear", "mlp", "heads"):
        unregister(engine.llm, name)


def expected(rows: Any) -> dict[str, Any]:
    """Token scores by the formulas, from captured rows of all layers."""
    x = rows.double().numpy()
    linear = x[1] @ WEIGHT[0].astype(float) + x[3] @ WEIGHT[1].astype(float) + 0.5
    w1, w2 = (MLP.tensors[n].to_float32().astype(float) for n in ("w1", "w2"))
    mlp = np.maximum(x[2] @ w1[0].T, 0) @ w2
    return {"linear": linear, "mlp": mlp}


def ask(*uses: Any, **more: Any) -> dict[str, Any]:
    return {"inspect_lens": {"probes": list(uses), **more}}


def test_scores_equal_the_formula_on_the_rows_of_the_same_request(engine: Engine) -> None:
    uses = [
        {"name": name, "positions": "all", "tokens": True} for name in ("linear", "mlp", "heads")
    ]
    prompts = [tokens(n, seed=n) for n in (3, 70, 150)]
    for output in engine.run(prompts, ask(*uses, capture={"layers": "all"}), max_tokens=9):
        rows = output.activations["residual_stream"]
        truth = expected(rows)
        found = {p.name: p for p in output.inspect_lens.probes}
        for name, scores in truth.items():
            np.testing.assert_allclose(found[name].tokens, scores, rtol=1e-3, atol=1e-3)
            assert found[name].score == pytest.approx(pool_scores(scores, "mean"), abs=1e-3)
            assert found[name].n_tokens == rows.shape[1]
        logits, values = (
            rows[0].double().numpy() @ HEADS.tensors[n].to_float32().astype(float).T
            for n in ("query", "value")
        )
        weight = np.exp(logits - logits.max(axis=0))
        score = ((weight * values).sum(axis=0) / weight.sum(axis=0)).sum()
        assert found["heads"].score == pytest.approx(score, rel=1e-3, abs=1e-3)
        assert found["heads"].aggregate == "attention"


def test_a_request_without_capture_gets_scores_and_no_rows(engine: Engine) -> None:
    prompt = tokens(40)
    with_rows = engine.run([prompt], ask("linear", capture={"layers": "all"}), max_tokens=6)[0]
    alone = engine.run([prompt], ask("linear"), max_tokens=6)[0]
    assert not hasattr(alone, "activations")
    (receipt,) = alone.inspect_lens.probes
    # Completion is what a probe reads unless told otherwise.
    scores = expected(with_rows.activations["residual_stream"])["linear"][40:]
    assert (receipt.n_tokens, receipt.first_position, receipt.tokens) == (5, 40, None)
    assert receipt.score == pytest.approx(scores.mean(), abs=1e-3)
    assert receipt.sha256 == LINEAR.sha256


def test_an_alarm_ends_the_generation_and_neighbours_go_on(engine: Engine) -> None:
    prompts = [tokens(20 + i, seed=i) for i in range(4)]
    use = {"name": "linear", "aggregate": "last", "tokens": True}
    free = engine.run(prompts, ask(use), max_tokens=40)
    scores = [o.inspect_lens.probes[0].tokens for o in free]
    threshold = sorted(scores[0])[-3]
    # Probes read the completion, which begins behind the 20 tokens of the prompt.
    first = 20 + next(i for i, s in enumerate(scores[0]) if s > threshold)
    stop = {**use, "alarm": "stop", "threshold": float(threshold)}
    outputs = engine.run(prompts, [ask(stop), ask(use), None, ask(use)], max_tokens=40)
    stopped = outputs[0]
    receipt = stopped.inspect_lens.probes[0]
    assert (receipt.stopped, receipt.alarm_position) == (True, first)
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == "inspect_lens:alarm:linear"
    assert len(stopped.outputs[0].token_ids) < 40
    assert all(len(o.outputs[0].token_ids) == 40 for o in outputs[1:])
    assert list(outputs[1].inspect_lens.probes[0].tokens) == pytest.approx(scores[1], abs=1e-3)


def test_a_named_vector_steers_as_its_content_does(engine: Engine) -> None:
    v = SteeringVector(activations=RNG.normal(size=(1, HIDDEN)), layer_indices=[1], scale=2.0)
    register(engine.llm, "v", v)
    prompt = tokens(30)
    by_name = {"inspect_lens": {"edits_named": [{"name": "v"}]}}
    doubled = {"inspect_lens": {"edits_named": [{"name": "v", "scale": 4.0}]}}
    twice = SteeringVector(activations=v.vector, layer_indices=[1], scale=4.0)
    found = engine.run([prompt, prompt], [by_name, doubled], max_tokens=12)
    content = engine.run(
        [prompt, prompt], [{"apply_steering_vectors": [s]} for s in (v, twice)], max_tokens=12
    )
    for named, plain in zip(found, content, strict=True):
        assert named.outputs[0].token_ids == plain.outputs[0].token_ids
        assert named.inspect_lens.steer == plain.inspect_lens.steer.model_copy(
            update={"cached_tokens": named.inspect_lens.steer.cached_tokens}
        )
    unregister(engine.llm, "v")
    with pytest.raises(SpecError, match="no edits are registered as 'v'"):
        engine.run([prompt], by_name)


def test_named_edits_do_what_their_content_does(engine: Engine) -> None:
    first, second = RNG.normal(size=(2, HIDDEN))
    ablate = Ablate(direction=first, layers=[0, 1])
    own = Add(vector=second, layers=[1], scale=6.0)
    register(engine.llm, "edits", EngineEdits(edits=[ablate]))
    prompt = tokens(30)
    asked = [
        {"inspect_lens": {"edits_named": ["edits"]}},
        {"inspect_lens": {"edits_named": "edits", "edits": [own]}},
        {"inspect_lens": {"edits": [ablate]}},
        {"inspect_lens": {"edits": [ablate, own]}},
        {"inspect_lens": {"edits": [own, ablate]}},
    ]
    found = engine.run([prompt] * len(asked), asked, max_tokens=12, logprobs=5)
    by_name, with_own, content, together, other_order = (
        [dict(step) for step in output.outputs[0].logprobs] for output in found
    )
    assert by_name == content
    # What is named acts first.
    assert with_own == together != other_order
    for named, plain in ((0, 2), (1, 3)):
        steers = [found[i].inspect_lens.steer for i in (named, plain)]
        assert steers[0].vectors == steers[1].vectors
    unregister(engine.llm, "edits")
    with pytest.raises(SpecError, match="no edits are registered as 'edits'"):
        engine.run([prompt], asked[0])


def test_many_configurations_run_in_one_batch(engine: Engine) -> None:
    vectors = [
        SteeringVector(
            activations=np.random.default_rng(i).normal(size=(1, HIDDEN)),
            layer_indices=[i % LAYERS],
            scale=3.0,
        )
        for i in range(64)
    ]
    prompts = [tokens(10 + i % 5, seed=i) for i in range(64)]
    requests = [{"apply_steering_vectors": [v]} for v in vectors]
    together = engine.run(prompts, requests, max_tokens=6)
    for i in (0, 17, 63):
        alone = engine.run([prompts[i]], requests[i], max_tokens=6)[0]
        assert together[i].outputs[0].token_ids == alone.outputs[0].token_ids
        assert together[i].inspect_lens.steer.n_tokens == len(prompts[i]) + 5


def test_a_probe_without_a_tap_is_refused_when_it_is_used_at_the_latest(engine: Engine) -> None:
    # Another engine of this process may have the tap; this one has not.
    probe = EngineProbe(layers=(1,), site="mlp_out", tensors={"weight": np.ones((1, HIDDEN))})

    def use() -> None:
        register(engine.llm, "untapped", probe)
        try:
            engine.run([tokens(8)], ask("untapped"))
        finally:
            unregister(engine.llm, "untapped")

    with pytest.raises(UnsupportedError, match="mlp_out"):
        use()
    assert engine.stats()["requests"] == 0


def test_prompt_tokens_are_read_although_the_cache_has_them(engine: Engine) -> None:
    prompt = tokens(150, seed=21)
    uses = {"name": "linear", "positions": "all", "tokens": True}
    first, again = (engine.run([prompt], ask(uses), max_tokens=4)[0] for _ in range(2))
    assert again.inspect_lens.probes[0].n_tokens == 153
    np.testing.assert_allclose(
        again.inspect_lens.probes[0].tokens, first.inspect_lens.probes[0].tokens, atol=1e-3
    )
    # A probe of the completion alone leaves the cache in use.
    assert (engine.run([prompt], ask("linear"), max_tokens=4)[0].num_cached_tokens or 0) > 0
