"""Ranks of a token over layers, from what a lens has read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai.model import ModelOutput, ModelUsage

from inspect_lens._intake import Payload
from inspect_lens.errors import SpecError
from inspect_lens.model import Activations, read_activations
from inspect_lens.scorer import lens_rank
from inspect_lens.spec import LENS_NAME, LensReceipt, Receipt, TensorData
from tests.kit.mock_evals import run, scores

LAYERS, TOKENS = (0, 2, 5), (9, 4)


def read(
    ranks: list[int],
    *,
    first: int = 0,
    n_prompt: int = 2,
    n: int = 3,
    written: tuple[int, ...] = (4, 5),
) -> ModelOutput:
    """A call of which a lens read `n` tokens.

    Token 4 has these ranks at the last token of the prompt, or at the one before it is written.
    """
    done = LensReceipt(layers=LAYERS, n_positions=n, first_position=first, top_k=1, tokens=TOKENS)
    numbers = np.full((len(LAYERS), n, done.columns), 77, dtype=np.float32)
    at = n_prompt - 1 - first + (written.index(4) if 4 in written else 0)
    numbers[:, at, -1] = ranks
    numbers[:, at, -3] = [-0.5 - rank for rank in ranks]
    receipt = Receipt(
        n_prompt=n_prompt, n_completion=2, lens=done, cache_salted=False, paths=("eager",),
        engine="inspect_lens", version="0", vllm_version="0",
    )  # fmt: skip
    payload = Payload(
        tensors={LENS_NAME: TensorData(numbers, "float32")},
        layers={LENS_NAME: LAYERS},
        prompt_token_ids=tuple(range(n_prompt)),
        token_ids=written,
        receipt=receipt,
    )
    handle = Activations.of(payload)
    handle.remember(payload)
    output = ModelOutput.from_content("mockllm/model", "an answer")
    output.usage = ModelUsage()  # else Inspect downloads a tokenizer to count
    output.metadata = {"activations": handle}
    return output


def test_the_row_before_the_answer_is_ranked_at_each_layer(tmp_path: Path) -> None:
    log = run([read([8, 3, 0]), read([6, 0, 0])], lens_rank(), folder=tmp_path)
    first, second = scores(log)
    assert first.value == {
        "rank@0": 8, "logprob@0": -8.5, "rank@2": 3, "logprob@2": -3.5, "rank@5": 0,
        "logprob@5": -0.5,
    }  # fmt: skip
    assert first.metadata == {"token": 4, "position": 1, "first_layer": 5, "turn": 0}
    assert second.metadata is not None
    assert second.metadata["first_layer"] == 2
    assert log.results is not None
    means = {score.name: score.metrics["mean"].value for score in log.results.scores}
    assert (means["rank@0"], means["rank@2"], means["logprob@5"]) == (7, 1.5, -0.5)


@pytest.mark.parametrize(
    ("ranks", "first"), [([0, 0, 0], 0), ([0, 4, 0], 5), ([0, 0, 1], None), ([1, 2, 3], None)]
)
def test_the_first_layer_is_that_from_which_on_it_is_the_best(
    tmp_path: Path, ranks: list[int], first: int | None
) -> None:
    (score,) = scores(run([read(ranks)], lens_rank(layers=[2]), folder=tmp_path))
    assert score.metadata is not None
    assert score.metadata["first_layer"] == first
    assert set(score.value) == {"rank@2", "logprob@2"}  # type: ignore[arg-type]


def test_another_token_and_row_may_be_named(tmp_path: Path) -> None:
    (score,) = scores(run([read([1, 1, 1])], lens_rank(9, position=0), folder=tmp_path))
    assert score.value == {f"{w}@{n}": 77 for n in LAYERS for w in ("rank", "logprob")}


def test_the_row_before_the_token_is_written(tmp_path: Path) -> None:
    calls = [read([8, 3, 0], written=(7, 4)), read([9, 9, 9], written=(7, 7))]
    there, never = scores(
        run(calls, lens_rank(position="answer", on_missing="skip"), folder=tmp_path)
    )
    assert there.value["rank@2"] == 3  # type: ignore[index, call-overload]
    assert there.metadata is not None
    assert there.metadata["position"] == 2
    assert never.reason == "no_tokens"
    with pytest.raises(SpecError, match=r"position=.*; allowed is an integer or 'answer'"):
        lens_rank(position="last")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": 5}, "target=5"),
        ({"layers": [1]}, "layer=1"),
        ({"position": 3}, "position=3"),
    ],
)
def test_what_was_not_read_is_an_error(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    log = run([read([1, 1, 1])], lens_rank(**options), folder=tmp_path)
    assert log.status == "error"
    assert log.error is not None
    assert words in log.error.message
    assert "the lens read" in log.error.message


def test_a_call_without_a_lens_is_an_error(tmp_path: Path) -> None:
    output = read([0, 0, 0])
    output.metadata = None
    log = run([output], lens_rank(), folder=tmp_path)
    assert log.error is not None
    assert "had no logit lens" in log.error.message


def test_a_handle_knows_its_positions_without_a_capture() -> None:
    handle = read_activations(read([0, 0, 0], first=1))[0].activations
    assert handle.positions == (1, 2, 3)
    assert handle.layers == LAYERS
    assert handle.lens is not None
    assert handle.lens.targets == TOKENS
