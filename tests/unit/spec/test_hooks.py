"""Hooks and what they save, as data: spellings, logs, refusals, and the bytes of vllm-lens."""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens import Hook, LensRequest
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    TensorData,
    check_request,
    code_python,
    decode_saved,
    encode_saved,
    parse_extra_args,
    tap_points,
    to_extra_args,
    to_wire_args,
)
from tests.kit.facts import engine_facts

DATA = Path(__file__).parents[2] / "data" / "vllm_lens_1.3.0"
PEER = json.loads((DATA / "hooks.json").read_text())
FACTS = engine_facts(
    n_layers=6, layers=(0, 2, 3), max_step_tokens=32, ring_rows=96, bank_rows=12, allows_code=True
)


def noted(ctx: Any, h: Any) -> None:
    ctx.saved["n"] = len(h)


def hook(*layers: int, **fields: Any) -> Hook:
    return Hook(fn=noted, layer_indices=layers, **fields)


def test_every_spelling_is_the_same_hook() -> None:
    mine = hook(2, 0)
    assert mine.layer_indices == (0, 2)
    form = mine.model_dump(mode="json")
    foreign = type("Hook", (), {"fn": mine.fn, "layer_indices": [0, 2], "pre": False})()
    for value in (mine, [mine], form, [form], json.dumps([form]), [foreign]):
        request = parse_extra_args({"apply_hooks": value})
        assert request is not None
        assert [h.content for h in request.hooks] == [mine.content]
    again = parse_extra_args(to_wire_args(to_extra_args(request)))
    assert again is not None
    assert again.hooks[0].content == mine.content
    assert again.hooks[0].fn.python == code_python()


def test_a_hook_in_a_log_is_its_hash_and_cannot_be_sent_again() -> None:
    inside = LensRequest(hooks=(hook(1),)).model_copy()
    logged = json.loads(
        json.dumps({"args": to_extra_args(inside)}, default=lambda v: v.reference())
    )
    text = json.dumps(logged)
    assert "cloudpickle" not in text
    assert inside.hooks[0].fn.sha256 in text
    with pytest.raises(SpecError, match="does not keep code"):
        parse_extra_args(logged["args"])


def test_the_module_of_a_function_travels_with_it(tmp_path: Path) -> None:
    # A reader that has neither the file nor the module made by hand.
    code = """
def helper(x):
    return x + 1

def note(ctx, h):
    ctx["n"] = helper(h)
"""
    read = "import pickle, sys; ctx = {}; pickle.load(open(sys.argv[1], 'rb'))(ctx, 1); print(ctx)"
    (tmp_path / "own_hooks.py").write_text(code)
    by_file = importlib.util.spec_from_file_location("own_hooks", tmp_path / "own_hooks.py")
    assert by_file is not None
    assert by_file.loader is not None
    modules = [importlib.util.module_from_spec(by_file), ModuleType("made_by_hand")]
    by_file.loader.exec_module(modules[0])
    exec(code, modules[1].__dict__)
    for module in modules:
        sys.modules[module.__name__] = module
        try:
            data = Hook(fn=module.note, layer_indices=[0]).fn.data
        finally:
            del sys.modules[module.__name__]
        (tmp_path / "hook").write_bytes(data)
        command = [sys.executable, "-c", read, str(tmp_path / "hook")]
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
        assert found.stdout.strip() == "{'n': 2}"


