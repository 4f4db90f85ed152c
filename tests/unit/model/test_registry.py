from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from inspect_ai.model import get_model

import inspect_lens._registry
from inspect_lens.model._provider import LensAPI
from tests.kit.fake_server import FakeLensServer


def test_neither_torch_nor_vllm_is_loaded_until_a_tensor_is_read(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys

        def none_of(*heavy):
            assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)

        import inspect_lens._registry
        none_of("torch", "vllm", "openai")
        import inspect_lens.model, inspect_lens.client
        none_of("torch", "vllm", "openai")
        from inspect_ai.model import get_model
        model = get_model("vllm-lens/org/tiny", capture=[1])
        assert type(model.api).__name__ == "LensAPI", type(model.api)
        none_of("torch", "vllm")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Inspect announces hooks that are there at start; ours comes with the provider.
    assert "hooks enabled" not in done.stdout


def test_a_second_owner_of_the_name_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vllm_lens.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        importlib.reload(inspect_lens._registry)
    assert "lens/<model>" in caplog.text


@pytest.mark.parametrize("name", ["vllm-lens", "lens"])
def test_both_names_are_this_provider(server: FakeLensServer, name: str) -> None:
    model = get_model(f"{name}/org/tiny", base_url=server.url, memoize=False)
    assert isinstance(model.api, LensAPI)
    assert str(model) == f"{name}/org/tiny"
