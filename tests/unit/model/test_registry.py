from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest
from inspect_ai.model import get_model

import inspect_lens._registry
from inspect_lens.model._provider import LensAPI
from tests.kit.fake_server import FakeLensServer


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
