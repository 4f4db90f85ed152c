from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, Scorer, mean, scorer
from inspect_ai.solver import TaskState

from inspect_lens.errors import SpecError
from inspect_lens.model import lens_config
from inspect_lens.model._request import Settled, declines_steering, is_lens_call, read_body
from inspect_lens.spec import (
    Ablate,
    CaptureSpec,
    LensRequest,
    LogitLens,
    ProbeUse,
    SteeringVector,
)
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def _vector(scale: float = 1.0) -> SteeringVector:
    return SteeringVector(activations=np.ones((1, 4)), layer_indices=[2], scale=scale)


def test_a_base_is_kept_and_added_to() -> None:
    base = GenerateConfig(
        temperature=0.5, extra_body={**THINKING, "extra_args": {"output_residual_stream": [1]}}
    )
    config = lens_config(base=base, steer=_vector(), max_tokens=7)
    assert (config.temperature, config.max_tokens) == (0.5, 7)
    assert config.extra_body is not None
    assert config.extra_body["chat_template_kwargs"] == {"enable_thinking": True}
    request = read_body(config.extra_body).request
    assert request is not None
    assert request.capture == CaptureSpec(layers=(1,))
    assert len(request.edits) == 1
    assert base.extra_body == {**THINKING, "extra_args": {"output_residual_stream": [1]}}
    again = lens_config(base=config, capture={"layers": [3], "positions": "prompt"})
    request = read_body(again.extra_body).request
    assert request is not None
    assert request.capture == CaptureSpec(layers=(3,), positions="prompt")
    assert len(request.edits) == 1
    bare = read_body(lens_config(base=config, steer=[]).extra_body).request
    assert bare == LensRequest(capture=CaptureSpec(layers=(1,)))


@pytest.mark.parametrize("body", [None, THINKING])
def test_what_a_scope_asks_beside_a_capture_is_kept(body: dict[str, Any] | None) -> None:
    for more in (
        {"edits": (_vector(),)},
        {"edits": (Ablate(direction=np.ones(4), layers=[1]),)},
        {"lens": LogitLens(layers=[1], top_k=1)},
        {"probes": (ProbeUse(name="p"),)},
    ):
        scope = LensRequest(capture=CaptureSpec(layers=(1,)), **more)  # type: ignore[arg-type]
        # Judged when the scope was made, and for no call again.
        assert read_body(body, scope=scope).request is scope


def test_extra_body_merges_key_by_key() -> None:
    base = GenerateConfig(extra_body={"chat_template_kwargs": {"a": 1}, "top_k": 5})
    config = lens_config(base=base, capture=1, extra_body={"chat_template_kwargs": {"b": 2}})
    assert config.extra_body is not None
    assert config.extra_body["chat_template_kwargs"] == {"a": 1, "b": 2}
    assert config.extra_body["top_k"] == 5


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ("org/adapter", {"lora_name": "org/adapter", "lora_int_id": 1, "lora_path": "org/adapter"}),
        ("loaded", {"lora_name": "loaded", "lora_int_id": 1}),
        ({"lora_name": "x", "lora_path": "/p"}, {"lora_name": "x", "lora_path": "/p"}),
    ],
)
def test_adapters(lora: Any, expected: dict[str, Any]) -> None:
    assert lens_config(lora=lora).extra_body == {"lora_request": expected}


@pytest.mark.parametrize(
    "wrong", [{"capture": "x"}, {"lora": {}}, {"steer": [{"scale": 1}]}, {"capture": [-1.5]}]
)
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong)).rstrip("s")):
        lens_config(**wrong)


def test_nothing_asked_is_nothing_added() -> None:
    assert lens_config().model_dump(exclude_none=True) == {}


def test_a_scorer_keeps_the_body_of_its_task(server: FakeLensServer, model_of: GetModel) -> None:
    @scorer(metrics=[mean()])
    def again() -> Scorer:
        async def score(state: TaskState, target: Any) -> Score:
            config = lens_config(capture=[1], max_tokens=1)
            output = await model.generate(state.messages, config=config)
            return Score(value=output.metadata["activations"].n_prompt)

        return score

    model = model_of(server)
    task = Task(
        dataset=[Sample("hi there")], scorer=again(), config=GenerateConfig(extra_body=THINKING)
    )
    log = eval(task, model=model, display="none")[0]
    assert log.status == "success", log.error
    assert [body["chat_template_kwargs"] for body in server.requests] == [
        {"enable_thinking": True}
    ] * 2
    # The answer is continued, so that its tokens are read as the model wrote them.
    assert server.requests[1]["continue_final_message"] is True


KEYS = {"output_residual_stream": [1], "apply_steering_vectors": [_vector()]}
PLACES: list[dict[str, Any]] = [
    {"extra_args": KEYS},
    {"vllm_xargs": KEYS},
    KEYS,
    {"extra_args": {"output_residual_stream": "[1]"}, "apply_steering_vectors": _vector()},
]


