"""Who may run code: nobody unless the engine was started for it, or where it is disabled."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens import Hook
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.frontend.admission import compiled_of
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens.engine import PersistentHooks, register, unregister
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import EngineProbe
from tests.unit.vllm.compat.test_facts import config

HOOKS = {"apply_hooks": [Hook(fn=print, layer_indices=[1])]}


def learned(monkeypatch: pytest.MonkeyPatch, **settings: str) -> tuple[Any, Any]:
    """What a front-end that has learned of an engine judges, and the engine's input processor."""
    for name, value in settings.items():
        monkeypatch.setenv(f"INSPECT_LENS_{name}", value)
    front, processor = FrontEnd(), SimpleNamespace()
    front.learn(processor, config())
    monkeypatch.setattr(state._Holder, "front_end", front)

    def judge(extra_args: dict[str, Any]) -> object:
        return compiled_of(processor, SimpleNamespace(extra_args=extra_args))

    return judge, processor


def test_leave_is_not_given_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, processor = learned(monkeypatch)
    with pytest.raises(UnsupportedError, match="INSPECT_LENS_ALLOW_CODE=1"):
        judge(HOOKS)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(input_processor=processor))
    with pytest.raises(UnsupportedError, match="INSPECT_LENS_ALLOW_CODE=1"):
        PersistentHooks(llm)


def test_an_engine_that_has_to_be_awaited_is_refused() -> None:
    class AsyncLLM:
        async def collective_rpc(self, method: str) -> None:
            raise AssertionError("it would be left behind")

    probe = EngineProbe(layers=(1,), tensors={"weight": np.ones((1, 8), dtype=np.float32)})
    for tell in (
        partial(register, AsyncLLM(), "a", probe),
        partial(unregister, AsyncLLM(), "a"),
        partial(PersistentHooks, AsyncLLM()),
    ):
        with pytest.raises(UnsupportedError, match="llm: AsyncLLM runs in an event loop"):
            tell()


def test_disabling_the_plug_in_disables_hooks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, processor = learned(monkeypatch, ALLOW_CODE="1", DISABLE="1")
    for asked in (HOOKS, {"output_qk": True}):
        with pytest.raises(UnsupportedError, match="INSPECT_LENS_DISABLE is set"):
            judge(asked)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(input_processor=processor))
    with pytest.raises(UnsupportedError, match="INSPECT_LENS_DISABLE is set"):
        PersistentHooks(llm)