def test_copies_share_the_code() -> None:
    mine = hook(1)
    assert copy.deepcopy(mine).fn is mine.fn
    assert len(repr(mine)) < 200


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([3], "give a Hook"),
        ([{"fn": {"cloudpickle": "!"}, "layer_indices": [1]}], "base64"),
        ([{"fn": {"code": ""}, "layer_indices": [1]}], "cloudpickle"),
        ([{"fn": {"cloudpickle": ""}, "layer_indices": []}], "empty"),
        ([{"fn": {"cloudpickle": ""}, "layer_indices": [1], "prae": True}], "prae"),
        ([{"fn": 7, "layer_indices": [1]}], "give a function"),
        ([{"fn": {"cloudpickle": "gAROLg==", "name": 0}, "layer_indices": [1]}], "name=0"),
        ([{"fn": {"cloudpickle": "gAROLg==", "name": []}, "layer_indices": [1]}], r"name=\[\]"),
        ("{", "not JSON"),
    ],
)
def test_what_is_no_hook_is_refused(value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_extra_args({"apply_hooks": value})


def test_a_function_that_cannot_travel_is_refused_with_its_name() -> None:
    lock = __import__("threading").Lock()

    def locked(ctx: Any, h: Any) -> None:
        lock.acquire()

    with pytest.raises(ValueError, match=r"locked cannot be pickled"):
        Hook(fn=locked, layer_indices=[0])


@pytest.mark.parametrize(
    ("args", "changes", "error", "message"),
    [
        ({"apply_hooks": [hook(2)]}, {"allows_code": False}, UnsupportedError, "ALLOW_CODE=1"),
        ({"apply_hooks": [hook(6)]}, {}, SpecError, r"\[0\].layer_indices: layer 6; m has"),
        ({"apply_hooks": [hook(0), hook(1)]}, {}, UnsupportedError, r"\[1\].*layer 1 is not serv"),
        ({"apply_hooks": [hook(0)]}, {"is_speculative": True}, UnsupportedError, "draft"),
        ({"output_qk": True}, {}, UnsupportedError, "INSPECT_LENS_SITES=q,k"),
        ({"output_qk": [1]}, {"sites": ("q", "k")}, UnsupportedError, "layer 1 is not served"),
        ({"output_qk": True}, {"has_latent_attention": True}, UnsupportedError, "MLA"),
        (
            {"apply_hooks": [hook(0)], "skip_reading_prefix_cache": False},
            {},
            SpecError,
            "cached tokens are not computed",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_it_runs(
    args: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    request = parse_extra_args(args)
    assert request is not None
    with pytest.raises(error, match=message):
        check_request(request, replace(FACTS, **changes))


def test_functions_of_another_python_are_refused_by_version() -> None:
    form = hook(2).model_dump(mode="json")
    form["fn"]["python"] = "2.7"
    request = parse_extra_args({"apply_hooks": [form]})
    assert request is not None
    with pytest.raises(UnsupportedError, match=r"Python 2\.7"):
        check_request(request, FACTS)


def test_queries_and_keys_take_no_leave_to_run_code() -> None:
    request = parse_extra_args({"output_qk": "true", "activations_transport": "binary"})
    assert request is not None
    assert request.qk is not None
    assert (request.qk.layers, request.qk.transport) == ("all", "binary")
    sites: tuple[Any, ...] = ("q", "k")
    served = {"sites": sites, "taps": tap_points(sites, FACTS.layers), "ring_rows": 192}
    check_request(request, replace(FACTS, allows_code=False, **served))


# -- what comes back ---------------------------------------------------------------

ARRAYS = [
    TensorData(np.arange(6, dtype=dtype).reshape(2, 3), dtype)  # type: ignore[arg-type]
    for dtype in ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8")
]
ARRAYS += [
    TensorData(np.array([True, False]), "bool"),  # type: ignore[arg-type]
    TensorData(np.array([0x3F80, 0xC000], dtype=np.uint16), "bfloat16"),
]


@pytest.mark.parametrize("tensor", ARRAYS, ids=lambda t: t.dtype)
def test_tensors_of_any_dtype_come_back_as_they_were(tensor: TensorData) -> None:
    found = decode_saved(json.loads(json.dumps(encode_saved({"x": [tensor]}))))["x"][0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.sha256 == tensor.sha256


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text().filter(lambda k: k != "__type__"), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    # As a response does it: JSON has no NaN and no infinity.
    text = json.dumps(encode_saved(value), allow_nan=False)
    assert _same(decode_saved(json.loads(text)), value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [7]}, "bytes"),
        ({"data": "!"}, "JSON form"),
        ({"shape": [-1]}, "out of range"),
        ({"dtype": "object", "original_dtype": "torch.object"}, "dtype"),
    ],
)
def test_a_damaged_tensor_is_refused(changes: dict[str, Any], message: str) -> None:
    form = encode_saved(ARRAYS[3])
    with pytest.raises(SpecError, match=message):
        decode_saved({"a": {**form, **changes}})


# -- bytes of vllm-lens ------------------------------------------------------------


def test_hooks_of_vllm_lens_are_understood() -> None:
    request = parse_extra_args({"apply_hooks": PEER["apply_hooks"]})
    assert request is not None
    assert [h.layer_indices for h in request.hooks] == [(1, 3), (2,)]
    assert [h.pre for h in request.hooks] == [False, True]
    raw = json.loads(PEER["apply_hooks"])[0]["fn"]["cloudpickle"]
    assert request.hooks[0].fn.data == base64.b64decode(raw)
    check_request(request, replace(FACTS, layers=tuple(range(6))))


def test_results_of_vllm_lens_are_understood_and_its_pickles_are_not() -> None:
    found = decode_saved(PEER["hook_results"])
    values = PEER["values"]
    saved = found["0"]
    np.testing.assert_allclose(saved["norms_f32"].to_float32(), values["norms_f32"], rtol=1e-6)
    np.testing.assert_array_equal(saved["bf16"].to_float32(), values["bf16"])
    assert saved["ids"].dtype == "int64"
    assert saved["ids"].storage.tolist() == values["ids"]
    assert saved["mask"].storage.tolist() == values["mask"]
    assert (saved["n"], saved["text"], saved["list"]) == (3, "a", [1, 2.5, None])
    assert found["1"] == {}
    with pytest.raises(SpecError, match=r"hook_results\.0\.parts.*pickled"):
        decode_saved(PEER["opaque"])
