"""Two workers on a CPU, tensor- and pipeline-parallel: rows of all stages, and faults of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import Hook, SteeringVector
from inspect_lens.attention import QueriesKeys
from inspect_lens.engine import PersistentHooks, register, unregister
from inspect_lens.errors import HookError, SpecError
from inspect_lens.spec import BLOCK_SITES, EngineProbe
from tests.engine.conftest import HIDDEN, LAYERS, Engine, start, tokens
from tests.engine.test_capture import TOLERANCE, fed
from tests.engine.test_logit_lens import CHOSEN, random_lens
from tests.engine.test_logit_lens import ask as ask_lens
from tests.engine.test_logit_lens import check as check_lens
from tests.engine.test_probes import HEADS, LINEAR, expected
from tests.engine.test_reductions import check as check_reduced
from tests.engine.test_reductions import request
from tests.engine.test_sites import INNER, SERVED, capture, check, check_edits
from tests.kit.inner_edits import head_cases
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

ALL = {"output_residual_stream": True}


TENSOR = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module", params=[TENSOR, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def two(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_SITES", ",".join(SERVED))
        environment.setenv("INSPECT_LENS_ALLOW_CODE", "1")
        # One core for each; the default wants a memory node for each.
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        made = start(tiny_folder, enforce_eager=True, **request.param)
    yield made
    made.close()


def test_rows_of_every_site_equal_hugging_face(two: Engine, hugging_face: HuggingFace) -> None:
    for output in two.run([tokens(n, seed=n) for n in (1, 50, 150)], capture(*BLOCK_SITES)):
        check(output, hugging_face.sites(fed(output)))
        n_fed = len(fed(output))
        assert output.inspect_lens.capture.rows == (3 * LAYERS + 1) * n_fed


def test_shares_of_ranks_are_put_together(two: Engine, hugging_face: HuggingFace) -> None:
    # With two ranks both have the one key head: it is taken once.
    sites = capture(*INNER, "attn_out", capture={"layers": [0, 3]})
    norms = capture("z", "mlp_hidden", capture={"reduce": "norm"})
    prompts = [tokens(n, seed=n) for n in (1, 150, 60)]
    outputs = two.run(prompts, [sites, sites, norms])
    for output in outputs[:2]:
        expected = hugging_face.inner_sites(fed(output)) | hugging_face.sites(fed(output))
        check(output, expected, [0, 3])
    expected = hugging_face.inner_sites(fed(outputs[2]))
    check(outputs[2], {site: rows.norm(dim=-1, keepdim=True) for site, rows in expected.items()})


def test_a_lens_reads_rows_of_all_workers(two: Engine, hugging_face: HuggingFace) -> None:
    # With tensor parallelism the vocabulary is joined; on a pipeline rows go to the last stage.
    mixed = [
        ask_lens(layers="all", tokens=CHOSEN),
        None,
        ask_lens({"layers": [1]}, layers=[0, 3], tokens=CHOSEN, positions="completion"),
        {"output_residual_stream": [2]},
        ask_lens(name="j", tokens=CHOSEN),
    ]
    prompts = [tokens(n, seed=n) for n in (3, 40, 90, 20, 30)]
    lens = random_lens("jacobian", 5)
    register(two.llm, "j", lens.for_engine())
    outputs = two.run(prompts, mixed, max_tokens=9)
    unregister(two.llm, "j")
    check_lens(outputs[4], hugging_face, lens=lens)
    for i in (0, 2):
        check_lens(outputs[i], hugging_face)
    rows = outputs[3].activations["residual_stream"]
    truth = hugging_face.residual_stream(fed(outputs[3]))[[2]]
    assert max_relative_error(rows, truth) <= TOLERANCE
    assert set(two.stats().values()) == {0}


@pytest.mark.parametrize("form", [{"reduce": "mean"}, {"reduce": "norm", "layers": [0, 3]}])
def test_reductions_of_both_stages(
    two: Engine, hugging_face: HuggingFace, form: dict[str, Any]
) -> None:
    for output in two.run([tokens(n, seed=n) for n in (5, 150)], request(**form)):
        check_reduced(output, hugging_face, form)


@pytest.mark.parametrize("layers", [[0], [LAYERS - 1], [1, 2]])
def test_steering_on_one_stage_or_both(
    two: Engine, hugging_face: HuggingFace, layers: list[int]
) -> None:
    v = torch.randn(len(layers), HIDDEN, generator=torch.Generator().manual_seed(3))
    vector = SteeringVector(activations=v, layer_indices=layers, scale=3.0)
    prompts = [tokens(60 + i, seed=i) for i in range(3)]
    request: dict[str, Any] = {"apply_steering_vectors": [vector], **ALL}
    outputs = two.run(prompts, [request, ALL, request], max_tokens=9)
    for i, output in enumerate(outputs):
        edits = {
            layer: (lambda h, row=row: h + 3.0 * row) for layer, row in zip(layers, v, strict=True)
        }
        expected = hugging_face.residual_stream(fed(output), edits if i != 1 else None)
        assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE
        if i != 1:
            assert output.inspect_lens.steer.layers == tuple(layers)
            assert output.inspect_lens.steer.n_tokens == len(fed(output))


def test_edits_of_heads_of_either_rank_equal_hugging_face(
    two: Engine, hugging_face: HuggingFace
) -> None:
    check_edits(two, hugging_face, head_cases(hugging_face.model), tokens(100, seed=8))


def test_steering_without_capture_is_confirmed(two: Engine) -> None:
    vector = SteeringVector(activations=torch.ones(2, HIDDEN), layer_indices=[0, LAYERS - 1])
    output = two.run([tokens(40)], {"apply_steering_vectors": [vector]}, max_tokens=5)[0]
    assert output.inspect_lens.steer.n_tokens == 44


def test_probes_read_layers_of_both_stages(two: Engine) -> None:
    probes = {"linear": LINEAR, "heads": HEADS}
    for name, probe in probes.items():
        register(two.llm, name, probe)
    uses = [{"name": name, "positions": "all", "tokens": True} for name in probes]
    # Those of the usual kind go another way: a mean, and nothing of the tokens.
    uses_mean = [{"name": "linear", "positions": "all"}]
    prompts = [tokens(n, seed=n) for n in (1, 60, 150)]
    try:
        for kind, output in zip(
            (uses, uses_mean, uses),
            two.run(
                prompts,
                [{"inspect_lens": {"probes": u, "capture": {}}} for u in (uses, uses_mean, uses)],
                max_tokens=5,
            ),
            strict=True,
        ):
            truth = expected(output.activations["residual_stream"])["linear"]
            linear = output.inspect_lens.probes[0]
            np.testing.assert_allclose(linear.score, truth.mean(), rtol=1e-4, atol=1e-5)
            assert linear.n_tokens == len(fed(output))
            if kind is uses:
                np.testing.assert_allclose(linear.tokens, truth, rtol=1e-4, atol=1e-4)
                assert len(output.inspect_lens.probes[1].tokens) == len(truth)
    finally:
        for name in probes:
            unregister(two.llm, name)


MLP = EngineProbe(
    kind="mlp",
    layers=(0, 1, LAYERS - 1),
    tensors={
        "w1": np.random.default_rng(2).normal(size=(3, 6, HIDDEN)).astype(np.float32) / 10,
        "w2": np.random.default_rng(3).normal(size=6).astype(np.float32),
    },
)


def test_an_mlp_reads_layers_of_both_stages(two: Engine) -> None:
    w1, w2 = (MLP.tensors[name].to_float32().astype(float) for name in ("w1", "w2"))
    uses = [
        {"name": "mlp", "positions": "all", "tokens": True},
        {"name": "linear", "positions": "all", "tokens": True},
    ]
    mean = [{"name": "mlp", "positions": "completion"}]
    rows = {"capture": {"layers": "all"}}
    asked: list[Any] = [
        {"inspect_lens": {"probes": uses, **rows}},
        {"inspect_lens": {"probes": mean, **rows}},
        ALL,
        # A window of its own beside that of the probe.
        {"inspect_lens": {"probes": uses, "lens": {"layers": [1, 2], "positions": [3, 9]}, **rows}},
        None,
    ]
    # Prompts in several chunks, and then out of the prefix cache.
    prompts = [tokens(n, seed=n) for n in (1, 150, 30, 90, 40)]
    for name, probe in {"mlp": MLP, "linear": LINEAR}.items():
        register(two.llm, name, probe)
    try:
        for outputs in [two.run(prompts, asked, max_tokens=9) for _ in range(2)]:
            for i in (0, 1, 3):
                x = outputs[i].activations["residual_stream"].double().numpy()
                units = sum(x[layer] @ w.T for layer, w in zip(MLP.layers, w1, strict=True))
                scores = np.maximum(units, 0) @ w2
                found = outputs[i].inspect_lens.probes
                if i == 1:
                    assert found[0].score == pytest.approx(scores[150:].mean(), abs=1e-3)
                    continue
                np.testing.assert_allclose(found[0].tokens, scores, rtol=1e-3, atol=1e-3)
                linear = expected(outputs[i].activations["residual_stream"])["linear"]
                np.testing.assert_allclose(found[1].tokens, linear, rtol=1e-3, atol=1e-3)
    finally:
        for name in ("mlp", "linear"):
            unregister(two.llm, name)


def test_lenses_of_many_requests_at_once(two: Engine, hugging_face: HuggingFace) -> None:
    """More sequences than run together, of any length, so that some begin while others run."""
    forms: list[Any] = [
        ask_lens(layers=[0], tokens=CHOSEN),
        ask_lens(layers="all", tokens=CHOSEN, positions=[0, 2, 5]),
        ask_lens({"layers": [LAYERS - 1]}, layers=[LAYERS - 1, 1], tokens=CHOSEN),
        ask_lens(layers=[0, 2], tokens=CHOSEN, positions="completion"),
        None,
        {**ALL, "apply_steering_vectors": [
            SteeringVector(activations=torch.ones(1, HIDDEN), layer_indices=[0], scale=2.0)
        ]},
    ]  # fmt: skip
    prompts = [tokens(6 + 7 * (i % 9), seed=100 + i) for i in range(24)]
    asked = [forms[i % len(forms)] for i in range(24)]
    outputs = two.run(prompts, asked, max_tokens=6)
    for i, output in enumerate(outputs):
        if i % len(forms) < 4:
            check_lens(output, hugging_face)


def test_each_tap_is_sent_by_one_worker(two: Engine) -> None:
    sent = [tap for taps in two.llm.collective_rpc("inspect_lens_taps") for tap in taps]
    assert len(sent) == len(set(sent)) == (3 + len(INNER)) * LAYERS + 1


def test_hooks_run_on_the_worker_that_has_the_layer(two: Engine, hugging_face: HuggingFace) -> None:
    v = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))

    def add(ctx: Any, h: Any) -> Any:
        ctx.saved.setdefault("layers", []).append(ctx.layer_idx)
        ctx.saved[f"norm {ctx.layer_idx}"] = h.norm()
        return h + 3.0 * v.to(h)

    hook = Hook(fn=add, layer_indices=[1, LAYERS - 1])
    output = two.run([tokens(50)], {"apply_hooks": [hook], **ALL}, max_tokens=4)[0]
    edits = {layer: (lambda h: h + 3.0 * v) for layer in (1, LAYERS - 1)}
    expected = hugging_face.residual_stream(fed(output), edits)
    assert max_relative_error(output.activations["residual_stream"], expected) <= TOLERANCE
    saved = output.hook_results["0"]
    assert set(saved) == {"layers", "norm 1", f"norm {LAYERS - 1}"}
    assert sorted(set(saved["layers"])) == [1, LAYERS - 1]

    def bad(ctx: Any, h: Any) -> Any:
        raise ValueError("not here")

    with pytest.raises(HookError, match="not here"):
        two.run([tokens(20)], {"apply_hooks": [Hook(fn=bad, layer_indices=[LAYERS - 1])]})


def test_parameters_are_whole_on_every_worker(two: Engine, hugging_face: HuggingFace) -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    expected = hugging_face.model.state_dict()

    def look(ctx: Any, h: Any) -> None:
        for name in names:
            ctx.saved[f"{name} at {ctx.layer_idx}"] = ctx.get_parameter(name)

    # Layers of both stages want what only one of them has.
    PersistentHooks(two.llm).prefetch_params(names)
    hook = Hook(fn=look, layer_indices=[0, LAYERS - 1])
    saved = two.run([tokens(5)], {"apply_hooks": [hook]}, max_tokens=1)[0].hook_results["0"]
    PersistentHooks(two.llm).clear_prefetched()
    assert len(saved) == 2 * len(names)
    for key, value in saved.items():
        torch.testing.assert_close(value, expected[key.partition(" ")[0]], rtol=0, atol=0)


def check_prefetched_go_with_the_weights(two: Engine, hugging_face: HuggingFace) -> None:
    """They are copies of other ranks' shares, or of another stage."""

    def look(ctx: Any, h: Any) -> None:
        ctx.saved["head"] = ctx.get_parameter("lm_head.weight")

    PersistentHooks(two.llm).prefetch_params(["lm_head.weight"])
    two.llm.collective_rpc("reload_weights")
    asked = {"apply_hooks": [Hook(fn=look, layer_indices=[0])]}
    if two.llm.llm_engine.vllm_config.parallel_config.pipeline_parallel_size > 1:
        with pytest.raises(HookError, match="prefetch it"):
            two.run([tokens(5)], asked, max_tokens=1)
        PersistentHooks(two.llm).prefetch_params(["lm_head.weight"])
    saved = two.run([tokens(5)], asked, max_tokens=1)[0].hook_results["0"]
    PersistentHooks(two.llm).clear_prefetched()
    torch.testing.assert_close(saved["head"], hugging_face.model.state_dict()["lm_head.weight"])


