from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from inspect_ai.model import ModelOutput
from pydantic_core import to_jsonable_python

from inspect_lens._intake import (
    Payload,
    Stored,
    decode_file,
    encode_file,
    read_file,
    remove_file,
    write_file,
)
from inspect_lens._intake import _payload as _payload_module
from inspect_lens.errors import ArtifactError, CaptureError
from inspect_lens.model import Activations, activations, lens_config
from inspect_lens.model._handle import MEMORY
from inspect_lens.model._places import MemoryStore
from inspect_lens.spec import Reduce, TensorData, as_tensor_data
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel


def _payload(fill: float = 1.0, *, dtype: str = "float32", tokens: int = 3) -> Payload:
    tensor = torch.full((2, tokens, 4), fill, dtype=getattr(torch, dtype))
    return Payload(
        tensors={"residual_stream": as_tensor_data(tensor)},
        layers={"residual_stream": (1, 3)},
        prompt_token_ids=(5, 6),
        token_ids=(7, 8),
    )


def _handle(payload: Payload) -> Activations:
    handle = Activations.of(payload)
    handle.remember(payload)
    return handle


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_file_keeps_every_dtype_and_safetensors_reads_it(tmp_path: Path, dtype: str) -> None:
    payload = _payload(0.1, dtype=dtype)
    path = tmp_path / "deep" / "x.safetensors"
    write_file(str(path), encode_file(payload))
    again = decode_file(path.read_bytes(), where="x")
    assert again.sha256 == payload.sha256
    assert again.token_ids == (7, 8)
    assert again.layers == {"residual_stream": (1, 3)}
    loaded = safetensors.torch.load_file(path)
    assert loaded["residual_stream"].dtype == getattr(torch, dtype)
    assert torch.equal(loaded["residual_stream"], _handle(payload)["residual_stream"])
    assert loaded["prompt_token_ids"].tolist() == [5, 6]
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CaptureError, match="activations_dir"):
        write_file(str(tmp_path / "file" / "x.safetensors"), [b"x"])

    def parts() -> object:
        yield b"half"
        raise OSError("disk full")

    with pytest.raises(CaptureError, match="disk full"):
        write_file(str(tmp_path / "x.safetensors"), parts())  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == []


def test_a_system_call_may_take_less_than_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.writev

    def three_bytes(file: int, parts: list[memoryview]) -> int:
        return whole(file, [parts[0][:3]])

    monkeypatch.setattr(os, "writev", three_bytes)
    parts = [b"", b"ab", memoryview(np.arange(5, dtype=np.int32)).cast("B"), b"", b"cdefg"]
    write_file(str(tmp_path / "x"), [*parts, *[b"z"] * 40])
    assert (tmp_path / "x").read_bytes() == b"".join(parts) + b"z" * 40


def test_any_fsspec_url_works() -> None:
    write_file("memory://lens/a/b.safetensors", encode_file(_payload()))
    data = read_file("memory://lens/a/b.safetensors")
    assert data is not None
    assert decode_file(data, where="b").sha256 == _payload().sha256
    assert read_file("memory://lens/none") is None
    with pytest.raises(ArtifactError, match="could not be read"):
        read_file("nosuchscheme://x")


@pytest.mark.anyio
async def test_a_script_writes_where_it_is_told(server: FakeLensServer, model_of: GetModel) -> None:
    model = model_of(server, activations_dir="memory://acts")
    output = await model.generate("one", config=lens_config(capture=[1]))
    acts = output.metadata["activations"]
    expected = acts.numpy()
    assert acts.uri is not None
    assert fsspec.filesystem("memory").exists(f"/acts/{acts.uri}")
    MEMORY.clear()
    np.testing.assert_array_equal(acts.numpy(), expected)
    logged = json.loads(output.model_dump_json())
    found = activations(ModelOutput.model_validate(logged))
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.anyio
async def test_a_script_without_a_folder_keeps_them_in_memory(
    server: FakeLensServer, model_of: GetModel, tmp_path: Path
) -> None:
    output = await model_of(server).generate("one", config=lens_config(capture=[1]))
    assert output.metadata["activations"].uri is None
    assert output.metadata["activations"].numpy().shape[0] == 1
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
    with pytest.raises(Exception, match="activations_dir"):
        await model_of(server, activations="sidecar").generate(
            "one", config=lens_config(capture=[1])
        )


def test_memory_is_bounded_and_what_left_is_a_named_error() -> None:
    store = MemoryStore(limit_bytes=200)
    for i in range(5):
        store.put(str(i), _payload(i))  # 96 bytes each
    assert store.nbytes <= 200
    assert [store.get(str(i)) is not None for i in range(5)] == [False] * 3 + [True] * 2
    store.put("large", _payload(tokens=50))
    assert store.get("large") is not None
    handle = _handle(_payload())
    MEMORY.clear()
    with pytest.raises(ArtifactError, match="INSPECT_LENS_MEMORY_BYTES"):
        handle["residual_stream"]
    assert handle.tensors["residual_stream"].shape == (2, 3, 4)


