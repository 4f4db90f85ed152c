"""Parameters of a request that vLLM is given: a copy, checked, of which it needs no other one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from inspect_lens._vllm.frontend import admission

LENS = {"output_residual_stream": [1]}
KEPT = {"kv_transfer_params": "flat"}
"""vLLM's own, and allowed beside the lens's."""
PLAIN_PARAMETERS: list[dict[str, Any]] = [
    {},
    {"stop": ["x"], "stop_token_ids": [7], "logit_bias": {5: 1.0}, "bad_words": ["no"]},
    {"allowed_token_ids": [1, 2], "logprobs": 2, "seed": 3, "temperature": 0.5, "n": 2},
    {"extra_args": {**LENS, **KEPT}},
]


@pytest.mark.parametrize("changes", PLAIN_PARAMETERS)
def test_vllm_copies_what_is_a_copy_no_second_time(changes: dict[str, Any]) -> None:
    given = SamplingParams(**{"max_tokens": 5, "extra_args": dict(LENS), **changes})
    before = copy.deepcopy(given)
    plain = admission.without_lens_keys(given)
    assert plain.skip_clone, "else vLLM makes a deep copy of it"
    core = plain.clone()
    # All that vLLM does with it, and more.
    core.update_from_generation_config({"eos_token_id": [8, 9]}, 3)
    for name in core.__struct_fields__:
        value = getattr(core, name)
        if isinstance(value, list | dict | set):
            value.clear()
    assert given == before
    assert given.all_stop_token_ids == before.all_stop_token_ids
    assert not given.skip_clone
    core = admission.without_lens_keys(given).clone()
    core.extra_args, core.skip_clone = before.extra_args, before.skip_clone
    assert core == before, "all else is as the caller gave it"


LATER: list[dict[str, Any]] = [
    {"stop": "END"},
    {"stop_token_ids": [7, 7]},
    {"seed": -1},
    {"temperature": 0.001},
    {"temperature": 0.0, "top_p": 0.9, "top_k": 5},
    {"max_tokens": 9, "min_tokens": 3},
]
WRONG_LATER: list[dict[str, Any]] = [{"top_p": 3.0}, {"n": 0}, {"n": 2, "temperature": 0.0}]


@pytest.mark.parametrize("changes", LATER)
def test_what_is_set_later_is_put_in_order_as_vllm_does(changes: dict[str, Any]) -> None:
    given = SamplingParams(max_tokens=5, extra_args=dict(LENS))
    for name, value in changes.items():
        setattr(given, name, value)
    before = {name: getattr(given, name) for name in given.__struct_fields__}
    core, theirs = admission.without_lens_keys(given).clone(), copy.deepcopy(given)
    core.extra_args, core.skip_clone = theirs.extra_args, theirs.skip_clone
    assert core == theirs
    assert core.all_stop_token_ids == theirs.all_stop_token_ids
    assert {name: getattr(given, name) for name in given.__struct_fields__} == before


@pytest.mark.parametrize("changes", WRONG_LATER)
def test_what_is_set_wrong_later_is_refused(changes: dict[str, Any]) -> None:
    given = SamplingParams(max_tokens=5, extra_args=dict(LENS))
    for name, value in changes.items():
        setattr(given, name, value)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 (whatever vLLM has)
        copy.deepcopy(given)
    with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value))):
        admission.without_lens_keys(given)


NESTED_PARAMETERS: list[Callable[[], dict[str, Any]]] = [
    lambda: {"structured_outputs": _choices()},
    lambda: {"extra_args": {**LENS, "kv_transfer_params": {"a": [1]}}},
]


def _choices() -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(choice=["yes", "no"])


@pytest.mark.parametrize("changes", NESTED_PARAMETERS)
def test_vllm_makes_its_copy_of_what_holds_more_than_plain_values(
    changes: Callable[[], dict[str, Any]],
) -> None:
    given = SamplingParams(**{"max_tokens": 5, "extra_args": dict(LENS), **changes()})
    assert not admission.without_lens_keys(given).skip_clone
