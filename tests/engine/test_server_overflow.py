"""Steering that overflows, over HTTP: the client is told which, and nobody else notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from inspect_lens import SteeringVector
from inspect_lens.client import LensClient
from inspect_lens.errors import LensError

pytestmark = pytest.mark.engine

PROMPT = "The founder of the town Velosh"


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[LensClient]:
    with LensClient(lens_server_url) as made:
        yield made


def vector(scale: float) -> SteeringVector:
    values = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    return SteeringVector(activations=values, layer_indices=range(5), scale=scale, norm_match=True)


@pytest.mark.parametrize(
    ("scale", "message"),
    [(4e9, "it may be 3.037e+09; lower the scale"), (3e9, "a steered row would have")],
    ids=["judged", "run"],
)
def test_the_client_is_told_and_neighbours_keep_their_answers(
    client: LensClient, scale: float, message: str
) -> None:
    plain = client.generate(PROMPT, max_tokens=12, capture_layers=[2])
    stop = threading.Event()
    caught: list[str] = []

    def disturb() -> None:
        while not stop.is_set():
            try:
                client.generate(PROMPT, max_tokens=3, steering_vectors=[vector(scale)])
            except LensError as error:
                caught.append(str(error))
            else:
                caught.append("answered")

    threads = [threading.Thread(target=disturb) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            again = client.generate(PROMPT, max_tokens=12, capture_layers=[2])
            assert again.text == plain.text
            rows, before = (r.activations["residual_stream"].float() for r in (again, plain))
            assert rows.isfinite().all()
            # In another batch, and so added up in another order.
            assert float((rows - before).norm() / before.norm()) < 1e-4
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert caught
    for text in caught:
        assert text.startswith("HTTP 400"), text
        assert message in text, text
