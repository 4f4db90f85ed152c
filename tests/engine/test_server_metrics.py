"""The API server's metrics, beside vLLM's: what they add is what receipts record."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inspect_lens.spec import decode_tensor
from tests.engine.test_server import chat
from tests.kit.waiting import until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Any:
    with httpx.Client(base_url=lens_server_url, timeout=120) as made:
        yield made


def lens_metrics(client: Any) -> dict[str, float]:
    """What `/metrics` shows of the lens, by name and labels."""
    shown = client.get("/metrics").text
    return {
        " ".join([sample.name, *map(str, sorted(sample.labels.values()))]): sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
        if sample.name.startswith("inspect_lens_")
    }


def test_metrics_beside_those_of_vllm_count_what_was_done(client: Any) -> None:
    assert "vllm:num_requests_running" in client.get("/metrics").text
    before = lens_metrics(client)
    assert before["inspect_lens_store_limit_bytes"] > 0
    xargs = {"output_residual_stream": "[1, 4]", "activations_transport": "binary"}
    answer = chat(client, vllm_xargs=xargs).json()
    assert chat(client, vllm_xargs={"output_residual_stream": "[99]"}).status_code == 400
    assert chat(client).status_code == 200
    (entry,) = answer["activations"].values()
    n_waiting, name = before["inspect_lens_store_results"], "inspect_lens_store_results"
    assert until(lambda: lens_metrics(client)[name] == n_waiting + 1)
    fetched = client.get(f"/v1/activations/{entry['handle']}").content
    assert until(lambda: lens_metrics(client)[name] == n_waiting)
    after = lens_metrics(client)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert more("inspect_lens_requests_total capture") == 1
    assert more("inspect_lens_refusals_total 400 SpecError") == 1
    assert more("inspect_lens_rows_total") == answer["inspect_lens"]["capture"]["rows"]
    assert more("inspect_lens_wait_seconds_count") == 1
    # The frame of a fetched tensor has a header, too.
    rows = decode_tensor(entry, raw=fetched)
    assert more("inspect_lens_bytes_total") == rows.nbytes
