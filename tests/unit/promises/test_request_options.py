"""Every field of a request is an option of every surface, under one name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inspect_ai.model import GenerateConfig, get_model

from inspect_lens.client import LensClient
from inspect_lens.errors import SpecError
from inspect_lens.model import lens_config
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.model._request import read_body
from inspect_lens.spec import LENS_KEYS, OWN_WORDS, Hook, LensRequest, ProbeUse, parse_extra_args
from tests.kit.fake_server import FakeLensServer

ADD = {"op": "add", "vector": [1.0] * 8, "layers": [1]}
EXAMPLES: dict[str, Any] = {
    "edits": [ADD],
    "edits_named": ["v"],
    "probes": [ProbeUse(name="p")],
    "configs": "c",
    "server": False,
    "edits_meet": "error",
    "capture": [1],
    "hooks": [Hook(fn=print, layer_indices=[1])],
    "qk": [1],
    "lens": [1],
    "sink": "s",
    "open_gates": ["0" * 64],
    "skip_reading_prefix_cache": True,
    "stream_results": True,
}


def asked_as(name: str) -> LensRequest:
    """What a request that says it natively asks for."""
    value = EXAMPLES[name]
    asked = {"layers": value} if name == "capture" else value
    beside = {"lens": [1]} if name == "stream_results" else {}
    request = parse_extra_args({"inspect_lens": {name: asked, **beside}})
    assert request is not None
    return request


def test_each_field_has_an_example() -> None:
    assert set(EXAMPLES) == set(LensRequest.model_fields)
    assert not set(EXAMPLES) & set(GenerateConfig.model_fields)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_config_of_a_call_takes_it(name: str) -> None:
    given = {name: EXAMPLES[name]}
    if name == "stream_results":
        with pytest.raises(SpecError, match=r"read the stream with .*LensClient\.stream"):
            lens_config(**given)
        return
    request = read_body(lens_config(**given, base=GenerateConfig()).extra_body).request
    assert request is not None
    assert request.model_dump(mode="json") == asked_as(name).model_dump(mode="json")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_client_takes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def post(_: Any, path: str, body: Any, request: LensRequest | None) -> None:
        sent.extend((body, request))

    monkeypatch.setattr(LensClient, "_post", post)
    given = {name: EXAMPLES[name]} | ({"lens": [1]} if name == "stream_results" else {})
    LensClient("http://server", model="m").generate("hi", **given, min_p=0.1)
    body, request = sent
    assert getattr(request, name) == getattr(asked_as(name), name)
    assert body == {"prompt": "hi", "max_tokens": 16, "temperature": 0.0, "min_p": 0.1}


def test_the_client_joins_options_with_arguments() -> None:
    with FakeLensServer() as server:
        client = LensClient(server.url)
        client.generate("hi", edits=[ADD], edits_meet="error")
        request = parse_extra_args(server.requests[-1]["vllm_xargs"])
    assert request is not None
    assert (len(request.edits), request.edits_meet) == (1, "error")
    with pytest.raises(SpecError, match=r"qk and capture_qk: give one"):
        client.generate("hi", capture_qk=[1], qk=[1])
    with pytest.raises(SpecError, match="edits_meet"):
        client.generate("hi", edits=[ADD], edits_meet="never")
    with pytest.raises(SpecError, match=r"edits_met.*did you mean 'edits_meet'"):
        client.generate("hi", edits=[ADD], edits_met="error")


@pytest.mark.parametrize(
    "name", sorted(set(EXAMPLES) - {"capture", "edits", "edits_meet", "probes"})
)
def test_the_model_says_where_it_is_said_instead(name: str) -> None:
    where = r"LensClient\.stream" if name == "stream_results" else rf"_(config|lens)\({name}=…\)"
    with pytest.raises(PrerequisiteError, match=rf"-M {name}=.*{where}"):
        get_model("vllm-lens/org/tiny", memoize=False, **{name: EXAMPLES[name]})


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_body_that_says_it_outside_of_the_request_is_refused(name: str) -> None:
    assert name in OWN_WORDS or name in LENS_KEYS


def test_one_edit_or_vector_needs_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(LensClient, "_post", lambda _, path, body, request: sent.append(request))
    client = LensClient("http://server", model="m")
    vector = {"activations": [[1.0] * 8], "layer_indices": [1]}
    hook = Hook(fn=print, layer_indices=[1])
    client.generate("hi", edits=ADD, steering_vectors=vector, hooks=hook)
    client.generate("hi", edits=[ADD], steering_vectors=[vector], hooks=[hook])
    one, listed = sent
    assert (len(one.edits), len(one.hooks)) == (2, 1)
    assert one.model_dump(mode="json") == listed.model_dump(mode="json")


def test_an_argument_that_nobody_reads_is_named_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"edits_met: is no argument .*did you mean 'edits_meet'\?"):
        lens_config(edits_met="error")
    with pytest.raises(SpecError, match=r"temperature='hot'; allowed is a number"):
        lens_config(temperature="hot")


def test_rows_of_numbers_say_which_queries_and_keys() -> None:
    with FakeLensServer() as server:
        LensClient(server.url).generate("hi", qk=np.asarray([1, 2]))
        request = parse_extra_args(server.requests[-1]["vllm_xargs"])
    assert request is not None
    assert request.qk is not None
    assert request.qk.layers == (1, 2)
