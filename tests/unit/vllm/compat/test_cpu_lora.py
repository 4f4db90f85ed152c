"""An engine with adapters on a CPU: what vLLM's kernels get wrong there is refused at the edge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens._vllm.compat.cpu_lora import CpuAdapters
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.frontend.admission import compiled_of
from inspect_lens._vllm.frontend.wrappers import _process_inputs
from inspect_lens.errors import UnsupportedError
from tests.unit.vllm.compat.test_facts import config

ASKING = {"output_residual_stream": [1]}


class Processor:
    pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(state._Holder, "front_end", None)
    return config(lora_config=SimpleNamespace(max_loras=2))


def processor_of(engine: Any) -> Any:
    state.front_end().learn(made := Processor(), engine)
    return made


def params(extra: dict[str, Any] | None = None, prompt_logprobs: int | None = None) -> Any:
    return SimpleNamespace(extra_args=extra, prompt_logprobs=prompt_logprobs)


def adapter(number: int) -> Any:
    return SimpleNamespace(lora_int_id=number)


def test_log_probabilities_of_a_prompt_are_refused_where_they_end_the_engine(engine: Any) -> None:
    processor = processor_of(engine)
    assert compiled_of(processor, params()) is None
    with pytest.raises(UnsupportedError, match="without --enable-lora"):
        compiled_of(processor, params(prompt_logprobs=0))
    for other in (config(), config(lora_config=engine.lora_config, device_config__device_type="x")):
        assert CpuAdapters.of(other) is None
        assert compiled_of(processor_of(other), params(prompt_logprobs=0)) is None


def test_the_base_model_needs_a_slot_that_no_adapter_has(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    processor = processor_of(engine)
    served: list[Any] = []
    process = _process_inputs(lambda *args, **kwargs: served.append(kwargs))

    def ask(extra: Any = None, lora: Any = None) -> None:
        process(processor, "r", "a prompt", params(extra), lora_request=lora)

    for number in (7, 7):
        ask(lora=adapter(number))
    ask()
    client = SimpleNamespace(vllm_config=engine)
    state._call_utility(lambda *args: None)(client, "add_lora", adapter(8))
    with pytest.raises(UnsupportedError, match="--max-loras 3"):
        ask(ASKING)
    ask()
    ask()
    assert caplog.text.count("--max-loras 3") == 1, "said once for plain requests, which are served"
    assert len(served) == 5
    state._call_utility(lambda *args: None)(client, "remove_lora", 8)
    CpuAdapters.of(engine).note(None, uses_lens=True)  # type: ignore[union-attr]