def test_parameters_that_were_prefetched_go_with_the_weights(
    two: Engine, hugging_face: HuggingFace
) -> None:
    check_prefetched_go_with_the_weights(two, hugging_face)


def test_they_do_where_the_scheduler_is_in_the_callers_process(
    tiny_folder: Path, hugging_face: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a training that reloads weights between its steps."""
    monkeypatch.setenv("INSPECT_LENS_ALLOW_CODE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = {"enforce_eager": True, "pipeline_parallel_size": 2}
    two = start(tiny_folder, in_process=True, **options)
    check_prefetched_go_with_the_weights(two, hugging_face)
    two.close()


def test_queries_and_keys_of_all_heads(two: Engine, hugging_face: HuggingFace) -> None:
    output = two.run([tokens(60)], {"output_qk": True}, max_tokens=3)[0]
    found = output.activations
    assert found["qk_layers"] == list(range(LAYERS))
    patterns = hugging_face.attentions(fed(output))
    captured = QueriesKeys.of(found)
    for layer in captured.layers:
        pattern = torch.from_numpy(captured.patterns(layer))
        torch.testing.assert_close(pattern, patterns[layer], rtol=0, atol=1e-4)


def test_chosen_heads_of_either_rank_equal_hugging_face(
    two: Engine, hugging_face: HuggingFace
) -> None:
    # With two ranks each has one of the heads, and both have the one key head.
    heads = [1, 0]
    asked = capture("z", capture={"layers": [0, 3], "heads": heads})
    asked["inspect_lens"]["qk"] = {"heads": [[0, 1], [3, 0], [3, 1]]}
    output = two.run([tokens(150)], asked, max_tokens=3)[0]
    found = output.activations
    rows = hugging_face.inner_sites(fed(output))["z"][[0, 3]]
    wanted = rows.reshape(*rows.shape[:2], -1, 64)[:, :, heads].flatten(2)
    assert max_relative_error(found["z"], wanted) <= TOLERANCE
    assert found["attn_q"].shape[0] == 3
    assert found["attn_k"].shape[0] == 2
    patterns, captured = hugging_face.attentions(fed(output)), QueriesKeys.of(found)
    for layer, head in captured.all_heads():
        pattern = torch.from_numpy(captured.patterns(layer, heads=[head]))
        torch.testing.assert_close(pattern[0], patterns[layer][head], rtol=0, atol=1e-4)


def test_nothing_is_left_behind(two: Engine) -> None:
    two.run([tokens(20)], ALL)
    two.run([tokens(20)])
    for stats in two.llm.collective_rpc("inspect_lens_stats"):
        held = {name: n for name, n in stats.items() if name != "waited_ms"}
        assert held == {"requests": 0, "steering_rows": 0, "sum_rows": 0, "shared_bytes": 0}


def _count(ctx: Any, h: Any) -> None:
    ctx.saved["n"] = ctx.position + ctx.seq_len


KEEP = Hook(fn=_count, layer_indices=[0])
# What fails on one rank alone: nobody waits for the other.
TENSOR_PARALLEL = pytest.mark.parametrize("two", [TENSOR], ids=["tp2"], indirect=True)


def works(engine: Engine) -> None:
    """Small results of all kinds come, and nothing is left behind."""
    prompts = [tokens(8, seed=i) for i in range(3)]
    outputs = engine.run(prompts, [{"apply_hooks": [KEEP]}, ALL, None])
    assert outputs[0].hook_results["0"]["n"] == 15
    assert outputs[1].activations["residual_stream"].shape[:2] == (LAYERS, 15)
    engine.run([tokens(5)])
    for stats in engine.llm.collective_rpc("inspect_lens_stats"):
        assert stats["requests"] == 0


@TENSOR_PARALLEL
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_raises_on_one_rank_fails_its_request(two: Engine, rank: int) -> None:
    def bad(ctx: Any, h: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        if ctx.position == 0 and get_tp_group().rank_in_group == rank:
            raise ValueError("here alone")

    hook = Hook(fn=bad, layer_indices=[1])
    with pytest.raises(HookError, match="here alone"):
        two.run([tokens(9)], {"apply_hooks": [hook]}, max_tokens=6)
    works(two)


@TENSOR_PARALLEL
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_raises_on_one_rank_while_the_other_asks_for_a_parameter(
    two: Engine, hugging_face: HuggingFace, rank: int
) -> None:
    """The other one gathers it over both, in each step and at each layer."""

    def bad(ctx: Any, h: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        if get_tp_group().rank_in_group == rank:
            raise ValueError("here alone")
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            assert ctx.get_parameter(name).numel()

    def good(ctx: Any, h: Any) -> None:
        ctx.saved["head"] = ctx.get_parameter("lm_head.weight")[:5]

    for pre in (False, True):
        hook = Hook(fn=bad, layer_indices=[1, 2], pre=pre)
        with pytest.raises(HookError, match="here alone"):
            two.run([tokens(9)], {"apply_hooks": [hook]}, max_tokens=6)
    works(two)
    output = two.run([tokens(9)], {"apply_hooks": [Hook(fn=good, layer_indices=[1])]})[0]
    whole = hugging_face.model.state_dict()["lm_head.weight"][:5]
    torch.testing.assert_close(output.hook_results["0"]["head"], whole, rtol=0, atol=0)


@TENSOR_PARALLEL
def test_steering_that_overflows_fails_its_request(two: Engine) -> None:
    v = torch.randn(LAYERS, HIDDEN, generator=torch.Generator().manual_seed(1))
    vector = SteeringVector(
        activations=v, layer_indices=list(range(LAYERS)), scale=3e9, norm_match=True
    )
    with pytest.raises(SpecError, match="a steered row would have been too large"):
        two.run([tokens(9)], {"apply_steering_vectors": [vector]}, max_tokens=6)
    works(two)
