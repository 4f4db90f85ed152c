"""Whatever is wrong with a request is said when its generation is called, and again when sealed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import pickle
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from inspect_lens._engine.protocol.messages import Envelope, Packed
from inspect_lens._vllm.frontend import admission, state, wrappers
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.results.streaming import streamed_kinds
from inspect_lens.errors import (
    CapacityError,
    CaptureError,
    LensError,
    SpecError,
    UnsupportedError,
)
from inspect_lens.spec import (
    ENVELOPE_KEY,
    EngineEdits,
    EngineProbe,
    SteeringVector,
    parse_edits,
)
from inspect_lens.spec._request import BYTES_BESIDE, Budget, Cache
from tests.unit.vllm.frontend.test_front import facts, probe

N_PROMPT, MAX_TOKENS = 3, 2
VECTOR = {"activations": np.ones((1, 8)), "layer_indices": [1]}
ROWS = {"activations": np.ones((1, 6, 8)), "layer_indices": [1]}
"""For positions 0 to 5, of which a request of 3 + 2 tokens feeds four."""


def extra(**lens: Any) -> dict[str, Any]:
    return {"inspect_lens": lens}


def steer(**changes: Any) -> dict[str, Any]:
    return {"apply_steering_vectors": [SteeringVector(**{**VECTOR, **changes})]}


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (extra(capture={"positions": [True]}), {}, "mask has 1 booleans"),
    (extra(capture={"positions": [4]}), {}, "outside this request"),
    (extra(capture={"positions": [0], "phase": "decode"}), {}, "none of capture.positions"),
    (extra(capture={}, skip_reading_prefix_cache=False), {}, "skip_reading_prefix_cache=false"),
    (
        extra(probes=[{"name": "p", "positions": "all"}], skip_reading_prefix_cache=False),
        {},
        "skip_reading_prefix_cache=false",
    ),
    (extra(probes=[{"name": "p", "positions": [9]}]), {}, r"probes\[0\].positions"),
    (steer(position_indices=[7], activations=np.ones((1, 1, 8))), {}, r"edits\[0\].positions"),
    (steer(**ROWS), {}, r"edits\[0\].positions"),
    (steer(position_indices=[0], phase="decode"), {}, "selects no token"),
    (extra(capture={"positions": [4]}), {"trace_decode_token_ids": [1, 2]}, "outside"),
    (extra(capture={"layers": [9]}), {}, "layers 0 to 3"),
    (extra(probes=["q"]), {}, "no probe is registered as 'q'"),
    (extra(edits_named=[{"name": "p"}]), {}, "no edits are registered as 'p'"),
]
"""What is asked, sampling parameters, and what is said."""

RIGHT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (extra(capture={}), {}),
    (extra(capture={"positions": [True, False, True]}), {}),
    (extra(capture={"positions": [3]}), {}),
    (extra(capture={"positions": [40]}), {"max_tokens": None}),
    (extra(capture={"positions": "completion"}, skip_reading_prefix_cache=False), {}),
    (extra(capture={"transport": "binary"}), {}),
    (extra(capture={"transport": "binary"}), {"n": 2}),
    (steer(position_indices=[2], activations=np.ones((1, 1, 8))), {}),
    (extra(probes=["p"]), {}),
]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of the second of two engines of a process."""
    front = FrontEnd()
    front.engines = [facts(5), facts(8)]
    front.register("p", probe(8))
    assert isinstance(front.registry.probes["p"], EngineProbe)
    monkeypatch.setattr(state._Holder, "front_end", front)
    yield SimpleNamespace(
        inspect_lens_facts=facts(8),
        inspect_lens_refusal=None,
        model_config=SimpleNamespace(max_model_len=64),
    )
    # Its addresses are the process's, of which every test has to have some.
    front.results.the_collector().close()


def parameters(extra_args: dict[str, Any], changes: dict[str, Any]) -> Any:
    plain: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "n": 1,
        "skip_reading_prefix_cache": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_clone": True,
        "stream_interval": None,
        "trace_decode_token_ids": None,
    }
    return SimpleNamespace(**{**plain, **changes}, extra_args=extra_args)


def call(processor: Any, prompt: Any, params: Any) -> Any:
    """Call generation without ever iterating it: a server has sent no status yet."""

    async def original(*args: Any, **kwargs: Any) -> Any:
        for nothing in args[:0]:
            yield nothing

    generate = wrappers.FRONT_END_WRAPPERS["async_generate"](original)
    return generate(
        SimpleNamespace(input_processor=processor, engine_core=None), prompt, params, "r"
    )


