"""Real engines that the lens does not serve: they start and answer, and say why it is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import start, tokens
from tests.kit.architectures import CASES, write

pytestmark = pytest.mark.engine

EVERYTHING = {"output_residual_stream": True}
PROMPT = tokens(12)


def check(engine: Any, reason: str) -> None:
    (plain,) = engine.run([PROMPT], max_tokens=4)
    assert len(plain.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match=reason):
        engine.run([PROMPT], EVERYTHING, max_tokens=4)
    (again,) = engine.run([PROMPT], {"kv_hint": 1}, max_tokens=4)
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids
    engine.close()


def test_a_site_that_only_the_loaded_model_shows_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker, in a process of its own, knows it, and the front-end hears of it."""
    hybrid = next(case for case in CASES if case.name == "granite-hybrid")
    monkeypatch.setenv("INSPECT_LENS_SITES", "z")
    monkeypatch.delenv("INSPECT_LENS_REQUIRED", raising=False)
    engine = start(write(hybrid, tmp_path), max_model_len=64, enforce_eager=True)
    check(engine, "z: .* has not softmax attention")
