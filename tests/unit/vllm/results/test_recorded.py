"""Requests that a rule records: whatever goes wrong is counted, and concerns no answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._vllm.frontend import admission, state, wrappers
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.registered.contents import SERVER_NAME, TIERS_KEY
from inspect_lens._vllm.results.choices import Ticket
from inspect_lens._vllm.sinks.process import SINK_KEY, Rule
from inspect_lens._vllm.sinks.recorder import Recorder
from inspect_lens._vllm.sinks.sink import Exchange
from inspect_lens.errors import SpecError
from inspect_lens.spec import ENVELOPE_KEY, NO_REQUEST, ServerConfig, Zero
from tests.kit.waiting import until
from tests.unit.vllm.results.test_results import FACTS


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontEnd]:
    made = FrontEnd()
    made.sinks.learn(
        FACTS,
        json.dumps({"r": {"store": f"memory://{uuid.uuid4().hex}", "layers": [1], "share": 1.0}}),
    )
    monkeypatch.setattr(state._Holder, "front_end", made)
    yield made
    made.waiting.shutdown()


def core_of(prompt: list[int] | None) -> Any:
    params = SimpleNamespace(
        max_tokens=4, stop=None, extra_args=None, skip_reading_prefix_cache=None, n=1,
        skip_clone=True, stream_interval=None,
    )  # fmt: skip
    return SimpleNamespace(
        prompt_token_ids=prompt, sampling_params=params, cache_salt=None, lora_request=None,
        mm_features=None, request_id="r-1", external_req_id="r",
    )  # fmt: skip


def rule_of(front: FrontEnd) -> tuple[Rule, Recorder]:
    rule = front.sinks.rule_for(FACTS, "r")
    assert rule is not None
    from inspect_lens._vllm.sinks import process

    return rule, process._recorders[rule.key]


def test_what_cannot_be_recorded_stays_as_it_is(front: FrontEnd) -> None:
    rule, recorder = rule_of(front)
    core = core_of(None)  # embeddings in the place of tokens
    admission.seal_recorded(core, SimpleNamespace(inspect_lens_facts=FACTS), rule)
    assert core.sampling_params.extra_args is None
    assert core.sampling_params.skip_reading_prefix_cache is None
    assert recorder.counts == {"failed": 1}


def test_a_prompt_without_its_images_is_not_recorded(front: FrontEnd) -> None:
    """Its rows would be those of another prompt; the request itself asks for none."""
    rule, recorder = rule_of(front)
    processor = SimpleNamespace(inspect_lens_facts=replace(FACTS, placeholders=frozenset({2})))
    core = core_of([1, 2, 3])
    assert not admission.seal_recorded(core, processor, rule)
    assert core.sampling_params.extra_args is None
    assert recorder.counts == {"failed": 1}
    core.mm_features = ["an image"]
    assert admission.seal_recorded(core, processor, rule)


def sealed(**book: Any) -> Any:
    """The envelope of a plain request of three tokens, as it is processed."""
    processor = SimpleNamespace(inspect_lens_facts=FACTS, inspect_lens_refusal=None, **book)
    params = core_of([1, 2, 3]).sampling_params

    def original(self: Any, request_id: str, prompt: Any, params: Any) -> Any:
        core = core_of(prompt)
        core.sampling_params = params
        return core

    wrapped = wrappers.FRONT_END_WRAPPERS["process_inputs"](original)
    core = wrapped(processor, "r", [1, 2, 3], params)
    return core.sampling_params.extra_args[ENVELOPE_KEY]


def act_on_all(front: FrontEnd) -> None:
    front.registry.add(SERVER_NAME, ServerConfig(edits=[Zero(layers=[1])]), replace=True)


def test_a_rule_beside_the_tier_waits_for_nothing(front: FrontEnd) -> None:
    act_on_all(front)
    packed = sealed()
    _key, use = packed[SINK_KEY]
    assert use["name"] == "r"
    assert not use["wait"]
    assert TIERS_KEY in packed
    assert packed.envelope.capture is not None


@pytest.mark.parametrize("where", ["compile", "seal_core"])
def test_a_rule_that_fails_leaves_the_tier_alone(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    act_on_all(front)
    _, recorder = rule_of(front)
    owner = front if where == "compile" else admission
    original = getattr(owner, where)

    def failing(*args: Any) -> Any:
        asked = args[0] if where == "compile" else args[1].asked
        if asked is not NO_REQUEST:
            raise SpecError("capture.positions: outside this request")
        return original(*args)

    monkeypatch.setattr(owner, where, failing)
    packed = sealed()
    assert recorder.counts == {"failed": 1}
    assert SINK_KEY not in packed
    assert packed.envelope.edited.edits


def test_a_request_with_persistent_hooks_keeps_its_results(front: FrontEnd) -> None:
    hook = SimpleNamespace(layer_indices=[1], content="c", fn=SimpleNamespace(sha256="a" * 64))
    book = SimpleNamespace(hooks=[("h", hook)], number=1)
    packed = sealed(inspect_lens_book=book)
    assert EAGER_KEY in packed
    assert SINK_KEY not in packed, "or its client would get no receipt"


def test_rows_that_never_come_are_a_failure_of_the_sink_alone(front: FrontEnd) -> None:
    rule, recorder = rule_of(front)
    core = core_of([1, 2, 3])
    admission.seal_recorded(core, SimpleNamespace(inspect_lens_facts=FACTS), rule)
    packed = core.sampling_params.extra_args[ENVELOPE_KEY]
    assert packed[SINK_KEY] == (rule.key, None)
    for key in ("a", "b", "c"):
        front.results.expect(
            key, packed, n_prompt=3, n_max=6, asked_by=Exchange(key, (1, 2, 3), "hi")
        )
    expected = front.results.expected("a")
    assert expected is not None
    assert expected.is_recorded
    front.results.timeout_s = 3600.0
    front.results.recorded.put(Ticket("a", n_completion=4, said=((4, 5, 6, 7), "so")))
    front.results.recorded.put(Ticket("b", n_completion=0))  # broken off before its first token
    front.results.abandon(["c"])
    front.results.recorded.put(Ticket("c", n_completion=4))
    assert not recorder.counts, "who hands a choice over does not wait for its rows"
    front.results.timeout_s = 0.0
    assert until(lambda: recorder.counts == {"failed": 1})
    assert front.results.n_open == 0
    assert front.results.recorded.take_unflushed() == ["a"]
    assert until(lambda: front.results.recorded._n_coming == 0)
