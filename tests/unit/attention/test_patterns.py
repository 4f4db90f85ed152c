"""Patterns against transformers' eager attention, a brute force, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens.attention import AttentionFacts, QueriesKeys, _pattern, attention_patterns
from inspect_lens.errors import ArtifactError, SpecError, UnsupportedError
from inspect_lens.spec import TensorData
from tests.kit.attention_twins import Twin, alibi_twin, eager_twin

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
N = 40

TWINS: dict[str, Callable[[], Twin]] = {
    "grouped heads": lambda: eager_twin("llama", N, **SIZES),
    "sliding window": lambda: eager_twin("mistral", N, **SIZES, sliding_window=8),
    "window and soft-cap": lambda: eager_twin(
        "gemma2", N, **SIZES, sliding_window=8, attn_logit_softcapping=3.0,
        query_pre_attn_scalar=32, layer_types=["sliding_attention", "full_attention"],
    ),
    "norms and a scale of one's own": lambda: eager_twin("qwen3", N, **SIZES),
    "sinks and a window": lambda: eager_twin(
        "gpt_oss", N, **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "ALiBi of BLOOM": lambda: alibi_twin("bloom", N, hidden_size=48, n_layer=2, n_head=6),
    "ALiBi of MPT": lambda: alibi_twin("mpt", N, d_model=48, n_layers=2, n_heads=6),
}  # fmt: skip


@pytest.mark.parametrize("what", TWINS)
def test_patterns_equal_transformers(what: str) -> None:
    twin = TWINS[what]()
    assert len(twin.q) == len(twin.patterns) == 2
    for q, k, meta, wanted in zip(*twin, strict=True):
        found = attention_patterns(q, k, meta)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
        some = attention_patterns(q, k, meta, heads=[3, 0], queries=[-1, 2])
        np.testing.assert_allclose(some, wanted[[3, 0]][:, [-1, 2]], rtol=0, atol=1e-4)
    features = {name for meta in twin.metas for name, value in meta.items() if value}
    kinds = {
        "soft-cap": "logits_soft_cap", "sinks": "sinks", "ALiBi": "alibi_slopes",
    }  # fmt: skip
    assert all(name in features for word, name in kinds.items() if word in what)
    if "window" in what:
        assert any(meta["sliding_window"] == [7, 0] for meta in twin.metas)
        assert any((p[:, -1, : N - 8] == 0).all() for p in twin.patterns)
    if "sinks" in what:
        assert max(p.sum(-1).max() for p in twin.patterns) < 1


def brute_force(q: Any, k: Any, facts: AttentionFacts) -> np.ndarray[Any, Any]:
    """One number after another, in float64."""
    n = len(k)
    found = np.zeros((facts.num_heads, n, n))
    for head in range(facts.num_heads):
        for i in range(n):
            logits = {}
            for j in range(i + 1):
                if facts.window[0] >= 0 and i - j > facts.window[0]:
                    continue
                if facts.chunk and i // facts.chunk != j // facts.chunk:
                    continue
                at = head * facts.num_kv_heads // facts.num_heads
                x = float(np.dot(q[i, head].astype(float), k[j, at].astype(float))) * facts.scale
                if facts.soft_cap:
                    x = facts.soft_cap * np.tanh(x / facts.soft_cap)
                if facts.alibi_slopes is not None:
                    x -= facts.alibi_slopes[head] * ((i - j) ** (0.5 if facts.alibi_sqrt else 1))
                logits[j] = x
            total = sum(np.exp(x) for x in logits.values())
            total += np.exp(facts.sinks[head]) if facts.sinks is not None else 0
            for j, x in logits.items():
                found[head, i, j] = np.exp(x) / total
    return found


numbers = st.floats(-2, 2, width=32)


@settings(max_examples=40)
@given(
    n=st.integers(1, 12), groups=st.sampled_from([1, 2, 4]), cap=st.sampled_from([0.0, 1.5]),
    window=st.sampled_from([-1, 0, 3]), chunk=st.sampled_from([0, 4]), root=st.booleans(),
    slopes=st.none() | st.lists(numbers, min_size=4, max_size=4),
    sinks=st.none() | st.lists(numbers, min_size=4, max_size=4),
    block=st.sampled_from([1, 500, 1 << 20]), seed=st.integers(0, 99),
)  # fmt: skip
def test_patterns_equal_a_brute_force(
    n: int, groups: int, cap: float, window: int, chunk: int, root: bool, slopes: Any, sinks: Any,
    block: int, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n, 4, 8), dtype=np.float32)
    k = rng.standard_normal((n, 4 // groups, 8), dtype=np.float32)
    meta = {
        "scale": 0.4, "num_heads": 4, "num_kv_heads": 4 // groups, "head_size": 8,
        "logits_soft_cap": cap, "sliding_window": [window, 0 if window >= 0 else -1],
        "attention_chunk_size": chunk or None, "alibi_slopes": slopes, "use_alibi_sqrt": root,
        "sinks": sinks,
    }  # fmt: skip
    wanted = brute_force(q, k, AttentionFacts.of(meta))
    call = QueriesKeys.of(
        {"attn_q": q[None], "attn_k": k[None], "qk_layers": [5], "qk_meta": [meta]}
    )
    with mock.patch.object(_pattern, "_BLOCK_BYTES", block):
        found = attention_patterns(q, k, meta)
        means = call.mean_attention(call.all_heads())
        sums = call.attention_to([(5, 2)], [(0, n), (n - 1, n)], queries=[-1])[0, 0]
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    np.testing.assert_allclose(means, wanted.mean(axis=1), atol=2e-6)
    np.testing.assert_allclose(sums, [wanted[2, -1].sum(), wanted[2, -1, -1]], atol=2e-6)


def test_sums_of_a_pattern_larger_than_memory_are_read_in_blocks() -> None:
    n, meta = 6_000, {"scale": 0.2, "num_heads": 1, "num_kv_heads": 1, "head_size": 16}
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 1, 16), dtype=np.float32) for _ in range(2))
    call = QueriesKeys.of({"attn_q": q, "attn_k": k, "qk_layers": [0], "qk_meta": [meta]})
    with mock.patch.object(_pattern, "_BLOCK_BYTES", 4 << 20):
        tracemalloc.start()
        total = float(call.mean_attention([(0, 0)]).sum(dtype=np.float64)) * n
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert total == pytest.approx(n, rel=1e-5)
    assert peak < 8 << 20 < n * n * 4


def layers(n: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    meta = {"scale": 0.35, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}
    return {
        "attn_q": rng.standard_normal((2, n, 4, 8), dtype=np.float32),
        "attn_k": rng.standard_normal((2, n, 2, 8), dtype=np.float32),
        "qk_layers": [3, 7],
        "qk_meta": [meta, meta | {"scale": 0.7}],
    }


def test_heads_of_several_layers_keep_their_order() -> None:
    captured = layers()
    found = QueriesKeys.of(captured)
    assert found.n_tokens == 6
    assert found.all_heads() == tuple((i, j) for i in (3, 7) for j in range(4))
    asked = [(7, 1), (3, 2), (7, 0), (3, 2)]
    sums = found.attention_to(asked, [(0, 2)], queries=[-1])
    means = found.mean_attention(asked)
    for row, mean, (layer, head) in zip(sums, means, asked, strict=True):
        pattern = found.patterns(layer, heads=np.array([head]))[0]
        both = found.patterns(layer, heads=np.array([head, 3]))
        np.testing.assert_array_equal(both[0], pattern)
        assert row[0, 0] == pytest.approx(pattern[-1, :2].sum(), abs=1e-6)
        np.testing.assert_allclose(mean, pattern.mean(axis=0), atol=1e-6)


def test_chosen_heads_have_the_numbers_of_all_of_them() -> None:
    whole = layers()
    heads, key_heads = [[3, 1], [7, 0], [7, 3]], [[3, 0], [7, 0], [7, 1]]
    chosen = {
        **{name: whole[name] for name in ("qk_layers", "qk_meta")},
        "attn_q": np.stack([whole["attn_q"][(3, 7).index(n), :, head] for n, head in heads]),
        "attn_k": np.stack([whole["attn_k"][(3, 7).index(n), :, head] for n, head in key_heads]),
        "qk_heads": heads,
        "qk_key_heads": key_heads,
    }
    found, wanted = QueriesKeys.of(chosen), QueriesKeys.of(whole)
    assert found.all_heads() == ((3, 1), (7, 0), (7, 3))
    asked = [(7, 3), (3, 1)]
    for one in ("attention_to", "mean_attention"):
        spans = ([(0, 2), (1, 6)],) if one == "attention_to" else ()
        np.testing.assert_array_equal(
            getattr(found, one)(asked, *spans), getattr(wanted, one)(asked, *spans)
        )
    np.testing.assert_array_equal(found.patterns(7), wanted.patterns(7, heads=[0, 3]))
    for use in (lambda: found.patterns(7, heads=[1]), lambda: found.mean_attention([(3, 0)])):
        with pytest.raises(SpecError, match="capture them too"):
            use()
    with pytest.raises(SpecError, match="key head of each"):
        QueriesKeys.of(chosen | {"qk_key_heads": [[3, 0], [7, 0], [7, 0]]})


def test_halves_of_bfloat16_are_widened_exactly() -> None:
    captured = layers()
    wide = captured["attn_q"].view(np.uint32) & 0xFFFF0000
    half = TensorData((wide >> 16).astype(np.uint16), "bfloat16")
    one = QueriesKeys.of(captured | {"attn_q": half})
    other = QueriesKeys.of(captured | {"attn_q": wide.view(np.float32)})
    assert (one.patterns(3) == other.patterns(3)).all()


META = {"scale": 0.35, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_lora_rank": 512}, UnsupportedError, r"multi-head latent attention \(MLA\)"),
        ({"num_kv_heads": 3}, SpecError, "multiple of key heads"),
        ({"sinks": [0.0]}, SpecError, "1 sinks for 4 query heads"),
        ({"alibi_slopes": [1.0, float("nan"), 1.0, 1.0]}, SpecError, "NaN"),
        ({"logits_soft_cap": -1.0}, SpecError, "below 0"),
        ({"sliding_window": 7}, SpecError, "output_qk returns"),
    ],
)
def test_facts_that_make_no_pattern_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AttentionFacts.of(META | change)


def test_what_does_not_fit_is_refused() -> None:
    found = QueriesKeys.of(captured := layers())
    q, k = captured["attn_q"][0], captured["attn_k"][0]
    for ask, message in (
        (lambda: attention_patterns(q[:3], k, META), "of one layer"),
        (lambda: attention_patterns(q, k, META, heads=[4]), r"heads: \[4\]; allowed are 0 to 3"),
        (
            lambda: attention_patterns(q, k, META, queries=[6]),
            r"queries: \[6\]; allowed are -6 to 5",
        ),
        (lambda: found.attention_to([(3, 0)], [(2, 2)]), r"span=\(2, 2\)"),
        (lambda: found.attention_to([(3, 0)], [(0, 7)]), "there are 6 tokens"),
        (lambda: found.mean_attention([(3, 0)], queries=[]), "a mean needs one"),
        (lambda: found.mean_attention([(3, -1)]), r"heads: \[-1\]; allowed are 0 to 3"),
        (lambda: found.patterns(4), r"layers \[3, 7\]"),
        (lambda: found.attention_to([], [(0, 1)]), "heads: none"),
        (lambda: found.mean_attention([7]), r"heads=\[7\]; allowed are pairs of whole numbers"),
        (lambda: found.mean_attention([(3, 0, 1)]), "heads=.*; allowed are pairs"),
        (lambda: found.attention_to([(3, 0)], (0, 1)), r"spans=\(0, 1\); allowed are pairs"),
        (lambda: found.attention_to([(3, 0)], [(0.5, 1)]), "spans=.*; allowed are pairs"),
        (lambda: AttentionFacts.of({"scale": 1.0}), "no num_heads, num_kv_heads, head_size"),
        (lambda: QueriesKeys.of(captured | {"qk_layers": [1]}), "with 1 layers"),
    ):
        with pytest.raises(SpecError, match=message):
            ask()
    np.testing.assert_array_equal(
        found.mean_attention(np.array([[3, 0], [7, 1]])), found.mean_attention([(3, 0), (7, 1)])
    )
    with pytest.raises(ArtifactError, match="output_qk"):
        QueriesKeys.of({"residual_stream": q})
