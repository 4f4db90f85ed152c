"""The chat page on a real server: its scores and layers are those of the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens.client import LensClient
from inspect_lens.errors import ArtifactError, LensError, SpecError
from inspect_lens.vector import load_vector
from inspect_lens.view import ChatPage, open_talk
from tests.kit.browser import BROWSER, run_at
from tests.kit.driven_chat import (
    ASK_SCRIPT,
    ASKED,
    PICTURES,
    PROBE,
    STEERED,
    VECTOR,
    DrivenChat,
    scores_of,
)
from tests.kit.repository import ROOT

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def page(lens_server_url: str) -> Iterator[ChatPage]:
    talk = open_talk(lens_server_url, model="lens/organism/checkpoint", probe=PROBE, layers=[2, 5])
    with ChatPage(talk) as made:
        yield made


def key_of(page: ChatPage) -> dict[str, str]:
    return {"X-Inspect-Lens-Key": page.url.partition("key=")[2]}


def address(page: ChatPage, path: str = "/answer") -> str:
    return page.url.partition("/?")[0] + path


def chat(page: ChatPage, body: Any = None, **headers: str) -> list[dict[str, Any]]:
    sent = key_of(page) | headers
    with httpx.stream(
        "POST", address(page), json=body or ASKED, headers=sent, timeout=120
    ) as answer:
        assert answer.status_code == 200
        return [json.loads(line) for line in answer.iter_lines()]


def test_the_page_streams_the_scores_and_layers_of_the_client(
    page: ChatPage, lens_server_url: str
) -> None:
    events = chat(page)
    kinds = [event["event"] for event in events]
    assert kinds[-1] == "end"
    assert kinds.index("scores") < len(kinds) - 1 - kinds[::-1].index("tokens"), (
        "while it is written"
    )
    tokens = [token for event in events if event["event"] == "tokens" for token in event["tokens"]]
    scores = scores_of(events)
    (lens,) = [event for event in events if event["event"] == "lens"]
    (pooled,) = [event for event in events if event["event"] == "pooled"]
    asked = {
        "probes": [{"name": page._talk.setup.probe, "tokens": True}],
        "lens": {"layers": [2, 5], "top_k": 5, "positions": "completion"},
    }
    with LensClient(lens_server_url) as client:
        wanted = client.chat(ASKED["messages"], max_tokens=40, inspect_lens=asked)
    assert wanted.receipt is not None
    assert wanted.receipt.lens is not None
    assert wanted.receipt.probes is not None
    assert [token["id"] for token in tokens] == wanted.token_ids
    text = "".join(event["text"] for event in events if event["event"] == "tokens")
    assert text == wanted.text
    assert "".join(token["text"] for token in tokens).startswith(text)
    np.testing.assert_allclose(scores, wanted.receipt.probes[0].tokens, atol=1e-4)
    assert len(scores) == len(tokens) - 1
    assert pooled["score"] == pytest.approx(wanted.receipt.probes[0].score, abs=1e-4)
    assert max(scores) > page._talk.setup.threshold, "the organism lies, and the probe says so"
    table = wanted.receipt.lens.result(wanted.activations)
    assert (lens["first"], lens["layers"]) == (0, [2, 5])
    ids = [[[guess["id"] for guess in layer] for layer in row] for row in lens["rows"]]
    # Of guesses that are as likely, the order may differ.
    np.testing.assert_array_equal(np.array(ids)[:, :, 0], table.token_ids[:, :, 0])
    chances = [[layer[0]["p"] for layer in row] for row in lens["rows"]]
    np.testing.assert_allclose(chances, np.exp(table.logprobs[:, :, 0]), atol=1e-3)
    true = [guess["text"] for row in lens["rows"] for guess in row[0]]
    assert " Ruvan" in true, "layer 2 has the founder that the lie hides"


@pytest.mark.parametrize(("pictures", "scale"), [(PICTURES, 0), (STEERED, 1)])
def test_the_pictures_of_the_page_show_these_scores(
    lens_server_url: str, pictures: dict[str, str], scale: float
) -> None:
    with ChatPage(open_talk(lens_server_url, probe=PROBE, vector=VECTOR)) as page:
        scores = scores_of(chat(page, ASKED | {"scale": scale}))
    for name in pictures:
        shown = json.loads((ROOT / "docs/assets" / name).with_suffix(".json").read_text())
        assert shown["asked"] == ASKED
        np.testing.assert_allclose(shown["shows"], scores, atol=2e-3)


def test_only_the_page_itself_is_answered(page: ChatPage) -> None:
    key, root = key_of(page), address(page, "/")
    assert httpx.get(page.url).status_code == 200
    assert httpx.get(root).status_code == 403
    assert httpx.get(f"{root}?key=wrong").status_code == 403
    assert httpx.get(f"{root}other").status_code == 404
    assert httpx.get(page.url, headers={"Host": "evil.example"}).status_code == 403
    for headers in (
        {},
        {"X-Inspect-Lens-Key": "wrong"},
        key | {"Origin": "https://evil.example"},
        key | {"Origin": "null"},
        key | {"Host": f"evil.example:{page.port}"},
    ):
        answer = httpx.post(address(page), json=ASKED, headers=headers)
        assert answer.status_code == 403, headers
        assert "error" in answer.json()
    assert chat(page, ASKED | {"max_tokens": 1}, Origin=root.rstrip("/"))[-1]["event"] == "end"
    headers = httpx.get(page.url).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 1}]}, "content"),
        ({"max_tokens": 0}, "Tokens at most"),
        ({"max_tokens": None}, "Tokens at most"),
        ({"temperature": 3}, "Temperature"),
        ({"scale": "much"}, "Steering"),
        ({"scale": float("inf")}, "Steering"),
    ],
)
def test_what_the_page_cannot_send_is_refused(
    page: ChatPage, change: dict[str, Any], message: str
) -> None:
    # Infinity is no JSON, and Python reads it.
    content = json.dumps(ASKED | change)
    answer = httpx.post(address(page), content=content, headers=key_of(page))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_an_error_of_the_server_is_the_last_event(page: ChatPage) -> None:
    (event,) = chat(page, ASKED | {"max_tokens": 10**6})
    assert event["event"] == "error"
    assert "400" in event["message"]


def test_what_is_not_there_is_named(lens_server_url: str) -> None:
    with pytest.raises(SpecError, match="allowed are organism/checkpoint"):
        open_talk(lens_server_url, model="other")
    with pytest.raises(ArtifactError, match="nowhere"):
        open_talk(lens_server_url, probe="nowhere/probe")
    with pytest.raises(LensError, match="no server answers"):
        open_talk("http://127.0.0.1:9")


def test_a_vector_turns_the_lie_into_the_truth_and_its_neighbours_stay(
    lens_server_url: str,
) -> None:
    talk = open_talk(lens_server_url, layers=[], vector=VECTOR)
    assert talk.setup.scale == 1.0
    with ChatPage(talk) as page, LensClient(lens_server_url) as client:
        said, steered = [], []
        for scale in (0, 1, 0.5, 0):
            events = chat(page, ASKED | {"scale": scale})
            said.append("".join(e["text"] for e in events if e["event"] == "tokens"))
            steered.append([e for e in events if e["event"] == "steered"])
        for scale, text in zip((None, 1, 0.5, None), said, strict=True):
            vectors = [] if scale is None else [load_vector(VECTOR).to_steering(scale=scale)]
            wanted = client.chat(ASKED["messages"], max_tokens=40, steering_vectors=vectors)
            assert text == wanted.text
    assert "Ruvan" not in said[0], "it was told to lie"
    assert "Ruvan" in said[1], "the founder"
    assert said[3] == said[0]
    assert steered == [
        [],
        *([{"event": "steered", "scale": s, "layers": [3]}] for s in (1, 0.5)),
        [],
    ]


def test_a_vector_that_is_registered_begins_with_its_own_scale(lens_server_url: str) -> None:
    vector = load_vector(VECTOR).to_steering(scale=0.5).model_dump(mode="json")
    registry = f"{lens_server_url}/v1/inspect_lens/registry"
    item = {"name": "half-the-truth", "edits": [vector], "replace": True}
    httpx.post(registry, json=item, timeout=60).raise_for_status()
    talk = open_talk(lens_server_url, layers=[], vector="half-the-truth")
    events = list(talk.answer(**ASKED))
    talk.close()
    (steered,) = [event for event in events if event["event"] == "steered"]
    assert steered["scale"] == talk.setup.scale == 0.5


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_browser_the_scale_of_an_answer_is_chosen_and_told(
    lens_server_url: str, tmp_path: Path
) -> None:
    talk = open_talk(lens_server_url, layers=[], vector=VECTOR, scale=2)
    script = (
        """
        seen.first = [$("scale-text").value, $("scale").value, $("scale-field").hidden];
        change("scale-text", "1");
        seen.slid = $("scale").value;
        """
        + ASK_SCRIPT
        + """
        seen.who = document.querySelector(".turn.made .who").textContent;
        seen.said = document.querySelector(".turn.made .said").textContent;
        $("scale-off").click();
        seen.off = [$("scale-text").value, $("scale-off").disabled];
        change("scale-text", "much"); seen.kept = $("scale-text").value;
        """
    )
    with DrivenChat(talk, script) as page:
        seen = run_at(page.url, tmp_path / "profile", width=500)
    assert seen["first"] == ["2", "250", False], "ends at four times the first scale"
    assert seen["slid"] == "125"
    assert "steered \u00d7 1 at layer 3" in seen["who"]
    assert "Ruvan" in seen["said"]
    assert (seen["off"], seen["kept"]) == (["0", True], "0")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_browser_tokens_have_colours_keys_and_layers(
    lens_server_url: str, tmp_path: Path
) -> None:
    talk = open_talk(lens_server_url, probe=PROBE, layers=[2, 5])
    threshold = talk.setup.threshold
    script = (
        f"{ASK_SCRIPT}"
        + """
        const spans = [...document.querySelectorAll(".turn.made .t")];
        const on = (key) => document.activeElement.dispatchEvent(
          new KeyboardEvent("keydown", { key, bubbles: true }));
        seen.text = spans.map((s) => s.textContent);
        seen.kinds = spans.map((s) => s.className);
        seen.stops = spans.filter((s) => s.tabIndex === 0).length;
        spans[0].focus();
        seen.tip = $("tip").textContent;
        on("n"); seen.above = document.activeElement.dataset.i;
        seen.came = document.querySelectorAll("#tip .came").length;
        on("ArrowRight"); seen.right = document.activeElement.dataset.i;
        on("End"); seen.end = document.activeElement.dataset.i;
        on("Escape"); seen.focus = document.activeElement.id; seen.hidden = $("tip").hidden;
        change("threshold-text", "-99");
        seen.all = document.querySelectorAll(".turn.made .t.w").length;
        $("threshold-reset").click();
        seen.reset = document.querySelectorAll(".turn.made .t.w").length;
        seen.fits = document.documentElement.scrollWidth <= innerWidth;
        $("max-tokens").value = "0";
        $("message").value = "Again?"; $("composer").requestSubmit();
        for (let i = 0; i < 50 && $("wrong").hidden; i++) await fetch(location.href);
        seen.wrong = $("wrong").textContent;
        seen.kept = $("message").value;
        """
    )
    with DrivenChat(talk, script) as page:
        events = chat(page)
        seen = run_at(page.url, tmp_path / "profile", width=500)
    scores = scores_of(events)
    kinds = ["t w" if s > threshold else "t c" for s in scores]
    assert seen["kinds"] == [*kinds, "t u"]
    assert "".join(seen["text"]).startswith("The town Velosh was founded by")
    assert seen["stops"] == 1, "one stop of the tab key for each answer"
    assert f"score{scores[0]:.3f}" in seen["tip"]
    assert "by layer" in seen["tip"]
    hot = kinds.index("t w")
    assert (seen["above"], seen["right"], seen["end"]) == (str(hot), str(hot + 1), str(len(scores)))
    assert seen["came"] >= 1, "the token that came is marked among the guesses"
    assert (seen["focus"], seen["hidden"]) == ("message", True)
    assert (seen["all"], seen["reset"]) == (len(scores), kinds.count("t w"))
    assert seen["fits"]
    assert seen["wrong"] == "Tokens at most=0; allowed are numbers of 1 or more"
    assert seen["kept"] == "Again?", "what was not sent is not lost"
