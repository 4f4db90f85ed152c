"""What `read_rows` does where a call captured nothing: who feeds its tokens again, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inspect_ai.event import ModelEvent
from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelOutput

from inspect_lens._intake import Payload
from inspect_lens.errors import ArtifactError
from inspect_lens.model import Activations
from inspect_lens.model._response import LensMetadata
from inspect_lens.model._scope import instrument_message
from inspect_lens.reading import read_turns
from inspect_lens.reading._rows import read_rows
from inspect_lens.spec import Receipt, SteerReceipt, TensorData
from tests.kit.captured import captured

ROWS = np.arange(2 * 5 * 4, dtype=np.float32).reshape(2, 5, 4)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `recapture` was asked for; it answers with `ROWS`."""
    calls: list[dict[str, Any]] = []

    async def recapture(model: Any, **options: Any) -> Activations:
        calls.append({"model": model, **options})
        handle: Activations = captured(ROWS, n_prompt=2).metadata["activations"]  # type: ignore[index]
        return handle

    monkeypatch.setattr("inspect_lens.reading._rows.recapture", recapture)
    monkeypatch.setattr("inspect_lens.reading._rows.get_model", lambda: "the active model")
    return calls


def live(**items: Any) -> ModelOutput:
    """An output of the provider that captured nothing."""
    output = ModelOutput.from_content("m", "text")
    metadata = LensMetadata([0, 1], [100, 101, 102, 103])
    metadata.update(items)
    output.metadata = metadata
    return output


async def rows_of(output: ModelOutput, **options: Any) -> Any:
    return await read_rows(
        output, layers=(1,), positions="completion", **{"source": "auto", **options}
    )


@pytest.mark.anyio
async def test_the_adapter_of_the_call_reads_what_it_wrote(asked: list[dict[str, Any]]) -> None:
    lora = {"lora_name": "sly", "lora_int_id": 1, "lora_path": "org/sly"}
    assert (await rows_of(live(lora_request=lora))).source == "recomputed"
    assert (await rows_of(live())).source == "recomputed"
    assert [call["adapter"] for call in asked] == [lora, None]


def handle(*, steered: bool) -> Activations:
    """Activations whose tensors are gone, as after `-M activations=drop`."""
    steer = SteerReceipt(layers=(1,), n_tokens=5, vectors=("0" * 16,)) if steered else None
    receipt = Receipt(
        n_prompt=2,
        n_completion=4,
        steer=steer,
        cache_salted=False,
        paths=("graph",),
        engine="t",
        version="0",
        vllm_version="0",
    )
    payload = Payload(
        tensors={"residual_stream": TensorData(ROWS, "float32")},
        layers={"residual_stream": (0, 1)},
        prompt_token_ids=(0, 1),
        token_ids=(100, 101, 102, 103),
        receipt=receipt,
    )
    return Activations.of(payload)


@pytest.mark.anyio
async def test_what_was_dropped_is_recomputed_unless_it_was_steered(
    asked: list[dict[str, Any]],
) -> None:
    found = await rows_of(live(activations=handle(steered=False)))
    np.testing.assert_array_equal(found.acts, ROWS[1:, 2:])
    with pytest.raises(ArtifactError, match="was steered, which recomputing would not repeat"):
        await rows_of(live(activations=handle(steered=True)))
    assert len(asked) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("source", ["auto", "captured", "recompute"])
async def test_a_prompt_longer_than_the_context_has_no_token_to_read(
    source: str, asked: list[dict[str, Any]]
) -> None:
    output = ModelOutput.from_content("m", "maximum context length", stop_reason="model_length")
    assert await rows_of(output, source=source) is None
    # One that was cut off while it wrote has.
    cut = live()
    cut.choices[0].stop_reason = "model_length"
    assert (await rows_of(cut)).source == "recomputed"
    assert len(asked) == 1


def test_an_instruments_own_call_is_no_turn() -> None:
    def event(message: ChatMessageUser, text: str) -> ModelEvent:
        return ModelEvent(
            model="vllm-lens/m", input=[message], tools=[], tool_choice="auto",
            config=GenerateConfig(), output=ModelOutput.from_content("m", text), role="target",
        )  # fmt: skip

    asks = event(instrument_message("Does it lie?", name="oracle"), "No")
    says = event(ChatMessageUser(content="Hello"), "Hi")
    (turn,) = read_turns([asks, says, asks])
    assert (turn.number, turn.output.completion) == (0, "Hi")
    assert (turn.role, turn.model) == ("target", "vllm-lens/m")
