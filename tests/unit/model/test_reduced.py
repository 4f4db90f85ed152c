"""Reduced captures on their way through Inspect: shapes, positions, logs, scorers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, CaptureError
from inspect_lens.model import activations, lens_config
from inspect_lens.reading._rows import read_rows
from inspect_lens.spec import CaptureSpec
from tests.kit.fake_server import FakeLensServer, residual
from tests.kit.reduced import reduced
from tests.unit.model.conftest import GetModel

PROMPT = "one two three"
"""Four tokens with the role's; three more are sampled, and two of them fed."""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "shape", "positions"),
    [
        ({"reduce": "mean"}, (2, 1, 8), tuple(range(6))),
        ({"reduce": "mean", "dtype": "float16", "phase": "prefill"}, (2, 1, 8), (0, 1, 2, 3)),
        ({"reduce": "max", "positions": [True, False, False, True]}, (2, 1, 8), (0, 3)),
        ({"reduce": "last"}, (2, 1, 8), (5,)),
        ({"positions": "last"}, (2, 1, 8), (5,)),
        ({"positions": "last", "phase": "prefill"}, (2, 1, 8), (3,)),
        ({"reduce": "norm", "phase": "decode"}, (2, 2, 1), (4, 5)),
        ({"dtype": "float32"}, (2, 6, 8), tuple(range(6))),
    ],
)
async def test_a_handle_says_what_it_holds(
    server: FakeLensServer,
    model_of: GetModel,
    fields: dict[str, Any],
    shape: tuple[int, ...],
    positions: tuple[int, ...],
) -> None:
    config = lens_config(capture={"layers": [1, 3], **fields})
    acts = activations(await model_of(server).generate(PROMPT, config=config))
    assert acts is not None
    info = acts.tensors["residual_stream"]
    asked = fields.get("reduce", "none")
    assert (info.shape, info.reduce, acts.positions) == (shape, asked, positions)
    assert info.dtype == fields.get("dtype", "bfloat16")
    assert acts["residual_stream"].shape == shape
    assert str(acts["residual_stream"].dtype) == f"torch.{info.dtype}"
    assert acts.receipt is not None
    assert acts.receipt.capture is not None
    assert acts.receipt.capture.reduce == asked
    tokens = [*acts.prompt_token_ids, *acts.token_ids]
    capture = CaptureSpec(**{"layers": [1, 3], **fields})
    expected = reduced(residual(tokens, (1, 3), list(positions)), capture)
    np.testing.assert_array_equal(acts.numpy(), expected.to_float32())


@pytest.mark.anyio
async def test_a_server_that_does_not_reduce_is_an_error(
    server: FakeLensServer, model_of: GetModel
) -> None:
    server.reduces_nothing = True
    with pytest.raises(CaptureError, match="does not reduce so"):
        await model_of(server).generate(PROMPT, config=lens_config(capture={"reduce": "mean"}))


@pytest.mark.anyio
async def test_a_mean_is_not_taken_for_tokens(server: FakeLensServer, model_of: GetModel) -> None:
    config = lens_config(capture={"layers": [1], "reduce": "mean"})
    output = await model_of(server).generate(PROMPT, config=config)
    with pytest.raises(ArtifactError, match="only the mean was captured"):
        await read_rows(output, layers=(1,), positions="completion", source="captured")
