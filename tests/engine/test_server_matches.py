"""Tokens named by their text, over HTTP: rows and edits are those of the positions they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.client import LensClient
from inspect_lens.spec import Add, CaptureSpec, TokenMatch
from tests.engine.test_server import MESSAGES, client

__all__ = ["client"]

pytestmark = pytest.mark.engine

WORD = str(MESSAGES[-1]["content"]).split()[0]
MATCH = TokenMatch(pattern=WORD, matches="first")


def test_rows_and_edits_are_those_of_the_positions(client: Any, lens_server_url: str) -> None:
    with LensClient(lens_server_url) as lens:

        def run(positions: Any) -> Any:
            edit = Add(vector=np.full(256, 0.3, np.float32), layers=[2], positions=positions)
            capture = CaptureSpec(layers=[1, 4], positions=positions)
            return lens.chat(MESSAGES, max_tokens=6, capture=capture, edits=[edit])

        matched = run(MATCH)
        assert matched.receipt is not None
        assert matched.receipt.capture is not None
        said = matched.receipt.capture
        assert (said.positions is None) != (said.first_position is None)
        first = said.first_position or 0
        where = said.positions or tuple(range(first, first + said.n_positions))
        ids = matched.prompt_token_ids
        tokenized = client.post(
            "/detokenize", json={"model": lens.model, "tokens": [ids[p] for p in where]}
        ).json()
        assert WORD in tokenized["prompt"]
        listed = run(list(where))
        plain = lens.chat(MESSAGES, max_tokens=6, capture=CaptureSpec(layers=[1, 4]))
    rows = matched.activations["residual_stream"].numpy()
    np.testing.assert_array_equal(rows, listed.activations["residual_stream"].numpy())
    assert matched.token_ids == listed.token_ids
    unedited = plain.activations["residual_stream"].numpy()[:, list(where)]
    np.testing.assert_allclose(rows[0], unedited[0], atol=1e-4)  # layer 1 comes before the edit
    assert np.abs(rows[1] - unedited[1]).max() > 0.05
