"""The V2 runner with CUDA graphs: rows, steering, neighbours. One engine, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens.engine import register, unregister
from inspect_lens.sae import SparseAutoencoder
from tests.engine.conftest import Engine, start, tokens
from tests.kit.autoencoders import Definition
from tests.kit.engine_probes import check_probes
from tests.kit.reference import HuggingFace
from tests.kit.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HIDDEN, LAYERS = 512, 6
ALL = {"output_residual_stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Bits are compared between runs: without a second process arrival times play no part.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return tiny_llama(
        tmp_path_factory.mktemp("tiny"), layers=LAYERS, hidden=HIDDEN, dtype=torch.bfloat16
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = start(
        folder,
        dtype="bfloat16",
        max_num_batched_tokens=256,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.2,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def hugging_face(folder: Path) -> HuggingFace:
    return HuggingFace(folder)


def cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(found.float(), expected, dim=-1).min())


def fed(output: Any) -> list[int]:
    return list(output.prompt_token_ids) + list(output.outputs[0].token_ids)[:-1]


def test_rows_from_replayed_graphs_equal_hugging_face(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompts = [tokens(n, seed=n) for n in (1, 17, 64, 300)]
    outputs = engine.run(prompts, ALL, max_tokens=20)
    for output in outputs:
        rows = output.activations["residual_stream"]
        expected = hugging_face.residual_stream(fed(output))
        assert rows.shape == expected.shape
        assert rows.dtype == torch.bfloat16
        assert cosine(rows, expected) >= 0.998
    assert "graph" in outputs[0].inspect_lens.paths
    # Layers differ from one another, so rows of the wrong layer could not pass.
    assert cosine(rows[1:], expected[:-1]) < 0.95


def test_steering_edits_named_rows_and_leaves_neighbours_their_bits(engine: Engine) -> None:
    engine.llm.reset_prefix_cache()
    prompts = [tokens(100 + i, seed=i) for i in range(8)]
    plain = engine.run(prompts, ALL, max_tokens=12)
    engine.llm.reset_prefix_cache()
    v = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    where = [0, 31, 77]
    vector = SteeringVector(activations=v, layer_indices=[2], scale=4.0, position_indices=where)
    request = {"apply_steering_vectors": [vector], **ALL}
    mixed = engine.run(prompts, [request if i % 2 else ALL for i in range(8)], max_tokens=12)
    for i, (before, after) in enumerate(zip(plain, mixed, strict=True)):
        a, b = (o.activations["residual_stream"] for o in (before, after))
        if i % 2:
            n = 100 + i
            changed = (a[2, :n] != b[2, :n]).any(dim=-1).nonzero().flatten().tolist()
            assert changed == where
            expected = (a[2, where].float() + 4.0 * v[0]).bfloat16()
            # The edit is rounded in one half of the stream, and the sum of the halves again.
            step = torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
            torch.testing.assert_close(b[2, where], expected, rtol=0, atol=2 * step)
            assert after.inspect_lens.steer.n_tokens == len(where)
        else:
            assert after.outputs[0].token_ids == before.outputs[0].token_ids
            assert torch.equal(a, b)


def test_norm_match_while_decoding(engine: Engine, hugging_face: HuggingFace) -> None:
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    vector = SteeringVector(activations=v, layer_indices=[3], scale=0.8, norm_match=True)
    output = engine.run([tokens(50)], {"apply_steering_vectors": [vector], **ALL}, max_tokens=30)[0]

    def edit(h: torch.Tensor) -> torch.Tensor:
        return h + 0.8 * h.norm(dim=-1, keepdim=True) * v[0] / v[0].norm()

    expected = hugging_face.residual_stream(fed(output), {3: edit})
    assert cosine(output.activations["residual_stream"], expected) >= 0.998
    assert output.inspect_lens.steer.n_tokens == 79


def test_probes_read_in_the_engine_what_the_formula_gives(engine: Engine) -> None:
    prompts = [tokens(7 + i, seed=i) for i in range(16)]
    outputs = check_probes(engine.llm, engine.run, prompts, HIDDEN, LAYERS)
    assert "graph" in outputs[0].inspect_lens.paths


def test_nothing_is_left_behind(engine: Engine) -> None:
    engine.run([tokens(20)], ALL)
    engine.run([tokens(20)])
    assert engine.stats() == {"requests": 0, "steering_rows": 0, "sum_rows": 0, "shared_bytes": 0}


def test_a_big_batch_of_many_configurations(engine: Engine) -> None:
    prompts = [tokens(30 + i % 7, seed=i) for i in range(64)]
    requests = [
        {
            "apply_steering_vectors": [
                SteeringVector(
                    activations=torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(i)),
                    layer_indices=[i % LAYERS],
                    scale=2.0,
                )
            ],
            "output_residual_stream": [i % LAYERS],
        }
        for i in range(64)
    ]
    outputs = engine.run(prompts, requests, max_tokens=16)
    for i, output in enumerate(outputs):
        assert output.activations["residual_stream"].shape == (1, 30 + i % 7 + 15, HIDDEN)
        assert output.inspect_lens.steer.n_tokens == 30 + i % 7 + 15


def test_an_autoencoder_runs_between_compiled_kernels_and_other_steps_replay_graphs(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    sae = Definition("jumprelu", subtract=True, width=HIDDEN, latents=4096)
    sae.w_enc, sae.w_dec, sae.b_dec = sae.w_enc / 4, sae.w_dec / 200, sae.b_dec / 4
    arrays = {
        "weight": sae.w_enc.T.contiguous(),
        "bias": sae.b_enc - sae.b_dec @ sae.w_enc,
        "threshold": sae.threshold,
        "decoder": sae.w_dec,
        "decoder_bias": sae.b_dec,
    }
    form = SparseAutoencoder(**{name: array.numpy() for name, array in arrays.items()})
    register(engine.llm, "sae", form.for_engine())
    try:
        engine.llm.reset_prefix_cache()
        prompts = [tokens(100 + i, seed=i) for i in range(8)]

        def ask(**options: Any) -> dict[str, Any]:
            edit = form.splice("sae", layers=[2], **options)
            return {"inspect_lens": {"edits": [edit], "capture": {"layers": "all"}}}

        outputs = engine.run(prompts, [ask(), ask(error_term=True), *[ALL] * 6], max_tokens=12)
        there = {2: lambda x: sae.decode(sae(x))}
        expected = hugging_face.residual_stream(fed(outputs[0]), there)
        assert cosine(outputs[0].activations["residual_stream"], expected) >= 0.998
        for output in outputs[1:]:
            rows = output.activations["residual_stream"]
            assert cosine(rows, hugging_face.residual_stream(fed(output))) >= 0.998
        assert set(outputs[0].inspect_lens.paths) == {"compiled"}
        after = engine.run([prompts[3]], ALL, max_tokens=12)[0]
        assert "graph" in after.inspect_lens.paths
        # Of the prompt alone: the answer's steps replay graphs.
        part = engine.run([prompts[4]], ask(positions="prompt"), max_tokens=12)[0]
        assert "graph" in part.inspect_lens.paths
    finally:
        unregister(engine.llm, "sae")
