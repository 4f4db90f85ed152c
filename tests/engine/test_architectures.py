"""One tiny model of each layout against Hugging Face: rows at every site, and steering."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens.attention import QueriesKeys
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import result_name
from tests.engine.conftest import Engine, start, tokens
from tests.engine.test_capture import fed
from tests.kit.architectures import CASES, HIDDEN, LAYERS, Case, write
from tests.kit.model_results import CHECK, STEERED
from tests.kit.reference import HuggingFace, max_relative_error

TOLERANCE = 3e-4
"""float32, other kernels; recurrences add up more than attention does."""
PATTERN_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference of an attention probability. In bfloat16 those of transformers are up to 0.023
off what it returns in float32; a window of one token more makes 0.3, a scale of a tenth more 0.07.
"""

Close = Callable[[torch.Tensor, torch.Tensor], bool]
Note = Callable[[str, torch.Tensor, torch.Tensor], object]
"""Gets what was checked, the rows that were found, and those that were expected."""


def check_case(
    case: Case,
    folder: Path,
    close: Close,
    *,
    dtype: torch.dtype,
    note: Note = lambda *_: None,
    **options: Any,
) -> None:
    """Start an engine, and compare captures and steering with Hugging Face."""
    write(case, folder, dtype)
    reference = HuggingFace(folder, case.layers, is_text=case.is_text, **case.reads)
    with pytest.MonkeyPatch.context() as environment:
        more = ("q", "k") if case.has_patterns else ()
        environment.setenv("INSPECT_LENS_SITES", ",".join((*case.sites, *more)))
        engine = start(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            enable_prefix_caching=False,
            max_model_len=256,
            **(case.options | options),
        )
    try:
        check_rows(case, engine, reference, close, note)
        check_steering(case, engine, reference, close, note)
        if case.has_patterns:
            check_patterns(engine, reference, PATTERN_TOLERANCES[dtype])
        if case.has_latent_attention:
            with pytest.raises(
                UnsupportedError, match=r"output_qk: .*\(MLA\), which keeps no keys"
            ):
                engine.run([tokens(3)], {"output_qk": True})
    finally:
        engine.close()


def check_rows(
    case: Case,
    engine: Engine,
    reference: HuggingFace,
    close: Close,
    note: Note = lambda *_: None,
) -> None:
    request = {"inspect_lens": {"capture": {"site": list(case.sites)}}}
    for output in engine.run([tokens(n, seed=n) for n in (3, 90)], request, max_tokens=10):
        expected = reference.sites(fed(output), sites=case.sites)
        for site in case.sites:
            rows = output.activations[result_name(site)]  # type: ignore[arg-type]
            assert rows.shape == expected[site].shape
            note(site, rows, expected[site])
            assert close(rows, expected[site]), (case.name, site)
        # Rows of another layer could not pass.
        stream = expected["resid_post"]
        assert not close(stream[1:], stream[:-1])


def check_steering(
    case: Case,
    engine: Engine,
    reference: HuggingFace,
    close: Close,
    note: Note = lambda *_: None,
) -> None:
    v = 4.0 * torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    prompt, layer, where = tokens(80, seed=4), LAYERS - 2, [0, 40, 79]
    vector = SteeringVector(activations=v, layer_indices=[layer], position_indices=where)
    everything = {"output_residual_stream": True}
    request = {"apply_steering_vectors": [vector], **everything}
    plain, steered = engine.run([prompt, prompt], [everything, request], max_tokens=10)

    def edit(h: torch.Tensor) -> torch.Tensor:
        out = h.clone()
        out[where] += v[0]
        return out

    before, after = (o.activations["residual_stream"] for o in (plain, steered))
    edited = reference.residual_stream(fed(steered), {layer: edit})
    note(STEERED, after, edited)
    assert close(after, edited)
    assert close(before, reference.residual_stream(fed(plain)))
    changed = (before[layer, :80] != after[layer, :80]).any(dim=-1).nonzero().flatten().tolist()
    assert set(where) <= set(changed)
    exact = [p for p in range(80) if p not in where]
    assert close(after[layer, exact], before[layer, exact])
    assert steered.inspect_lens.steer.n_tokens == len(where)


def check_patterns(engine: Engine, reference: HuggingFace, atol: float) -> None:
    """Windows and scales are those that the engine says, to what transformers returns."""
    (output,) = engine.run([tokens(90, seed=2)], {"output_qk": True}, max_tokens=4)
    captured = QueriesKeys.of(output.activations)
    windows = {facts.window for facts in captured.facts}
    assert windows == {(31, 0), (-1, -1)}, "both kinds of layers"
    for layer, expected in zip(captured.layers, reference.attentions(fed(output)), strict=True):
        pattern = torch.from_numpy(captured.patterns(layer))
        torch.testing.assert_close(pattern, expected, rtol=0, atol=atol)


BY_DAY = {"gemma3", "gemma4", "opt", "granite-hybrid", "stablelm", "idefics3", "gpt_oss"}
"""Gemma 3 has norms on queries and keys, OPT a plain residual, gpt-oss sinks and biases of experts;
two workers run Mixtral by day.
"""
AT_NIGHT = pytest.mark.nightly(
    held_by=(
        "tests/engine/test_architectures.py::test_an_architecture_equals_hugging_face",
        "tests/engine/test_expert_parallel.py::test_router_logits_equal_hugging_face",
        "tests/engine/test_expert_parallel.py::"
        "test_rows_of_experts_on_two_workers_equal_hugging_face",
    ),
    why="an engine for each; models with each part of their layouts run by day",
)


@pytest.mark.engine
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in BY_DAY else [AT_NIGHT])
        for case in CASES
        if not case.needs_gpu and not case.is_refused
    ],
)
def test_an_architecture_equals_hugging_face(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    assert "INSPECT_LENS_LAYERS" not in os.environ
    # In this process an engine starts in a fifth of the time, but it could change the class that
    # is the reference.
    if not case.is_by_transformers:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    check_case(
        case,
        tmp_path,
        lambda found, expected: max_relative_error(found, expected) <= TOLERANCE,
        dtype=torch.float32,
        note=lambda what, found, expected: record_property(
            CHECK, [what, max_relative_error(found, expected), TOLERANCE]
        ),
        enforce_eager=True,
    )


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "sites", "reason"),
    [
        ("gemma3n", "resid_post", "output of Gemma3nDecoderLayer"),
        ("falcon_h1", "attn_out,resid_post", "attn_out: FalconH1ParallelHybrid"),
        ("nemotron_h", "mlp_out,resid_post", "mlp_out: NemotronHMambaDecoderLayer"),
        ("deepseek_v2", "q,k,resid_post", r"this model has no q: .* \(MLA\)"),
    ],
)
def test_what_an_architecture_lacks_is_refused_with_the_reason(
    name: str, sites: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_SITES", sites)
    case = next(case for case in CASES if case.name == name)
    engine = start(write(case, tmp_path), in_process=True, max_model_len=256, enforce_eager=True)
    try:
        with pytest.raises(UnsupportedError, match=reason):
            engine.run([tokens(3)], {"output_residual_stream": True})
        (output,) = engine.run([tokens(3)], max_tokens=4)
        assert len(output.outputs[0].token_ids) == 4
    finally:
        engine.close()