def process(processor: Any, prompt: Any, params: Any) -> Any:
    """Process the request as vLLM does, which works out what may be sampled."""

    def original(self: Any, request_id: str, prompt: Any, params: Any) -> Any:
        most = 61 if params.max_tokens is None else params.max_tokens
        trace = params.trace_decode_token_ids
        params.max_tokens = min(len(trace), most) if trace else most
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        return SimpleNamespace(
            prompt_token_ids=getattr(ids, "prompt_token_ids", ids),
            prompt_embeds=prompt.get("prompt_embeds") if isinstance(prompt, dict) else None,
            sampling_params=params,
            cache_salt=None,
        )

    wrapped = wrappers.FRONT_END_WRAPPERS["process_inputs"](original)
    return wrapped(processor, "r", prompt, params)


IDS = {"prompt_token_ids": [1, 2, 3]}
PROMPTS = [IDS, SimpleNamespace(**IDS)]


@pytest.mark.parametrize("edge", [call, process])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["dict", "object"])
@pytest.mark.parametrize(("asked", "changes", "message"), WRONG)
def test_what_is_wrong_is_said_at_both_edges(
    processor: Any,
    edge: Callable[..., Any],
    prompt: Any,
    asked: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises((SpecError, UnsupportedError), match=message):
        edge(processor, prompt, parameters(asked, changes))


@pytest.mark.parametrize("edge", [call, process])
def test_outputs_of_several_steps_are_refused_where_drafts_may_be_rejected(
    processor: Any, edge: Callable[..., Any]
) -> None:
    for interval in (None, 1, 3):
        edge(processor, IDS, parameters(extra(capture={}), {"stream_interval": interval}))
    processor.inspect_lens_facts = replace(facts(8), is_speculative=True)
    edge(processor, IDS, parameters(extra(capture={}), {"stream_interval": 1}))
    with pytest.raises(UnsupportedError, match="stream_interval"):
        edge(processor, IDS, parameters(extra(capture={}), {"stream_interval": 3}))


def test_a_sealed_request_has_the_probe_that_its_name_stands_for(processor: Any) -> None:
    front = state.front_end()
    found = []
    for threshold in (1.0, 2.0):
        other = EngineProbe(
            layers=(1,), tensors={"weight": np.full((1, 8), threshold)}, threshold=threshold
        )
        front.unregister("p")
        front.register("p", other)
        core = process(processor, IDS, parameters(extra(probes=["p"]), {}))
        packed = core.sampling_params.extra_args["_inspect_lens"]
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(packed))
        assert "uses" not in arrived, "workers have no use for it"
        assert Envelope.unpack(arrived).probes == packed.envelope.probes
        assert packed.envelope.probes.names == (other.sha256,)
        reading = admission._reading(state.front_end(), packed, N_PROMPT, N_PROMPT + 1)
        assert reading is not None
        found.append(reading.receipts()[0].sha256)
        for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            again = admission._reading(state.front_end(), copied, N_PROMPT, N_PROMPT + 1)
            assert again is not None
            assert again.receipts()[0].sha256 == other.sha256
    assert len(set(found)) == 2
    front.unregister("p")
    for edge in (call, process):
        with pytest.raises(SpecError, match="no probe is registered as 'p'"):
            edge(processor, IDS, parameters(extra(probes=["p"]), {}))


