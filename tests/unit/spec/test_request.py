"""Every spelling of a request, and every way to get one wrong."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, Hook, LensRequest, SteeringVector
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    NATIVE_KEY,
    SITES,
    _request,
    check_request,
    parse_extra_args,
    resolve_positions,
    to_extra_args,
    to_wire_args,
)
from inspect_lens.spec._request import Budget, Cache
from tests.kit.facts import engine_facts

FACTS = engine_facts(layers=(0, 1, 3), ring_rows=32, bank_rows=5)


def vector(**changes: Any) -> SteeringVector:
    values: dict[str, Any] = {"activations": np.ones((1, 8)), "layer_indices": [1]}
    return SteeringVector(**(values | changes))


@pytest.mark.parametrize("extra", [None, {}, {"kv_transfer_params": {}}, {"mine": 1}])
def test_requests_of_others_are_left_alone(extra: Any) -> None:
    assert parse_extra_args(extra) is None


@pytest.mark.parametrize(
    ("value", "layers"),
    [(True, "all"), ("true", "all"), ([2, 1, 1], (1, 2)), ("[2]", (2,))],
)
def test_capture_keys_of_vllm_lens(value: Any, layers: Any) -> None:
    request = parse_extra_args({"output_residual_stream": value})
    assert request is not None
    assert request.capture == CaptureSpec(layers=layers)


@pytest.mark.parametrize("value", [False, None, "false"])
def test_a_false_capture_asks_for_nothing(value: Any) -> None:
    assert parse_extra_args({"output_residual_stream": value}) is None


def test_steering_as_objects_json_text_and_one_alone() -> None:
    v = vector()
    wire = v.model_dump(mode="json")
    forms: list[Any] = [[v], [wire], json.dumps([wire]), [json.dumps(wire)], v, wire]
    hashes = set()
    for form in forms:
        request = parse_extra_args({"apply_steering_vectors": form})
        assert request is not None
        hashes.add(request.edits[0].vector.sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ["capture", "qk", "lens"])
@pytest.mark.parametrize("layers", [[4], 4, (4,)])
def test_layers_alone_will_do_for_all_that_reads_layers(name: str, layers: Any) -> None:
    request = parse_extra_args({"inspect_lens": {name: layers}})
    assert getattr(request, name).layers == (4,)
    assert LensRequest(**{name: layers}) == request
    with pytest.raises(SpecError, match=rf"{name}\.layers='x'; allowed are 'all'"):
        parse_extra_args({"inspect_lens": {name: "x"}})


def test_the_native_key_takes_objects_and_json() -> None:
    native = {"capture": {"layers": [1], "positions": "prompt"}, "edits": [vector()]}
    request = parse_extra_args({"inspect_lens": native})
    assert request is not None
    assert request.capture == CaptureSpec(layers=(1,), positions="prompt")
    again = parse_extra_args({"inspect_lens": request.model_dump_json()})
    assert again is not None
    assert again.capture == request.capture
    assert again.edits[0].vector.sha256 == request.edits[0].vector.sha256
    assert parse_extra_args({"inspect_lens": request}) is request


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"output_residual_stream": [1], "oops": 1}, SpecError, "unknown key 'oops'"),
        ({"output_residual_stram": [1]}, SpecError, "did you mean 'output_residual_stream'"),
        ({"inspect_lens": {}, "output_residual_stream": [1]}, SpecError, "not both"),
        ({"inspect_lens": 7}, SpecError, "object"),
        ({"inspect_lens": {"capture": {"layers": ["a"]}}}, SpecError, "not an integer"),
        ({"output_residual_stream": 1}, SpecError, "allowed are true"),
        ({"output_residual_stream": "2"}, SpecError, "allowed are true"),
        ({"output_residual_stream": [1.0]}, SpecError, "not an integer"),
        ({"output_qk": [True]}, SpecError, "not an integer"),
        ({"skip_reading_prefix_cache": 1.0}, SpecError, "true and false"),
        ({"capture": {"layers": [1]}}, SpecError, "nobody reads it there"),
        ({"capture_layers": [1]}, SpecError, "the key is 'output_residual_stream'"),
        ({"activations_transport": "pigeon"}, SpecError, "base64"),
        ({"inspect_lens": {"capture": {"positions": "middle"}}}, SpecError, "middle"),
        ({"inspect_lens": {"capture": {"positions": [1, 1]}}}, SpecError, "twice"),
        ({"inspect_lens": {"capture": {"positions": [1, True]}}}, SpecError, "of booleans"),
        ({"inspect_lens": {"capture": {"positions": [False]}}}, SpecError, "selects none"),
        ({"inspect_lens": {"capture": {"reduce": "median"}}}, SpecError, "'mean'"),
        ({"inspect_lens": {"capture": {"dtype": "int8"}}}, SpecError, "'bfloat16'"),
        ({"inspect_lens": {"capture": {"phase": "late"}}}, SpecError, "'prefill'"),
        (
            {"inspect_lens": {"capture": {"phase": "decode", "positions": "prompt"}}},
            SpecError,
            "selects no token",
        ),
        (
            {"inspect_lens": {"capture": {"phase": "decode", "positions": [True]}}},
            SpecError,
            "a mask over the prompt selects no token",
        ),
        (
            {"inspect_lens": {"probes": [{"name": "p", "positions": "last"}]}},
            SpecError,
            "aggregate='last'",
        ),
        ({"inspect_lens": {"steer": []}}, SpecError, "'steer' is no field .*'edits' says the same"),
        ({"inspect_lens": {"steer_named": ["v"]}}, SpecError, "'edits_named' says the same"),
        ({"inspect_lens": {"output_qk": [1]}}, SpecError, "'qk' says the same"),
        ({"inspect_lens": {"captures": {}}}, SpecError, "did you mean 'capture'"),
        ({"apply_steering_vectors": [{"layer_indices": [1]}]}, SpecError, "activations is missing"),
        ({"apply_steering_vectors": [{"activations": [[1]]}]}, SpecError, "layer_indices is miss"),
        ({"output_residual_stream": {"a": 1}}, SpecError, "list of layers"),
        ({"apply_steering_vectors": 3}, SpecError, "has to be a SteeringVector"),
        ({"apply_steering_vectors": ["{"]}, SpecError, "not JSON"),
        ({"skip_reading_prefix_cache": "7"}, SpecError, "true and false"),
        ({"activations_transport": "pigeon", "output_residual_stream": [1]}, SpecError, "inline"),
        ({"apply_hooks": 3}, SpecError, "give a Hook"),
        ({"_inspect_lens": {}}, SpecError, "reserved"),
    ],
)
def test_a_wrong_request_is_named(extra: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_extra_args(extra)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": np.ones((1, 1, 1, 8))}, "shape"),
        ({"activations": np.ones((2, 8))}, "one entry per layer"),
        ({"layer_indices": [1, 1], "activations": np.ones((2, 8))}, "each once"),
        ({"scale": float("nan")}, "finite"),
        ({"activations": np.full((1, 8), np.inf)}, "infinity"),
        ({"activations": np.zeros((1, 8)), "norm_match": True}, "zero"),
        ({"position_indices": []}, "non-empty"),
        ({"position_indices": [0, 0]}, "twice"),
        ({"activations": np.ones((1, 3, 8)), "position_indices": [0]}, "one for each row"),
    ],
)
def test_a_wrong_vector_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vector(**changes)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (LensRequest(capture=CaptureSpec(layers=(4,))), SpecError, "layers 0 to 3"),
        (LensRequest(capture=CaptureSpec(layers=(2,))), UnsupportedError, "is not served at"),
        (LensRequest(capture=CaptureSpec()), UnsupportedError, "'all' needs each layer"),
        (LensRequest(capture=CaptureSpec(layers=(0, 1, 3))), UnsupportedError, "48 rows"),
        (LensRequest(edits=(vector(activations=np.ones((1, 9))),)), SpecError, "9 wide"),
        (
            LensRequest(edits=(vector(activations=np.ones((1, 6, 8))),)),
            UnsupportedError,
            "6 vectors",
        ),
    ],
)
def test_a_request_is_judged_by_the_engines_facts(
    request_: LensRequest, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_request(request_, FACTS)


def test_a_request_that_fits_passes() -> None:
    check_request(LensRequest(capture=CaptureSpec(layers=(0, 3)), edits=(vector(),)), FACTS)


def test_positions_resolve_against_the_prompt() -> None:
    def resolve(positions: Any) -> Any:
        return resolve_positions(positions, n_prompt=10, n_max=14, field="f")

    assert resolve("all") == range(14)
    assert resolve("prompt") == range(10)
    assert resolve("completion") == range(10, 14)
    assert resolve("last_prompt") == range(9, 10)
    assert resolve("last") == range(13, 14)
    assert resolve((True, False, True) + (False,) * 7) == (0, 2)
    assert resolve((-1, 0, 13)) == (9, 0, 13)
    for wrong in ((14,), (-11,), (9, -1), (True,) * 9, (True,) * 11):
        with pytest.raises(SpecError):
            resolve(wrong)


@pytest.mark.parametrize(
    ("given", "site", "sites"),
    [
        ("attn_out", "attn_out", ("attn_out",)),
        (["mlp_out"], "mlp_out", ("mlp_out",)),
        (["resid_post", "resid_pre", "resid_post"], ("resid_pre", "resid_post"), None),
    ],
)
def test_sites_are_normalised(given: Any, site: Any, sites: Any) -> None:
    capture = CaptureSpec(site=given)
    assert capture.site == site
    assert capture.sites == (sites or site)
    assert CaptureSpec.model_validate_json(capture.model_dump_json()) == capture


@pytest.mark.parametrize("site", [[], "qk", ["resid_pre", "qk"], 3, None])
def test_an_unknown_site_is_refused_with_the_allowed_ones(site: Any) -> None:
    with pytest.raises(SpecError, match=", ".join(SITES)):
        parse_extra_args({"inspect_lens": {"capture": {"site": site}}})


def test_a_site_is_served_where_its_tap_is() -> None:
    served = LensRequest(capture=CaptureSpec(layers=(1, 2), site="resid_pre"))
    check_request(served, FACTS)
    with pytest.raises(UnsupportedError, match=r"layer 0 is not served at resid_pre.*LENS_SITES"):
        check_request(LensRequest(capture=CaptureSpec(layers=(0,), site="resid_pre")), FACTS)
    with pytest.raises(
        UnsupportedError, match=r"edits\[0\].*layer 1 is not served at mlp_out"
    ) as e:
        check_request(LensRequest(edits=(vector(site="mlp_out"),)), FACTS)
    # What to set keeps all that the engine serves already.
    wanted = ",".join((*FACTS.sites, "mlp_out"))
    assert str(e.value).endswith(f"start it with INSPECT_LENS_SITES={wanted}")


def test_a_dump_has_the_fields_that_are_chosen() -> None:
    request = LensRequest(capture=CaptureSpec(layers=(1,)), edits=(vector(),), probes=["p"])
    whole = request.model_dump()
    assert list(whole) == ["edits", "probes", "capture"]
    assert request.model_dump(exclude={"edits"}) == {k: whole[k] for k in ("probes", "capture")}
    assert request.model_dump(include={"probes"}) == {"probes": whole["probes"]}
    inner = request.model_dump(include={"capture": {"layers"}})
    assert inner == {"capture": {"layers": (1,)}}


def test_a_mask_stays_a_mask_on_the_wire() -> None:
    capture = CaptureSpec(positions=[True, False, True])
    assert capture.positions == (True, False, True)
    for again in (
        CaptureSpec.model_validate(capture.model_dump()),
        CaptureSpec.model_validate_json(capture.model_dump_json()),
    ):
        assert [type(p) for p in again.positions] == [bool] * 3
    assert [type(p) for p in CaptureSpec(positions=[1, 0]).positions] == [int] * 2


@pytest.mark.parametrize(
    "changes", [{"reduce": "norm"}, {"dtype": "float16"}, {"phase": "prefill"}, {}]
)
def test_only_what_vllm_lens_has_words_for_is_spelled_its_way(changes: Any) -> None:
    args = to_extra_args(LensRequest(capture=CaptureSpec(layers=(1,), **changes)))
    assert list(args) == (["inspect_lens"] if changes else ["output_residual_stream"])
    steered = LensRequest(edits=(vector(phase="decode") if changes else vector(),))
    key = "inspect_lens" if changes else "apply_steering_vectors"
    assert list(to_extra_args(steered)) == [key]


FIELDS: dict[str, Any] = {
    "capture": {"layers": [1]},
    "edits": [{"op": "add", "vector": [[1.0] * 8], "layers": [1]}],
    "edits_named": ["e"],
    "probes": ["p"],
    "configs": ["c"],
    "server": False,
    "edits_meet": "error",
    "hooks": [{"fn": {"cloudpickle": "aGk="}, "layer_indices": [1]}],
    "qk": [1],
    "lens": [1],
    "sink": "s",
    "open_gates": ["0" * 64],
    "skip_reading_prefix_cache": False,
    "stream_results": True,
}


@pytest.mark.parametrize("name", LensRequest.model_fields)
def test_each_field_arrives_alone_and_beside_a_capture(name: str) -> None:
    both = {"capture": FIELDS["capture"], name: FIELDS[name]}
    # Of nothing else that comes token by token, there is nothing to stream.
    for fields in [both] if name == "stream_results" else [both, {name: FIELDS[name]}]:
        request = LensRequest.model_validate(fields)
        back = parse_extra_args(json.loads(json.dumps(to_wire_args(to_extra_args(request)))))
        assert back is not None
        assert back.model_dump(mode="json") == request.model_dump(mode="json")


def test_equal_requests_are_one_object_and_others_are_not() -> None:
    def parsed(**probe: Any) -> LensRequest:
        request = parse_extra_args({"inspect_lens": {"probes": [{"name": "p", **probe}, "q"]}})
        assert request is not None
        return request

    assert parsed() is parsed()
    assert parsed(positions=[1, 0]) is parsed(positions=[1, 0])
    assert parsed(positions=[1, 0]).probes[0].positions == (1, 0)
    # All of these are equal to Python.
    assert parsed(positions=[True, False]).probes[0].positions == (True, False)
    assert str(parsed(threshold=0.0).probes[0].threshold) == "0.0"
    assert str(parsed(threshold=-0.0).probes[0].threshold) == "-0.0"
    for value in (1, 2, "true", None):
        with pytest.raises(SpecError):
            parsed(tokens=value)


def test_a_batch_of_many_vectors_is_parsed_once_and_large_ones_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = Budget(32 << 20)
    cache: Cache[Any, Any] = Cache(1 << 13, budget)
    monkeypatch.setattr(_request, "_PARSED", cache)

    def ask(width: int) -> dict[str, Any]:
        vector = SteeringVector(activations=np.ones((1, width)), layer_indices=[0])
        return {"apply_steering_vectors": [vector]}

    batch = [ask(8) for _ in range(1000)]
    first = [parse_extra_args(extra) for extra in batch]
    assert all(parse_extra_args(e) is f for e, f in zip(batch, first, strict=True))
    large = ask(1 << 20)
    assert parse_extra_args(large) is not parse_extra_args(large)
    assert parse_extra_args(batch[0]) is first[0], "nothing has gone for it"
    for _ in range(300):
        parse_extra_args(ask(1 << 15))
    assert len(cache) <= (32 << 20) // (4 << 15)
    assert budget.n_bytes <= 32 << 20


def test_what_is_changed_in_place_is_parsed_again() -> None:
    layers = [1]
    extra: dict[str, Any] = {"inspect_lens": {"capture": {"layers": layers}}}
    for more in ([], [3], [2]):
        layers += more
        request = parse_extra_args(extra)
        assert request is not None
        assert request.capture is not None
        assert request.capture.layers == tuple(sorted(layers))


def test_large_requests_are_not_kept() -> None:
    extra = {"inspect_lens": {"capture": {"positions": list(range(5000))}}}
    first, second = parse_extra_args(extra), parse_extra_args(extra)
    assert first == second
    assert first is not second


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"capture": {"reduce": "mean"}}, r"capture.reduce='mean'.*ready only when the last"),
        ({"capture": {"reduce": "last"}}, r"capture.reduce='last'"),
        ({"capture": {"positions": "last"}}, r"capture.positions='last'"),
        ({"probes": ["p"]}, "nothing here comes token by token.*or leave stream_results out"),
        ({}, "nothing here comes token by token"),
    ],
)
def test_what_cannot_come_token_by_token_is_not_streamed(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=f"stream_results.*{says}" if fields else says):
        parse_extra_args({"inspect_lens": {**fields, "stream_results": True}})
    if fields:
        assert parse_extra_args({"inspect_lens": fields}) is not None


def test_a_streamed_request_is_spelled_so_that_a_server_reads_it_again() -> None:
    request = LensRequest(capture=CaptureSpec(layers=[2]), stream_results=True)
    args = to_wire_args(to_extra_args(request))
    assert list(args) == ["inspect_lens"], "vllm-lens has no word for it"
    assert parse_extra_args(args) == request


def test_a_request_travels_with_what_it_asks_alone() -> None:
    request = LensRequest(probes=["a"], capture={"layers": [1]}, server=False)
    sent = json.loads(to_wire_args(to_extra_args(request))["inspect_lens"])
    assert sent.keys() == {"probes", "capture", "server"}
    assert parse_extra_args({"inspect_lens": sent}) == request


def test_a_vector_that_comes_as_a_list_is_not_kept_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them, no two alike, as a client may send for hours."""
    budget = Budget(64 << 20)
    monkeypatch.setattr(_request, "_PARSED", Cache(1 << 13, budget))
    width, n = 256, 100
    vectors = np.random.default_rng(0).normal(size=(n + 1, width)).tolist()

    def ask(i: int) -> LensRequest | None:
        edit = {"op": "add", "vector": list(vectors[i]), "layers": [2]}
        return parse_extra_args({"inspect_lens": {"edits": [edit]}})

    assert ask(n) is ask(n)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(n):
            ask(i)
        each = (tracemalloc.get_traced_memory()[0] - before) / n
    finally:
        tracemalloc.stop()
    assert each < 3 * 4 * width + 4096, "its numbers in float32, what they are in, and little else"
    assert each < budget.n_bytes / (n + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vector(layer_indices=[-1]), r"\(-1,\); name at least one, .* none below 0"),
        (lambda: LensRequest(capture={"layers": [-1]}), "capture.layers: -1 is no layer"),
        (lambda: LensRequest(qk=[-1]), "qk.layers: -1 is no layer"),
        (lambda: LensRequest(lens=[0, -2]), "lens.layers: -2 is no layer"),
        (lambda: Hook(fn=print, layer_indices=[-1]), "layer_indices: -1 is no layer"),
    ],
)
def test_layers_count_from_0_wherever_they_are_named(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", ["positions", "edits", "probes"])
def test_what_a_kept_request_takes_counts_however_it_came(
    kind: str, as_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that never asks the same twice takes more than all requests may."""
    budget = Budget(64 << 20)
    monkeypatch.setattr(_request, "_PARSED", Cache(1 << 13, budget))
    n = 50

    def ask(i: int) -> None:
        probes = [{"name": f"p{i}.{j}", "positions": [j, 100 + i]} for j in range(60)]
        numbers = list(range(1000 * i, 1000 * i + 1500))
        edit = {"op": "add", "vector": [float(i), 1.0], "layers": [2]}
        asked = {
            "positions": {"capture": {"layers": [1], "positions": numbers}},
            "edits": {"edits": [edit] * 60},
            "probes": {"probes": probes},
        }[kind]
        assert parse_extra_args({"inspect_lens": json.dumps(asked) if as_text else asked})

    ask(n)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        counted = budget.n_bytes
        for i in range(n):
            ask(i)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 1.25 * (budget.n_bytes - counted)


def test_a_number_of_thousands_of_digits_beside_many_others_is_no_fault() -> None:
    assert parse_extra_args({"others": [0] * 100 + [10**5000]}) is None


WAYS: dict[str, dict[str, Any]] = {
    "capture": {"layers": [1]},
    "qk": {"layers": [2]},
    "lens": {"layers": [3]},
}


@pytest.mark.parametrize("way", ["inline", "binary"])
@pytest.mark.parametrize("name", WAYS)
def test_all_tensors_of_a_request_travel_as_one_of_them_is_asked_to(name: str, way: str) -> None:
    """Where the others leave it open."""
    native = WAYS | {name: {**WAYS[name], "transport": way}}
    request = parse_extra_args({NATIVE_KEY: {**native, "stream_results": True}})
    assert request is not None
    assert {getattr(request, part).transport for part in WAYS} == {way}
    assert not request.leaves_transport


def test_two_ways_to_travel_in_one_request_are_refused_by_their_fields() -> None:
    native = {
        "capture": {"layers": [1], "transport": "inline"},
        "qk": {"layers": [1]},
        "lens": {"layers": [1], "transport": "binary"},
    }
    wanted = r"lens\.transport='binary' beside capture\.transport='inline': all tensors"
    with pytest.raises(SpecError, match=wanted):
        parse_extra_args({NATIVE_KEY: native})
