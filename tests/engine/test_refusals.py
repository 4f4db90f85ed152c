"""Bad requests are refused at the edge, and the engine serves the next one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.engine.conftest import HIDDEN, Engine, tokens

pytestmark = pytest.mark.engine

GOOD = {
    "activations": [[1.0] * HIDDEN],
    "layer_indices": [0],
}


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"output_residual_stream": [999]}, "layers 0 to 3"),
        ({"output_residual_stream": [-1]}, "no layer; they count from 0"),
        ({"output_residual_stream": []}, "empty"),
        ({"output_residual_stream": "not json"}, "not JSON"),
        ({"apply_steering_vectors": [{**GOOD, "layer_indices": [999]}]}, "layers 0 to 3"),
        ({"apply_steering_vectors": [{**GOOD, "activations": [[1.0] * 5]}]}, "128 wide"),
        ({"apply_steering_vectors": [{**GOOD, "activations": [[math.nan] * HIDDEN]}]}, "NaN"),
        ({"apply_steering_vectors": [{**GOOD, "scale": math.inf}]}, "finite"),
        ({"apply_steering_vectors": [{**GOOD, "bogus": 1}]}, "bogus"),
        ({"apply_steering_vectors": [{**GOOD, "position_indices": [500]}]}, "outside"),
        ({"output_residual_streams": [1]}, "did you mean"),
        ({"output_residual_stream": [1], "unheard_of": 1}, "unknown key 'unheard_of'"),
        ({"inspect_lens": {"capture": {"layers": [0], "site": "attn_out"}}}, "INSPECT_LENS_SITES"),
        (
            {"inspect_lens": {"capture": {"layers": [0], "site": "qk"}}},
            "resid_pre, q, k, v, z, attn_out",
        ),
        ({"inspect_lens": {"captures": {}}}, "captures"),
        ({"_inspect_lens": {}}, "reserved"),
        ({"output_qk": [999]}, "no taps for q and k"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_lives(
    engine: Engine, extra_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.run([tokens(10)], extra_args)
    assert engine.run([tokens(10)])[0].outputs[0].token_ids
    assert engine.stats() == {"requests": 0, "steering_rows": 0, "sum_rows": 0, "shared_bytes": 0}


def test_one_bad_request_of_a_batch_leaves_no_other_in_the_engine(engine: Engine) -> None:
    with pytest.raises(ValueError, match="outside"):
        engine.run(
            [tokens(10), tokens(11)],
            [
                {"output_residual_stream": [0]},
                {"inspect_lens": {"capture": {"positions": [400]}}},
            ],
        )
    outputs = engine.run([tokens(12)])
    assert len(outputs) == 1
    assert engine.stats() == {"requests": 0, "steering_rows": 0, "sum_rows": 0, "shared_bytes": 0}