@pytest.mark.parametrize("prompt", PROMPTS, ids=["dict", "object"])
@pytest.mark.parametrize(("asked", "changes"), RIGHT)
def test_what_is_right_passes_both_edges(
    processor: Any, prompt: Any, asked: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert call(processor, prompt, parameters(asked, changes)).__aiter__
    params = parameters(asked, changes)
    core = process(processor, prompt, params)
    assert ENVELOPE_KEY in core.sampling_params.extra_args
    assert params.extra_args is asked, "the caller's parameters stay as they are"


# A chat with parts that are embeddings has both: other embeddings have the same ids, by which rows
# of earlier prompts are found, and a prompt is fed again.
@pytest.mark.parametrize("beside", [{}, IDS], ids=["embeddings", "beside tokens"])
def test_a_prompt_not_of_tokens_alone_is_refused_at_both_edges(
    processor: Any, beside: dict[str, Any]
) -> None:
    prompt = beside | {"prompt_embeds": np.zeros((3, 8))}
    for edge in (call, process):
        with pytest.raises(UnsupportedError, match="prompt embeddings"):
            edge(processor, prompt, parameters(extra(capture={}), {}))


def test_tokens_of_an_image_that_did_not_come_are_refused_at_both_edges(processor: Any) -> None:
    processor.inspect_lens_facts = replace(facts(8), placeholders=frozenset({2}))
    params = parameters(extra(capture={}), {})
    for edge in (call, process):
        with pytest.raises(UnsupportedError, match=r"token 2 at position 1 .* an image"):
            edge(processor, IDS, params)
    # With the image, they are judged when they have their places.
    assert call(processor, IDS | {"multi_modal_data": {"image": 0}}, params)


@pytest.mark.parametrize(
    ("lens", "stop", "is_folded"),
    [
        ({}, [], True),
        ({}, ["."], False),
        ({"probes": [{"name": "p", "alarm": "stop", "threshold": 1.0}]}, [], False),
        ({"probes": [{"name": "p", "alarm": "flag", "threshold": 1.0}]}, [], True),
    ],
)
def test_what_the_front_end_may_end_is_not_reduced_on_the_device(
    processor: Any, lens: dict[str, Any], stop: list[str], is_folded: bool
) -> None:
    asked = extra(capture={"reduce": "mean"}, **lens)
    core = process(processor, IDS, parameters(asked, {"stop": stop, "max_tokens": 20}))
    envelope = Envelope.unpack(core.sampling_params.extra_args[ENVELOPE_KEY])
    assert envelope.capture is not None
    assert envelope.capture.is_folded == is_folded


def test_a_prompt_in_pieces_is_refused_when_generation_is_called(processor: Any) -> None:
    async def pieces() -> AsyncGenerator[Any, None]:
        yield None

    with pytest.raises(UnsupportedError, match="streaming input"):
        call(processor, pieces(), parameters(extra(capture={}), {}))


def test_text_is_judged_when_it_has_its_tokens(processor: Any) -> None:
    params = parameters(extra(capture={"positions": [9]}), {})
    assert call(processor, "Hello", params).__aiter__


def test_an_engine_that_is_not_served_says_so_at_both_edges(processor: Any) -> None:
    processor.inspect_lens_facts, processor.inspect_lens_refusal = None, "it is disabled"
    for edge in (call, process):
        with pytest.raises(LensError, match="it is disabled"):
            edge(processor, IDS, parameters(extra(capture={}), {}))


def test_persistent_hooks_run_on_prompts_of_tokens_only(processor: Any) -> None:
    processor.inspect_lens_book = SimpleNamespace(hooks=[("h", None)])
    with pytest.raises(UnsupportedError, match="prompt embeddings"):
        call(processor, {"prompt_embeds": [[0.0]]}, parameters({}, {}))


def test_a_sealed_request_and_a_plain_one_are_not_judged(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_placed", lambda *a, **k: pytest.fail("judged"))
    plain: list[dict[str, Any]] = [{}, {ENVELOPE_KEY: Packed()}, {"other": 1}]
    for extra_args in plain:
        assert call(processor, IDS, parameters(extra_args, {})).__aiter__
    with pytest.raises(SpecError, match="reserved for the engine"):
        call(processor, IDS, parameters({ENVELOPE_KEY: {}}, {}))


def sealed(processor: Any, asked: dict[str, Any], n_prompt: int = N_PROMPT, **changes: Any) -> Any:
    """The packed envelope that travels with a request."""
    params = parameters(asked, changes)
    core = process(processor, {"prompt_token_ids": [0] * n_prompt}, params)
    return core.sampling_params.extra_args[ENVELOPE_KEY]


@pytest.mark.parametrize(
    ("probe", "kind", "is_live"),
    [
        ({"tokens": True}, "DELTA", True),
        ({"tokens": True}, "CUMULATIVE", True),
        ({"tokens": True}, "FINAL_ONLY", False),
        ({}, "DELTA", False),
        ({"alarm": "flag", "threshold": 1.0}, "DELTA", False),
        ({"alarm": "stop", "threshold": 1.0}, "FINAL_ONLY", True),
    ],
)
def test_scores_that_are_looked_at_as_they_come_do_not_wait(
    processor: Any, probe: dict[str, Any], kind: str, is_live: bool
) -> None:
    from vllm.sampling_params import RequestOutputKind

    asked = extra(probes=[{"name": "p", **probe}])
    # What was sealed for the one is not taken for the other.
    for output_kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind[kind]):
        packed = sealed(processor, asked, output_kind=output_kind)
        for envelope in (packed, msgspec.msgpack.decode(msgspec.msgpack.encode(packed))):
            read = Envelope.unpack(envelope).probes
            expected = is_live if output_kind.name == kind else probe.get("alarm") == "stop"
            assert read.is_live == expected


def test_who_streams_what_a_name_stands_for_is_not_told_of_what_he_never_asked(
    processor: Any,
) -> None:
    """Neither that a name has nothing that comes by token, nor what its sink records."""
    from vllm.sampling_params import RequestOutputKind

    front = state.front_end()
    front.register("v", EngineEdits(edits=[SteeringVector(**VECTOR)]))
    sink = {"store": f"memory://{uuid.uuid4().hex}", "layers": [1], "positions": "last"}
    front.sinks.learn(processor.inspect_lens_facts, json.dumps({"s": sink}))
    for asked in ({"edits_named": ["v"]}, {"edits_named": ["v"], "sink": "s"}):
        named = extra(**asked, stream_results=True)
        packed = sealed(processor, named, output_kind=RequestOutputKind.DELTA)
        assert streamed_kinds(Envelope.unpack(packed)) == []
        with pytest.raises(SpecError, match="stream_results: this answer comes as a whole"):
            sealed(processor, named, output_kind=RequestOutputKind.FINAL_ONLY)


def test_what_tells_requests_apart_is_never_shared(processor: Any) -> None:
    reduced = extra(capture={"layers": [1], "reduce": "mean"})
    tokens = [Envelope.unpack(sealed(processor, reduced)).capture.token for _ in range(2)]
    assert tokens[0] != tokens[1]


def test_steering_is_sealed_once_until_a_request_that_has_it_fails(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steered = steer()
    one = sealed(processor, steered)
    assert sealed(processor, steered) is one
    salt = Envelope.unpack(one).steer_hash
    state.front_end().results._failures[salt.rpartition(":")[2]] += 1
    other = sealed(processor, steered)
    assert Envelope.unpack(other).steer_hash != salt, "its cache blocks are not to be trusted"
    assert sealed(processor, steered) is other
    least: Cache[Any, Any] = Cache(4, Budget(16 * (BYTES_BESIDE + 31)))
    monkeypatch.setattr(state.front_end(), "known", least)
    large = steer()
    assert sealed(processor, large) is not sealed(processor, large), "32 bytes of vectors"


def test_a_name_that_stands_for_another_probe_is_sealed_anew(processor: Any) -> None:
    asked = extra(probes=["p"])
    one = sealed(processor, asked)
    registry = state.front_end().registry
    registry.remove("p")
    registry.add("p", EngineProbe(layers=(2,), tensors={"weight": np.ones((1, 8))}))
    other = sealed(processor, asked)
    assert Envelope.unpack(other).probes.names != Envelope.unpack(one).probes.names
    assert registry.reads_of(other).probes == (registry.probes["p"],)


@pytest.mark.parametrize(
    "error",
    [SpecError("gone"), UnsupportedError("no"), CaptureError("lost"), CapacityError("full")],
)
def test_an_error_that_vllm_wraps_without_a_word_is_told(processor: Any, error: LensError) -> None:
    async def outputs(self: Any) -> AsyncGenerator[Any, None]:
        for nothing in ():
            yield nothing
        raise RuntimeError from error

    async def read() -> None:
        async for _ in wrappers.FRONT_END_WRAPPERS["async_generate"](outputs)(engine):
            pass

    engine = SimpleNamespace(input_processor=processor, engine_core=None)
    with pytest.raises(Exception, match=str(error)) as told:
        asyncio.run(read())
    assert isinstance(told.value, type(error)) or isinstance(error, CapacityError)


def test_a_request_that_an_engine_of_this_process_does_not_take_is_forgotten() -> None:
    def add_request(self: Any, request_id: str) -> None:
        added = wrappers._ADDED.get()
        assert added is not None
        added |= {"0_" + request_id: request_id, "1_" + request_id: request_id}
        raise OverflowError("no message can hold it")

    forgotten: list[Any] = []
    engine = SimpleNamespace(abort_request=lambda ids, internal: forgotten.append((ids, internal)))
    with pytest.raises(OverflowError):
        wrappers.FRONT_END_WRAPPERS["engine_add_request"](add_request)(engine, "0")
    assert forgotten == [(["0"], True)]
    assert wrappers._ADDED.get() is None


@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_a_call_has_added_are_listed_no_longer_than_it_adds(
    processor: Any, fails: bool
) -> None:
    listed: list[Any] = []

    async def outputs(self: Any) -> AsyncGenerator[Any, None]:
        listed.append(wrappers._ADDED.get())
        if fails:
            raise RuntimeError("the engine")
        yield SimpleNamespace(outputs=[], finished=False)

    async def read() -> None:
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            async for _ in wrappers.FRONT_END_WRAPPERS["async_generate"](outputs)(engine):
                break  # and is closed later, in whichever context
        assert wrappers._ADDED.get() is None, "the caller adds more, by itself"

    engine = SimpleNamespace(
        input_processor=processor, engine_core=None,
        output_processor=SimpleNamespace(request_states={}),
    )  # fmt: skip
    asyncio.run(read())
    assert listed == [{}]


def test_beams_of_an_engine_are_refused_where_something_acts_on_all_requests(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beam_search = wrappers.FRONT_END_WRAPPERS["beam_search"](lambda *args: args)
    assert beam_search("llm", "prompts", "params") == ("llm", "prompts", "params")
    server = SimpleNamespace(registry=SimpleNamespace(server=object()))
    monkeypatch.setattr(wrappers, "front_end", lambda: server)
    with pytest.raises(UnsupportedError, match="beam_search cannot be used with what"):
        beam_search("llm", "prompts", "params")


def test_an_error_of_vllm_keeps_what_it_says_and_holds_no_output(processor: Any) -> None:
    class Output(SimpleNamespace): ...

    given: list[Any] = []

    async def outputs(self: Any) -> AsyncGenerator[Any, None]:
        try:
            one = Output(outputs=[], finished=False)
            given.append(weakref.ref(one))
            yield one
            del one
            raise KeyError("where it comes from")
        except KeyError:
            raise RuntimeError("the engine")  # noqa: B904 - its context is looked at

    async def read() -> bool:
        try:
            async for _ in wrappers.FRONT_END_WRAPPERS["async_generate"](outputs)(engine):
                del _
        except RuntimeError as error:
            return isinstance(error.__context__, KeyError) and not error.__suppress_context__
        return False

    engine = SimpleNamespace(input_processor=processor, engine_core=None)
    gc.disable()
    try:
        assert asyncio.run(read())
        assert [one() for one in given] == [None], "without the garbage collector"
    finally:
        gc.enable()


def gated(**gate: Any) -> dict[str, Any]:
    when = {"direction": [1.0] * 8, "layer": 2, "scope": "rest", **gate}
    edit = {"op": "add", "vector": [1.0] * 8, "layers": [1], "positions": "completion"}
    return {"edits": [{**edit, "when": when}]}


def test_only_the_mean_of_a_prompt_needs_all_of_it_computed(processor: Any) -> None:
    mean, last = gated(reads="prompt_mean"), gated(reads="last_prompt")
    for asked, is_whole in ((mean, True), (last, False), (gated(), False)):
        core = process(processor, IDS, parameters(extra(**asked), {}))
        assert core.sampling_params.skip_reading_prefix_cache is (True if is_whole else None)
        packed = core.sampling_params.extra_args["_inspect_lens"]
        arrived = Envelope.unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(packed)))
        read = arrived.read[-1]
        assert (read is None) == ("reads" not in asked["edits"][0]["when"])
        if read is not None:
            assert (read.lo, read.hi) == (0 if is_whole else N_PROMPT - 1, N_PROMPT)
            # The scheduler counts its rows, of one tap.
            assert packed["kept"] == (1, read.lo, read.hi)
        # What lies in front of the last prompt token is shared with plain requests.
        assert f"@{N_PROMPT if read is None else N_PROMPT - 1}:" in core.cache_salt
    for edge in (call, process):
        asked = {**mean, "skip_reading_prefix_cache": False}
        with pytest.raises(SpecError, match="gate of prompt tokens"):
            edge(processor, IDS, parameters(extra(**asked), {}))


def test_blocks_of_a_conversation_whose_gate_is_open_are_others(processor: Any) -> None:
    asked = gated(conversation=True)
    (edit,) = parse_edits(asked["edits"])
    (gate,) = edit.gates
    salts = [
        process(processor, IDS, parameters(extra(**asked, **opened), {})).cache_salt
        for opened in ({}, {"open_gates": [gate.key]}, {"open_gates": ["0" * 64]})
    ]
    assert salts[0] == salts[2] != salts[1]


@pytest.mark.parametrize("asked", [{"inspect_lens": {}}, {"output_residual_stream": False}])
def test_a_request_that_asks_for_nothing_goes_on_as_a_plain_one(
    processor: Any, asked: dict[str, Any]
) -> None:
    core = process(processor, IDS, parameters(asked, {}))
    assert core.sampling_params.extra_args is None
    came: list[Any] = []
    add = wrappers.FRONT_END_WRAPPERS["add_request"](lambda self, request, *rest: came.append(1))
    add(None, core, "a prompt")
    assert came
