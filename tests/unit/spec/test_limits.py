"""Nothing is unpacked that an engine has no use for, and nothing of a refused request is kept."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from pydantic import ValidationError

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    EngineProbe,
    TensorLimits,
    _positions,
    as_tensor_data,
    encode_tensor,
    explain,
    forget_parsed,
    parse_extra_args,
)
from inspect_lens.spec._request import Budget, Cache
from tests.kit.costs import cost
from tests.kit.facts import engine_facts

FACTS = engine_facts(hidden=256, bank_rows=1000)


def zeros(*shape: int, dtype: str = "float32", streamed: bool = False) -> dict[str, Any]:
    """A tensor of zeros in a few bytes; `streamed` without its size in the frame."""
    size = int(np.prod(shape)) * (4 if dtype == "float32" else 2)
    if streamed:
        packer = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
        frame = b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20))
        frame += packer.flush()
    else:
        frame = zstandard.ZstdCompressor(level=1).compress(bytes(size))
    return {
        "data": base64.b64encode(frame).decode(),
        "dtype": "int16" if dtype == "bfloat16" else dtype,
        "original_dtype": f"torch.{dtype}",
        "shape": list(shape),
        "compression": "zstd",
    }


def peak_of(body: dict[str, Any], limits: TensorLimits | None) -> tuple[int, str]:
    tracemalloc.start()
    try:
        with pytest.raises(SpecError) as error, cost() as took:
            parse_extra_args(body, limits=limits)
        peak = tracemalloc.get_traced_memory()[1]
        assert took.is_at_most(0.5)
        return peak, str(error.value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1 << 25), "256 wide"),
        ((1, 1 << 17, 256), "1000 rows"),
        ((512, 256, 256), "1000 rows"),
        ((1 << 25,), "256 wide"),
        ((1, 1 << 10, 1 << 7, 256), "1000 rows"),
    ],
)
def test_a_declared_shape_is_judged_before_anything_is_unpacked(
    shape: tuple[int, ...], message: str
) -> None:
    tensor = zeros(*shape)
    vector = {"activations": tensor, "layer_indices": [0]}
    for body in (
        {"apply_steering_vectors": json.dumps([vector])},
        {"inspect_lens": {"edits": [{"op": "add", "vector": tensor, "layers": [0]}]}},
    ):
        peak, found = peak_of(body, TensorLimits(FACTS))
        assert message in found
        assert peak < 1 << 20, "128 MiB were declared"


@pytest.mark.parametrize("field", ["value", "bias", "threshold"])
def test_a_tensor_of_numbers_is_judged_before_it_is_unpacked(field: str) -> None:
    rows = {"encoder": zeros(1, 256), "decoder": zeros(1, 256), "value": [0.0], "layers": [1]}
    asked = {"inspect_lens": {"edits": [{"op": "latents", **rows, field: zeros(1, 1 << 22)}]}}
    peak, message = peak_of(asked, TensorLimits(FACTS))
    assert "has 4194304 numbers; 64 at most for each layer" in message
    assert peak < 1 << 20


def test_vectors_of_one_request_are_counted_together() -> None:
    vector = {"activations": zeros(1, 900, 256), "layer_indices": [0]}
    body = {"apply_steering_vectors": [vector, vector]}
    peak, found = peak_of(body, TensorLimits(FACTS))
    assert "1800 vectors and the steering table has 1000 rows" in found
    assert peak < 4 << 20


@pytest.mark.parametrize("streamed", [False, True])
def test_a_frame_unpacks_to_no_more_than_it_declares(streamed: bool) -> None:
    tensor = zeros(1, 1 << 17, 256, streamed=streamed) | {"shape": [1, 64, 256]}
    body = {"apply_steering_vectors": [{"activations": tensor, "layer_indices": [0]}]}
    peak, found = peak_of(body, None)
    assert "zstd frame" in found
    assert peak < 2 << 20, "128 MiB are in the frame"


def test_tensors_of_probes_are_judged_too() -> None:
    shapes = {"weight": (1, 1 << 25), "bias": (1 << 26,)}
    for name, shape in shapes.items():
        tensors = {"weight": [[1.0] * 256], name: zeros(*shape)}
        tracemalloc.start()
        with pytest.raises(ValidationError) as error:
            EngineProbe.model_validate(
                {"layers": [0], "tensors": tensors},
                context=TensorLimits(FACTS).context,
            )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert ("256 wide" if name == "weight" else "needs 0 axes") in explain(error.value)
        assert peak < 1 << 20


def test_a_large_vector_is_judged_in_parts() -> None:
    tensor = zeros(1, 1 << 15, 256)
    tracemalloc.start()
    request = parse_extra_args(
        {"apply_steering_vectors": [{"activations": tensor, "layer_indices": [0]}]}
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert request is not None
    nbytes = request.edits[0].vector.nbytes
    assert nbytes == 32 << 20
    assert peak < 1.5 * nbytes


def test_what_is_kept_is_counted_and_of_a_refused_request_nothing_is() -> None:
    vectors = [as_tensor_data(np.full((1, 1 << 14), i + 1, np.float32)) for i in range(40)]
    bodies = [
        {"apply_steering_vectors": [{"activations": encode_tensor(v), "layer_indices": [9]}]}
        for v in vectors
    ]
    budget = Budget(1 << 21)
    cache: Cache[Any, Any] = Cache(1 << 13, budget)
    from inspect_lens.spec import _request

    before, _request._PARSED = _request._PARSED, cache
    try:
        requests = [parse_extra_args(body) for body in bodies]
        kept = [request for request, _ in cache.values.values()]
        alive = [r for r in requests if r is not None and any(r is one for one in kept)]
        held = sum(request.edits[0].vector.nbytes for request in alive)
        assert 0 < held <= budget.n_bytes <= 1 << 21
        for request in requests:
            assert request is not None
            forget_parsed(request)
        assert (len(cache), budget.n_bytes) == (0, 0)
    finally:
        _request._PARSED = before


def test_patterns_that_are_too_many_are_refused_before_one_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile(pattern: str) -> None:
        raise AssertionError(f"{pattern} would take the event loop milliseconds")

    monkeypatch.setattr(_positions, "_compiled", compile)
    edits = [
        {"op": "zero", "layers": [1], "positions": {"pattern": f"[a-z]{{1,900}}{i}"}}
        for i in range(17)
    ]
    with pytest.raises(SpecError, match=r"17 different patterns.*at most 16"):
        parse_extra_args({"inspect_lens": {"edits": edits}})
