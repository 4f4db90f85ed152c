"""Beside a KV connector: rows, steering and plain requests are as without one.

vLLM's `ExampleConnector` runs on a CPU: it keeps prompts in a folder, by token ids alone. One
engine computes prompts and the other one reads that folder, as behind a proxy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import BLOCK, HIDDEN, Engine, start, tokens
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
PROMPT = tokens(100, seed=4)
LOADED = 99 // BLOCK * BLOCK
ALL: dict[str, Any] = {"output_residual_stream": True}
COMPLETION = {"inspect_lens": {"capture": {"layers": "all", "positions": "completion"}}}
VECTOR = torch.linspace(-2, 2, HIDDEN)
STEER: dict[str, Any] = {
    "apply_steering_vectors": [{"activations": [VECTOR.tolist()], "layer_indices": [1]}]
}


class Pair:
    """Two engines with one folder of prompts."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.store = store
        self.empty()
        self.first = self._start(folder, "producer")
        # One engine of a process may have a connector.
        self.second = self._start(folder, "consumer", in_process=True)

    def _start(self, folder: Path, role: str, *, in_process: bool = False) -> Engine:
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_role": f"kv_{role}",
            "kv_connector_extra_config": {"shared_storage_path": str(self.store)},
        }
        # Without a prefix cache of their own, what is not computed came from the folder.
        return start(
            folder,
            in_process=in_process,
            kv_transfer_config=connector,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=128,
        )

    @property
    def stored(self) -> set[str]:
        return {path.name for path in self.store.iterdir()}

    def empty(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)
        self.store.mkdir()


@pytest.fixture(scope="module")
def pair(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    found = Pair(tiny_folder, tmp_path_factory.mktemp("kv") / "store")
    yield found
    found.first.close()
    found.second.close()


@pytest.fixture(autouse=True)
def _no_prompts(pair: Pair) -> None:
    pair.empty()


def ask(engine: Engine, asked: dict[str, Any] | None = None, n: int = 8) -> Any:
    return engine.run([PROMPT], asked, max_tokens=n, logprobs=5)[0]


def rows(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.activations["residual_stream"]
    return found


def logprobs(output: Any) -> list[dict[int, float]]:
    return [{k: v.logprob for k, v in step.items()} for step in output.outputs[0].logprobs]


def expected(output: Any, reference: HuggingFace, steered: bool = False) -> torch.Tensor:
    fed = [*PROMPT, *list(output.outputs[0].token_ids)[:-1]]
    return reference.residual_stream(fed, {1: lambda h: h + VECTOR} if steered else None)


def test_a_steered_request_leaves_nothing_to_plain_ones_and_takes_nothing_of_theirs(
    pair: Pair, hugging_face: HuggingFace
) -> None:
    fresh = ask(pair.first)
    pair.empty()
    before = ask(pair.first, STEER | ALL)
    assert not pair.stored, "nobody may find its blocks by their tokens"
    plain = ask(pair.first)
    assert pair.stored
    assert plain.num_cached_tokens == 0
    assert logprobs(plain) == logprobs(fresh), "to the bit"
    # What is stored now are blocks of the plain one.
    after = ask(pair.first, STEER | ALL)
    assert [before.num_cached_tokens, after.num_cached_tokens] == [0, 0]
    for output in (before, after):
        wanted = expected(output, hugging_face, steered=True)
        assert max_relative_error(rows(output), wanted) <= TOLERANCE
    assert torch.equal(rows(before), rows(after))
    again = ask(pair.first)
    assert again.num_cached_tokens == LOADED, "plain requests have the connector's help as before"
    assert again.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_a_captured_prompt_is_computed_although_the_connector_has_it(
    pair: Pair, hugging_face: HuggingFace
) -> None:
    alone = ask(pair.first, ALL)
    stored = pair.stored
    again = ask(pair.second, ALL)
    assert stored == pair.stored != set()
    for output in (alone, again):
        assert output.num_cached_tokens == 0
        wanted = expected(output, hugging_face)
        assert rows(output).shape == wanted.shape
        assert max_relative_error(rows(output), wanted) <= TOLERANCE
    loaded = ask(pair.second, COMPLETION)
    assert loaded.num_cached_tokens == LOADED, "no row is asked for of what was loaded"
    wanted = expected(loaded, hugging_face)[:, len(PROMPT) :]
    assert max_relative_error(rows(loaded), wanted) <= TOLERANCE


def test_both_legs_of_a_proxy_ask_for_the_same_and_the_second_answers_whole(
    pair: Pair, hugging_face: HuggingFace
) -> None:
    first = ask(pair.first, ALL, n=1)
    second = ask(pair.second, ALL)
    assert rows(first).shape[1] == len(PROMPT)
    assert first.inspect_lens.capture.n_positions == len(PROMPT)
    assert second.inspect_lens.capture.n_positions == len(PROMPT) + 7
    assert max_relative_error(rows(second), expected(second, hugging_face)) <= TOLERANCE
    assert torch.equal(rows(second)[:, : len(PROMPT)], rows(first))


def test_rows_of_two_legs_join_and_nothing_is_computed_twice(
    pair: Pair, hugging_face: HuggingFace
) -> None:
    prompt = {"inspect_lens": {"capture": {"layers": "all", "positions": "prompt"}}}
    first, second = ask(pair.first, prompt, n=1), ask(pair.second, COMPLETION)
    assert second.num_cached_tokens == LOADED
    receipt = second.inspect_lens.capture
    assert (receipt.first_position, receipt.n_positions) == (len(PROMPT), 7)
    joined = torch.cat([rows(first), rows(second)], dim=1)
    assert max_relative_error(joined, expected(second, hugging_face)) <= TOLERANCE


def test_both_legs_are_steered(pair: Pair, hugging_face: HuggingFace) -> None:
    alone = ask(pair.first, STEER)
    ask(pair.first, STEER, n=1)
    second = ask(pair.second, STEER | ALL)
    assert second.outputs[0].token_ids == alone.outputs[0].token_ids
    wanted = expected(second, hugging_face, steered=True)
    assert max_relative_error(rows(second), wanted) <= TOLERANCE


def test_steered_captured_and_plain_requests_share_a_batch(
    pair: Pair, hugging_face: HuggingFace
) -> None:
    fresh = ask(pair.first)
    asked = [None, STEER | ALL, ALL, None, STEER | ALL, None]
    outputs = pair.second.run([PROMPT] * 6, asked, max_tokens=8)
    # The prompt is stored once, by the request above.
    assert [o.num_cached_tokens for o in outputs] == [LOADED, 0, 0, LOADED, 0, LOADED]
    for output, wish in zip(outputs, asked, strict=True):
        if wish is None:
            assert output.outputs[0].token_ids == fresh.outputs[0].token_ids
        else:
            wanted = expected(output, hugging_face, steered=wish is not ALL)
            assert max_relative_error(rows(output), wanted) <= TOLERANCE