@pytest.mark.parametrize("body", PLACES)
def test_a_key_is_found_wherever_it_stands(body: dict[str, Any]) -> None:
    expected = LensRequest(capture=CaptureSpec(layers=(1,)), edits=(_vector(),))
    read = read_body({**THINKING, **body})
    assert read.request is not None
    assert read.request.model_dump() == expected.model_dump()
    assert set(read.extra_body) == {"extra_args", *THINKING}
    assert is_lens_call(body)
    config = lens_config(base=GenerateConfig(extra_body=body), capture=[2])
    request = read_body(config.extra_body).request
    assert request is not None
    changed = expected.model_copy(update={"capture": CaptureSpec(layers=(2,))})
    assert request.model_dump() == changed.model_dump()
    assert set(config.extra_body or {}) == {"extra_args"}


def test_a_refusal_is_found_at_the_top_level() -> None:
    default = LensRequest(capture=CaptureSpec(layers=(3,)))
    assert read_body({}, default).request is default
    assert read_body({"output_residual_stream": False}, default).request is None
    assert declines_steering({"apply_steering_vectors": []})


def test_a_settled_body_that_somebody_changed_is_read_anew() -> None:
    default = LensRequest(capture=CaptureSpec(layers=[1]))
    asked = read_body(None, default)
    assert asked.request == default
    assert read_body(THINKING, default).extra_body == {**THINKING, **asked.extra_body}
    settled = Settled(read_body(None, default).extra_body)
    assert read_body(settled, default) == asked
    settled["extra_args"]["skip_reading_prefix_cache"] = True
    settled["top_k"] = 5
    changed = read_body(settled, default)
    assert changed.request == default.with_fields(skip_reading_prefix_cache=True)
    assert changed.extra_body["top_k"] == 5
    # What one call's body became is not what the next one gets.
    assert read_body(None, default) == asked
    assert read_body(Settled({"extra_args": {"output_residual_stream": [2]}}), default).request == (
        LensRequest(capture={"layers": [2]})
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"output_residual_steam": [1]}, "did you mean 'output_residual_stream'"),
        ({"extra_arg": {"output_residual_stream": [1]}}, "did you mean 'extra_args'"),
        ({"sampling_params": {"output_residual_stream": [1]}}, "nobody reads it there"),
        ({"capture": [1]}, "extra_body.capture: nobody reads it there"),
        ({"edits_named": []}, "extra_body.edits_named: nobody reads it there"),
        ({"output_residual_stream": [1], "extra_args": {"output_residual_stream": [2]}},
         "stands in extra_body.extra_args and in extra_body; give it once"),
        ({"extra_args": [1]}, "extra_body.extra_args=.*mapping"),
    ],
)  # fmt: skip
def test_what_nobody_would_read_is_refused(
    body: dict[str, Any], words: str, server: FakeLensServer, model_of: GetModel
) -> None:
    with pytest.raises(SpecError, match=words):
        read_body(body)
    task = Task(dataset=[Sample("hi")], config=GenerateConfig(extra_body=body))
    log = eval(task, model=model_of(server), display="none")[0]
    assert log.status == "error"
    assert server.requests == []


def test_fields_of_the_server_pass() -> None:
    body = {
        "chat_template_kwargs": {"enable_thinking": False}, "top_k": 4, "min_p": 0.1,
        "skip_special_tokens": False, "return_token_ids": True, "structured_outputs": {},
        "kv_transfer_params": {}, "cache_salt": "x", "priority": 1, "vllm_xargs": {"mine": [1]},
    }  # fmt: skip
    read = read_body(body)
    assert read.request is None
    assert {**read.extra_body, "vllm_xargs": read.extra_body["extra_args"]} == body | {
        "extra_args": {"mine": [1]}
    }


requests = st.builds(
    LensRequest,
    capture=st.none()
    | st.builds(
        CaptureSpec,
        layers=st.just("all") | st.lists(st.integers(0, 40), min_size=1).map(tuple),
        positions=st.sampled_from(["all", "last"])
        | st.lists(st.integers(-9, 9), min_size=1, unique=True).map(tuple),
        phase=st.sampled_from(["both", "prefill", "decode"]),
        reduce=st.sampled_from(["none", "mean", "last", "max", "norm"]),
        dtype=st.sampled_from(["model", "float32", "bfloat16", "float16"]),
        transport=st.sampled_from(["inline", "binary"]),
    )
    | st.builds(
        CaptureSpec,
        positions=st.sampled_from(["prompt", "completion", "last_prompt"])
        | st.lists(st.booleans(), min_size=1).map(lambda mask: (*mask, True)),
    ),
    skip_reading_prefix_cache=st.none() | st.booleans(),
)


@given(requests, st.floats(-4, 4))
def test_any_request_survives_the_config_and_the_wire(request: LensRequest, scale: float) -> None:
    from inspect_lens.spec import parse_extra_args, to_extra_args, to_wire_args

    steered = request.model_copy(update={"edits": (_vector(scale),)})
    for one in (request, steered):
        body = {"extra_args": to_extra_args(one)}
        typed = read_body(body)
        assert read_body(typed.extra_body).extra_body == typed.extra_body
        wire = parse_extra_args(to_wire_args(to_extra_args(one)))
        for back in (typed.request, wire):
            assert (back or LensRequest()).model_dump() == one.model_dump()
        assert is_lens_call(body) == (one != LensRequest())


def test_a_call_of_an_eval_is_not_streamed() -> None:
    asked = {"capture": {"layers": [1]}, "stream_results": True}
    with pytest.raises(SpecError, match=r"stream_results: Inspect reads.*LensClient.stream"):
        read_body({"inspect_lens": asked})