def test_copies_are_the_same_object() -> None:
    handle = _handle(_payload())
    assert copy.copy(handle) is handle
    assert copy.deepcopy({"a": [handle]})["a"][0] is handle
    output = ModelOutput.from_content("m", "x")
    output.metadata = {"activations": handle}
    assert output.model_copy(deep=True).metadata["activations"] is handle


def test_a_pickle_carries_the_data_or_its_address(tmp_path: Path) -> None:
    payload = _payload(2.0)
    carried = pickle.dumps(_handle(payload))
    write_file(str(tmp_path / "a.lens" / "x.safetensors"), encode_file(payload))
    filed = Activations.of(payload, uri="a.lens/x.safetensors", root=str(tmp_path))
    address = pickle.dumps(filed)
    MEMORY.clear()
    script = textwrap.dedent(
        """
        import pickle, sys
        data, address = (bytes.fromhex(line) for line in sys.stdin.read().split())
        for one in (pickle.loads(data), pickle.loads(address)):
            assert one.numpy().sum() == 48, one.numpy()
            assert one.token_ids == (7, 8)
        """
    )
    text = f"{carried.hex()}\n{address.hex()}"
    subprocess.run([sys.executable, "-c", script], input=text, text=True, check=True)
    assert len(address) < 1000


@given(st.lists(st.integers(0, 200), min_size=1, unique=True).map(sorted))
def test_the_logged_form_reads_back_for_any_layers(layers: list[int]) -> None:
    tensor = TensorData(np.zeros((len(layers), 1, 1), np.float32), "float32")
    payload = Payload(tensors={"r": tensor}, layers={"r": tuple(layers)})
    handle = Activations.of(payload, uri="a/b", root="/c")
    logged = json.loads(json.dumps(to_jsonable_python({"x": handle}, exclude_none=True)))["x"]
    again = Activations.from_reference(logged)
    assert again == handle
    assert again.layers == tuple(layers)


def test_eighty_layers_fit_in_a_reference() -> None:
    tensor = TensorData(np.zeros((80, 1, 1), np.float32), "float32")
    payload = Payload(
        tensors={"residual_stream": tensor}, layers={"residual_stream": tuple(range(80))}
    )
    uri = "2026-01-01T00-00-00-00-00_a-task_dGqEALzP2YtXGKHYY23z9r.lens/D6BBMayzuZZJ.safetensors"
    handle = Activations.of(payload, uri=uri, root="/home/someone/project/logs")
    assert len(handle.model_dump_json()) <= 400


@given(
    st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4),
    st.lists(st.integers(0, 200), min_size=1, unique=True).map(sorted),
    st.sampled_from(get_args(Reduce)),
)
def test_no_words_of_a_reference_are_long_enough_for_an_attachment(
    shape: list[int], layers: list[int], reduce: Reduce
) -> None:
    facts = Stored("0" * 16, {"r": (tuple(shape), "bfloat16", tuple(layers))}, 5, 3, reduce, False)
    handle = Activations.stored(facts, uri="a.lens/b.safetensors", root="/logs")
    logged = handle.model_dump(mode="json")
    # Inspect would put longer text elsewhere in the log.
    assert len(str(logged["tensors"]["r"])) <= 100 or not isinstance(logged["tensors"]["r"], str)
    assert Activations.from_reference(json.loads(json.dumps(logged))).tensors == handle.tensors


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"$lens": "steering/1"},
        {"$lens": "activations/1"},
        {"$lens": "activations/2"},
        {"$lens": "activations/2", "sha256": "", "n_prompt": 1, "n_completion": 1,
         "tensors": {"r": "bfloat16 1x2 of layers 3"}},
    ],
)  # fmt: skip
def test_something_else_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="reference"):
        Activations.from_reference(bad)
    assert activations({}) is None
    assert activations(None) is None


def test_that_a_file_stays_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_payload_module._Left, "is_told", False)
    caplog.set_level("WARNING")
    for name in ("gone", "memory://lens/gone"):
        remove_file(str(tmp_path / name) if name == "gone" else name)
    (tmp_path / "x").write_bytes(b"x")
    remove_file(str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    assert not caplog.records
    for name in ("a", "b"):
        (tmp_path / name).mkdir()  # as little as a file that may not be removed
        remove_file(str(tmp_path / name))
    (said,) = caplog.messages
    assert said.startswith(str(tmp_path / "a"))
    assert "could not be removed (IsADirectoryError" in said
