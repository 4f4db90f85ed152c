"""A patch sweep that a server runs by itself, against the same sweep cell by cell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens.client import LensClient
from inspect_lens.errors import SpecError
from inspect_lens.patch import PatchCell, patch_sweep

pytestmark = pytest.mark.engine

PATH = "/v1/inspect_lens/patch_sweep"
CLEAN = "The temple Vustem is found in Kestria. The river Figubim is found in"
CORRUPTED = "The mineral Nubrush is found in Dorrick. The river Kusubrer is found in"
BODY: dict[str, Any] = {
    "clean": CLEAN, "corrupted": CORRUPTED, "answer": " Kestria", "foil": " Maruland",
    "layers": [0, 5], "floor_runs": 1,
}  # fmt: skip
CHAT = [
    {"role": "user", "content": "Where is the river Figubim found?"},
    {"role": "assistant", "content": "The river Figubim is found in"},
]


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[LensClient]:
    with LensClient(lens_server_url) as made:
        yield made


@pytest.fixture(scope="module")
def http(lens_server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=lens_server_url, timeout=300) as made:
        yield made


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [0, 5]},
        {"layers": [1], "site": "attn_out", "foil": None, "alpha": 0.5},
        {"layers": [2], "window": 3, "positions": [-4, -1]},
        {"layers": [3], "positions": [-1], "source": "rows", "rows": np.full((1, 1, 256), 0.5)},
    ],
)
def test_the_server_finds_what_requests_find(client: LensClient, options: dict[str, Any]) -> None:
    asked = {"answer": " Kestria", "foil": " Maruland", "floor_runs": 1, "in_flight": 16} | options
    cells: list[PatchCell] = []
    found = patch_sweep(client, CLEAN, CORRUPTED, over="server", on_cell=cells.append, **asked)
    wanted = patch_sweep(client, CLEAN, CORRUPTED, **asked)
    for name in ("layers", "positions", "tokens", "clean_tokens", "answer", "foil", "site"):
        assert getattr(found, name) == getattr(wanted, name), name
    np.testing.assert_allclose(found.logprob, wanted.logprob, atol=1e-5)
    np.testing.assert_allclose(found.recovered, wanted.recovered, atol=1e-5)
    np.testing.assert_allclose(found.clean[0], wanted.clean[0], atol=1e-5)
    assert found.floor < 1e-4
    assert len(set(cells)) == found.metric.size


def _rows_known(http: httpx.Client) -> float:
    """Tokens whose rows came from earlier requests."""
    lines = http.get("/metrics").text.splitlines()
    name = "inspect_lens_row_cache_hits_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_rows_of_the_clean_run_are_kept_from_one_sweep_to_the_next(
    client: LensClient, http: httpx.Client
) -> None:
    clean = [(17 * i) % 900 + 20 for i in range(48)]
    corrupted = [clean[0] + 1, *clean[1:]]
    asked: dict[str, Any] = {
        "answer": 200, "layers": [1], "positions": [0, 47], "floor_runs": 1, "over": "server",
    }  # fmt: skip
    known, sweeps = [], []
    for _ in range(3):
        before = _rows_known(http)
        sweeps.append(patch_sweep(client, clean, corrupted, **asked))
        known.append(_rows_known(http) - before)
    # The last token of each prompt is computed, and blocks of 16 are kept.
    assert known[0] == 0
    assert known[2] == 2 * 32
    for sweep in sweeps[1:]:
        np.testing.assert_allclose(sweep.logprob, sweeps[0].logprob, atol=1e-5)
    # A client may keep them, too, or send those of any other run.
    run = client.generate(clean, capture={"layers": [1], "positions": "prompt"}, max_tokens=1)
    assert run.activations is not None
    rows = run.activations.numpy()[:, [0, 47]]
    sent = patch_sweep(client, clean, corrupted, source="rows", rows=rows, **asked)
    np.testing.assert_allclose(sent.logprob, sweeps[0].logprob, atol=1e-5)


def test_a_chat_is_the_text_that_the_server_makes_of_it(client: LensClient) -> None:
    other = [CHAT[0], {"role": "assistant", "content": "The river Vemuth is found in"}]
    asked: dict[str, Any] = {"answer": " Kestria", "align": "ends", "layers": [5], "floor_runs": 1}
    found = patch_sweep(client, CHAT, other, over="server", **asked)
    wanted = patch_sweep(client, CHAT, other, **asked)
    assert found.tokens == wanted.tokens
    np.testing.assert_allclose(found.logprob, wanted.logprob, atol=1e-5)
    assert found.recovered[0, -1] == pytest.approx(1.0, abs=1e-3)


def test_lines_begin_with_baselines_and_the_floor_for_each_site(http: httpx.Client) -> None:
    sites = ["resid_post", "mlp_out"]
    with http.stream("POST", PATH, json=BODY | {"layers": [5], "sites": sites}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in answer.iter_lines()]
    for site in sites:
        own = [line for line in lines if line["site"] == site]
        start, floor, *cells, end = own
        assert [start["event"], floor["event"], end["event"]] == ["start", "floor", "end"]
        cells = [cell for cell in cells if cell["event"] == "cell"]
        assert len(cells) == start["cells"] == end["cells"] == len(start["positions"])
        assert end["floor"] >= floor["floor"] >= 0
        good, bad = (
            start[run]["logprob"] - start[run]["foil_logprob"] for run in ("clean", "corrupted")
        )
        for cell in cells:
            assert cell["value"] == cell["logprob"] - cell["foil_logprob"]
            assert cell["recovered"] == pytest.approx((cell["value"] - bad) / (good - bad))
    seen = [line["site"] for line in lines]
    assert seen == sorted(seen, key=sites.index), "one site after the other"


def _quiet(http: httpx.Client) -> bool:
    """Whether the engine runs nothing."""
    found = [
        float(line.rpartition(" ")[2])
        for line in http.get("/metrics").text.splitlines()
        if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
    ]
    assert found
    about = http.get("/v1/inspect_lens").json()
    return not sum(found) and not about["open_requests"]


def _ended(http: httpx.Client) -> float:
    """Requests that the engine has run to their end."""
    lines = http.get("/metrics").text.splitlines()
    done = [x for x in lines if x.startswith("vllm:request_success_total{") and "abort" not in x]
    return sum(float(line.rpartition(" ")[2]) for line in done)


def test_a_client_that_hangs_up_leaves_nothing(http: httpx.Client) -> None:
    body = BODY | {"layers": None, "source": "zero", "floor_runs": 64, "in_flight": 8}
    before, n_runs = _ended(http), 0
    for _ in range(5):  # more than may run at once
        with http.stream("POST", PATH, json=body) as answer:
            n_runs += json.loads(next(answer.iter_lines()))["cells"] + 2 * 64
        deadline = time.monotonic() + 60
        while not _quiet(http) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _quiet(http)
    assert n_runs > 1000
    assert _ended(http) - before < n_runs / 2, "cells that nobody waits for are not run"
    done = http.post(PATH, json=BODY | {"layers": [5], "positions": [-1]})
    assert done.text.count("\n") == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clean": None}, "clean"),
        ({"clean": ""}, "clean: is empty"),
        ({"clean": [{"content": "x"}]}, "clean[0].role"),
        ({"clean": [{}]}, "clean[0].role"),
        ({"clean": [-5]}, "clean[0]: -5; token ids are"),
        ({"clean": [1 << 60], "corrupted": [1 << 60]}, ""),
        ({"clean": [1, 2], "corrupted": [1, 3], "answer": -5, "foil": None}, ""),
        ({"layers": [0] * 100_000}, "layers: has 100000 entries"),
        ({"clean": "x " * 500_000, "corrupted": "y"}, ""),
        ({"clean": [1, "x"]}, "clean"),
        ({"answer": None}, "answer"),
        ({"layer": [1]}, "layer: unknown; allowed are model, clean"),
        ({"layers": [99]}, "99"),
        ({"layers": ["1"]}, "layers[0]"),
        ({"positions": [500]}, "500"),
        ({"sites": ["nowhere"]}, "sites[0]='nowhere'; allowed are resid_pre"),
        ({"sites": ["resid_post", "resid_post"]}, "name each once"),
        ({"sites": []}, "sites"),
        ({"source": "noise"}, "allowed are clean, zero, mean, rows"),
        ({"source": "mean"}, "rows=none"),
        ({"source": "rows", "rows": [["x"]]}, "rows: ['x'] holds something that is not a number"),
        ({"source": "rows", "rows": [[[1.0]]]}, "256"),
        ({"align": "left"}, "allowed are equal, ends"),
        ({"corrupted": "The river Kusubrer is"}, "align='ends'"),
        ({"foil": " Kestria"}, "same token"),
        ({"foil": 10**9}, "1000000000"),
        ({"clean": CLEAN[:-1], "corrupted": CORRUPTED[:-1], "answer": "n"}, "joins the last"),
        ({"in_flight": 0}, "in_flight"),
        ({"floor_runs": 65}, "floor_runs"),
        ({"alpha": "1"}, "alpha"),
        ({"model": "other"}, "allowed are organism/checkpoint"),
        ({"clean": "The river " * 3000, "align": "ends"}, ""),
    ],
)
def test_a_body_that_is_wrong_gets_400(
    http: httpx.Client, change: dict[str, Any], message: str
) -> None:
    answer = http.post(PATH, json={k: v for k, v in (BODY | change).items() if v is not None})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert len(error["message"]) < 5000, "no prompt is sent back"
    assert error["code"] == 400


def test_a_client_that_does_not_read_leaves_room_for_others(http: httpx.Client) -> None:
    body = BODY | {"layers": None, "source": "zero", "floor_runs": 64, "in_flight": 8}
    with http.stream("POST", PATH, json=body) as first, http.stream("POST", PATH, json=body):
        assert first.status_code == 200
        third = http.post(PATH, json=body)
        assert third.status_code == 429, third.text
        assert "2 of one client" in third.json()["error"]["message"]
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        other = httpx.Client(base_url=http.base_url, transport=elsewhere, timeout=300)
        with other, other.stream("POST", PATH, json=body) as fourth:
            assert fourth.status_code == 200


def test_what_is_no_object_gets_400(http: httpx.Client) -> None:
    for content in ("[1]", "{", '"x"'):
        assert http.post(PATH, content=content).status_code == 400


def test_the_client_says_what_the_server_said(client: LensClient) -> None:
    with pytest.raises(SpecError, match=r"HTTP 400: .*align='ends'"):
        patch_sweep(client, CLEAN, "The river", answer=" Kestria", over="server")
