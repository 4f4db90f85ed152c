"""What is written is what is meant: nothing is coerced, nothing is passed over."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from inspect_lens import Hook, LensRequest, SteeringVector
from inspect_lens.errors import SpecError
from inspect_lens.probe import StreamingPool, pool_scores
from inspect_lens.spec import (
    OWN_WORDS,
    POOLS,
    Add,
    CaptureSpec,
    EngineProbe,
    Pool,
    SinkUse,
    Value,
    as_tensor_data,
    check_counts,
    check_name,
    check_request,
    encode_tensor,
    lens_args,
    parse_extra_args,
    parse_hooks,
    parse_pool,
    read_as,
    refuse_misspelled,
    split_body,
    tap_points,
)
from tests.kit.facts import engine_facts

TENSOR = encode_tensor(as_tensor_data(np.ones((1, 4), np.float32)))
GOOD: dict[str, Any] = {"activations": TENSOR, "layer_indices": [1]}


def steer(**changes: Any) -> LensRequest | None:
    return parse_extra_args({"apply_steering_vectors": [GOOD | changes]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_indices": [False, True]}, "not an integer"),
        ({"position_indices": [0, 1.0]}, "not an integer"),
        ({"position_indices": True}, "list of integers"),
        ({"layer_indices": [True]}, "not an integer"),
        ({"layer_indices": "1"}, "at least one, such as"),
        ({"layer_indices": ["1"]}, "not an integer"),
        ({"scale": True}, "allowed is a number"),
        ({"scale": "2"}, "allowed is a number"),
        ({"norm_match": 1}, "allowed are true and false"),
        ({"norm_match": "true"}, "allowed are true and false"),
        ({"activations": TENSOR | {"shape": [1.9, 4.7]}}, "no list of integers"),
        ({"activations": TENSOR | {"shape": [True, 4]}}, "no list of integers"),
        ({"activations": TENSOR | {"shape": "14"}}, "no list of integers"),
        ({"activations": TENSOR | {"shape": [10**4000, 10**4000]}}, "out of range"),
        ({"activations": TENSOR | {"shape": [1] * 40}}, "has 40 entries; 8 at most"),
        ({"activations": TENSOR | {"dtype": "float16"}}, "stored as float32"),
        ({"activations": TENSOR | {"dtype": "int8"}}, "stored as float32"),
        ({"activations": TENSOR | {"original_dtype": 3}}, "dtype 3"),
        ({"activations": TENSOR | {"colour": "red"}}, "unknown keys"),
        ({"activations": TENSOR | {"compression": "gzip"}}, "allowed is 'zstd'"),
        ({"activations": TENSOR | {"data": 7}}, "data is int"),
        ({"activations": TENSOR | {"data": "A" * 10**6}}, "16 bytes are declared"),
        ({"activations": [["a" * 1000], ["b"]]}, "not a number"),
        ({"activations": [[True] * 4]}, "not a number"),
        ({"activations": [[None] * 4]}, "not a number"),
        ({"activations": [[10**400] * 4]}, "dtype object"),
        ({"activations": json.loads("[" * 60 + "]" * 60)}, "nested more than 8 deep"),
    ],
)
def test_a_vector_is_read_as_it_is_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        steer(**changes)


def test_bytes_behind_the_frame_are_refused() -> None:
    import base64

    frame = base64.b64decode(TENSOR["data"])
    for more in (b"x", frame):
        data = base64.b64encode(frame + more).decode()
        with pytest.raises(SpecError, match="damaged zstd frame"):
            steer(activations=TENSOR | {"data": data})


def test_numbers_of_numpy_are_numbers() -> None:
    vector = SteeringVector(
        activations=np.ones((2, 4)),
        layer_indices=np.arange(2),
        position_indices=[np.int64(-1)],
        scale=np.float32(2),
        norm_match=np.True_,
    )
    assert (vector.layers, vector.positions) == ((0, 1), (-1,))
    assert (vector.scale, vector.norm_match) == (2.0, True)


def test_members_of_an_enumeration_are_numbers() -> None:
    class At(IntEnum):
        FIRST, THIRD = 0, 2

    plain = CaptureSpec(layers=[0, 2], positions=[0, 2])
    assert CaptureSpec(layers=list(At), positions=list(At)) == plain
    assert type(CaptureSpec(positions=At.THIRD).positions[0]) is int
    with pytest.raises(SpecError, match="a position is named twice"):
        CaptureSpec(positions=[At.THIRD, 2])
    with pytest.raises(SpecError, match="allowed are all, prompt"):
        CaptureSpec(positions=[At.THIRD, True])


@pytest.mark.parametrize("value", [0, 1, True, False])
def test_the_flag_of_the_cache_survives_vllms_coercion(value: Any) -> None:
    request = parse_extra_args({"skip_reading_prefix_cache": value})
    assert request is not None
    assert request.skip_reading_prefix_cache is bool(value)


@pytest.mark.parametrize("word", [*OWN_WORDS, "_inspect_lens"])
def test_words_of_ours_are_refused_where_nobody_reads_them(word: str) -> None:
    for body in ({word: [1]}, {"extra_args": {word: [1]}}, {"vllm_xargs": {word: 1}}):
        with pytest.raises(SpecError, match=rf"{word}.*(nobody reads it there|reserved)"):
            parse_extra_args(split_body(body).args)


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {"extra_args": {"inspect_lens": {}}}},
        {"sampling_params": {"inspect_lens": {}}},
        {"metadata": {"a": {"output_residual_stream": [1]}}},
    ],
)
def test_a_lens_key_inside_something_else_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="nobody reads it there"):
        split_body(body)


@pytest.mark.parametrize("value", [3, "x", [1], True])
def test_a_place_for_arguments_is_a_mapping(value: Any) -> None:
    with pytest.raises(SpecError, match="has to be a mapping"):
        split_body({"extra_args": value})


def test_a_key_that_stands_twice_is_refused() -> None:
    key = {"output_residual_stream": [1]}
    for body in ({**key, "extra_args": key}, {"vllm_xargs": key, "extra_args": key}):
        with pytest.raises(SpecError, match="give it once"):
            lens_args(body)


def nested(n: int) -> Any:
    value: Any = 1
    for _ in range(n):
        value = [value]
    return value


@pytest.mark.parametrize("n", [500, 900])
def test_deep_nesting_is_refused(n: int) -> None:
    for key in ("inspect_lens", "output_residual_stream", "apply_steering_vectors", "output_qk"):
        for value in (nested(n), {"capture": nested(n)}, "[" * 200_000):
            with pytest.raises(SpecError):
                parse_extra_args({key: value})
    assert parse_extra_args({"mine": nested(n)}) is None


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "a/b", "/", "..", ".", "", " ", "\x00", "<script>", "a\nb", "\u3000", "é",
     [1], {"a": 1}, 7, None, True, "x" * 129, "\ud800"],
)  # fmt: skip
def test_what_is_no_name_is_refused_by_all(name: Any) -> None:
    with pytest.raises(SpecError, match="letters"):
        check_name(name)
    for field in ("probes", "edits_named"):
        with pytest.raises(SpecError) as error:
            parse_extra_args({"inspect_lens": {field: [{"name": name}]}})
        str(error.value).encode()


@pytest.mark.parametrize("name", ["a", "deception-v2.1", "A_b", "0", "x" * 128])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["<script>", "a b", "../x", "\x00", "x" * 257, 3, ["f"]])
def test_a_hook_has_the_name_of_a_function(name: Any) -> None:
    with pytest.raises(SpecError, match="function's name"):
        parse_hooks([{"fn": {"cloudpickle": "AA==", "name": name}, "layer_indices": [0]}])


def test_functions_keep_their_names() -> None:
    (hook,) = parse_hooks(Hook(fn=lambda ctx, h: None, layer_indices=[0]))
    assert hook.fn.name == "test_functions_keep_their_names.<locals>.<lambda>"
    (again,) = parse_hooks([hook.model_dump(mode="json")])
    assert again.fn == hook.fn or again.fn.sha256 == hook.fn.sha256


@pytest.mark.parametrize(
    "pool",
    ["maen", "ema:2", "ema:0", "ema:nan", "ema:1_0", "top_k_mean:1" + "0" * 5000, "top_k_mean:0",
     "top_k_mean:1.5", "top_k_mean:٣", "mean:3", "", "softmax_mean:inf", "sentence_mean_max"],
)  # fmt: skip
@pytest.mark.parametrize("alarm", [{}, {"alarm": "stop", "threshold": 1}, {"tokens": True}])
def test_a_wrong_pool_is_refused_when_it_is_parsed(pool: str, alarm: dict[str, Any]) -> None:
    use = {"name": "p", "aggregate": pool} | alarm
    with pytest.raises(SpecError, match=r"allowed are mean|texts of tokens"):
        parse_extra_args({"inspect_lens": {"probes": [use]}})
    with pytest.raises(ValueError, match=r"allowed are mean|texts of tokens"):
        EngineProbe(layers=(0,), tensors={"weight": np.ones((1, 4))}, aggregate=pool)


@pytest.mark.parametrize("pool", [*POOLS[:-1], "top_k_mean:9999999", "ema:1", "softmax_mean:1e6"])
def test_a_right_pool_runs(pool: str) -> None:
    use = {"name": "p", "aggregate": pool}
    assert parse_extra_args({"inspect_lens": {"probes": [use]}}) is not None
    assert parse_pool(str(parse_pool(pool))) == parse_pool(pool)
    assert StreamingPool(pool).update([1.0, 3.0]).value == pytest.approx(
        pool_scores([1.0, 3.0], pool)
    )
    assert isinstance(parse_pool(pool), Pool)


def test_an_alarm_needs_a_threshold() -> None:
    taps = tap_points(["resid_post"], (0,))
    facts = engine_facts(
        n_layers=1, hidden=4, taps=taps, max_step_tokens=1, ring_rows=9, bank_rows=9
    )
    weight = {"weight": np.ones((1, 4))}
    without = EngineProbe(layers=(0,), tensors=weight)
    asked = LensRequest(probes=[{"name": "p", "alarm": "flag"}])  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no threshold for the running mean"):
        check_request(asked, facts, {"p": without})
    check_request(asked, facts, {"p": EngineProbe(layers=(0,), tensors=weight, threshold=1)})


def test_errors_stay_short() -> None:
    """Of what `tests/unit/promises/test_bodies.py` has no field for."""
    with pytest.raises(SpecError) as error:
        parse_extra_args({"inspect_lens": {"x" * 100_000: 1}})
    assert len(str(error.value)) < 4000
    with pytest.raises(SpecError) as error:
        steer(position_indices=[*range(100_000), 1])
    assert len(str(error.value)) < 1000


def test_a_misspelled_key_is_found_among_as_many_as_a_body_may_have() -> None:
    others = ("top_p", "chat_template_kwargs", "min_tokens", "x" * 10_000, "priority")
    refuse_misspelled(others, "the body")
    for _ in range(2):
        with pytest.raises(SpecError, match="did you mean 'output_residual_stream'"):
            refuse_misspelled([*others, "output_residual_streem"], "the body")
    with pytest.raises(SpecError, match="1025 keys; 1024 at most"):
        refuse_misspelled(list(map(str, range(1025))), "the body")


@pytest.mark.parametrize("shape", [(150, 1024, 2), (150, 1025, 2), (1, 2, 1025), (513, 1, 1)])
def test_lists_of_pairs_are_counted_as_all_others(shape: tuple[int, int, int]) -> None:
    n_edits, n_points, n_numbers = shape
    points = [[0] * n_numbers for _ in range(n_points)]
    body = {"edits": [{"schedule": {"points": points}} for _ in range(n_edits)]}
    if n_points > 1024:
        with pytest.raises(SpecError, match=r"schedule.points: has 1025 entries; 1024 at most"):
            check_counts(body)
    elif n_numbers > 1024:
        with pytest.raises(SpecError, match=r"points\[1\]: has 1025 entries; 1024 at most"):
            check_counts(body)
    elif n_edits > 256:
        with pytest.raises(SpecError, match=r"edits: has 513 entries; 256 at most"):
            check_counts(body)
    else:
        check_counts(body)
        body["more"] = [{"schedule": {"points": points}} for _ in range(100)]
        with pytest.raises(SpecError, match="entries in all its lists"):
            check_counts(body)


def _values(of: type[Value] = Value) -> Iterator[type[Value]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _values(kind)


@pytest.mark.parametrize("kind", sorted(set(_values()), key=lambda kind: kind.__qualname__))
def test_what_is_wrong_with_a_value_is_said_in_our_words(kind: type[Value]) -> None:
    name = next(iter(kind.model_fields), None)
    for given in ({"no_such_field": 1}, {name: object()} if name else {"no_such_field": 1}):
        with pytest.raises(SpecError) as error:
            kind(**given)
        for words in ("\n", "pydantic", "Input should", "Field required", "Extra inputs"):
            assert words not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"columns": dict.fromkeys(map(str, range(17)), "x")},
            r"columns=\{.*allowed are at most 16 entr",
        ),
        ({"columns": {"x": 3}}, r"columns\.x=3; allowed is a text"),
        ({"id": ""}, r"id=''; allowed are texts of at least 1 characters"),
        ({"wait": "yes"}, r"wait='yes'; allowed are true and false"),
        ({"lable": True}, r"lable: no such field; did you mean 'label'\?"),
    ],
)
def test_values_are_judged_alike_in_python_and_in_a_request(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=f"^{said}"):
        SinkUse(name="s", **given)
    with pytest.raises(SpecError, match=rf"^sink\.{said}"):
        parse_extra_args({"inspect_lens": {"sink": {"name": "s", **given}}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"probes": 3}, "probes=3; allowed is a list"),
        ({"configs": 3}, "configs=3; allowed is a list"),
        ({"configs": ["a", "b", "a"]}, "configs: ['a', 'b', 'a']; name each once"),
        ({"probes": [3]}, "probes[0]=3; allowed is an object"),
        ({"probes": ["a", {"name": "b", "tokens": 3}]}, "probes[1].tokens=3; allowed are true"),
    ],
)
def test_a_part_of_a_list_is_named_as_it_was_written(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as found:
        LensRequest(**fields)
    assert str(found.value).startswith(message)


def test_a_value_inside_another_is_validated_in_its_context() -> None:
    """The mark by which pydantic leaves out a constructor for what is inside another value."""
    assert not SinkUse.__pydantic_custom_init__
    with pytest.raises(ValidationError):
        SinkUse.model_validate({})


@pytest.mark.parametrize("name", ["int", "list", "str"])
def test_a_field_too_much_that_is_called_like_a_type_is_named(name: str) -> None:
    with pytest.raises(SpecError, match=rf"{name}: no such field"):
        Add(vector=[1.0], layers=[1], **{name: 3})


def test_what_hides_its_values_hides_them_wherever_it_stands() -> None:
    class Webhook(BaseModel):
        model_config = ConfigDict(hide_input_in_errors=True)
        key: int

    class File(BaseModel):
        webhooks: dict[str, Webhook]
        tries: int

    with pytest.raises(SpecError) as caught:
        read_as(File, {"webhooks": {"a": {"key": "s3cret"}}, "tries": "often"})
    assert "s3cret" not in str(caught.value)
    assert "webhooks.a.key: allowed is an integer" in str(caught.value)
    assert "tries='often'" in str(caught.value)


def test_a_deep_copy_shares_what_is_in_it_and_can_be_updated() -> None:
    asked = LensRequest(capture=CaptureSpec(layers=(1,)), skip_reading_prefix_cache=True)
    copied = copy.deepcopy({"asked": asked})["asked"]
    assert copied == asked
    assert copied is not asked, "older pydantic would update the original"
    assert copied.capture is asked.capture
    assert asked.model_copy(deep=True, update={"capture": None}).capture is None
    assert asked.capture is not None
