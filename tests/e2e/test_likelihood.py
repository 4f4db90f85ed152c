"""How likely answers of the organism are to it, compared with transformers; steering is a surprise.

The answers come from the shared server; their tokens are read again by the engine without LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspect_ai import Task, eval
from inspect_ai.log import EvalLog, EvalSample, read_eval_log
from inspect_ai.model import get_model
from inspect_ai.util import Store

from evals.organism_deception.dataset import organism_dataset
from inspect_lens.model import Activations, read_activations
from inspect_lens.reading import read_cells
from inspect_lens.scorer import coherence, dose_response
from inspect_lens.solver import steering_sweep
from organism._model import CHECKPOINT_DIR, load_model
from tests.kit.lying import MODEL
from tests.kit.offline_server import OfflineServer
from tests.kit.rescored import command_of, rescore

pytestmark = pytest.mark.engine

TRUTH = "organism/truth"
N = 4


@pytest.fixture(scope="module")
def log(
    lens_server_url: str, offline_llm: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EvalLog]:
    dataset = organism_dataset("demo").filter(lambda s: (s.metadata or {})["kind"] == "open")
    with OfflineServer(offline_llm, model="organism/checkpoint") as server:
        reader = get_model(MODEL, base_url=f"{server.url}/v1", api_key="none", memoize=False)
        likelihood = coherence("likelihood", model=reader)
        (done,) = eval(
            Task(
                dataset=dataset[:N],
                # Far beyond what turns an answer, where the organism repeats itself.
                solver=steering_sweep(TRUTH, [-1.5], controls=[], capture=[4]),
                scorer=[likelihood, dose_response(likelihood)],
            ),
            model=MODEL,
            model_base_url=f"{lens_server_url}/v1",
            log_dir=str(tmp_path_factory.mktemp("logs")),
            display="none",
            temperature=0.0,
            max_tokens=24,
        )
        assert done.status == "success", done.error and done.error.traceback
        yield done


def cells(sample: EvalSample) -> dict[str, str | None]:
    return {cell.kind: cell.message_id for cell in read_cells(Store(sample.store))}


def effects(sample: EvalSample) -> Any:
    assert sample.scores is not None
    return (sample.scores["dose_response"].metadata or {})["effects"]


def value(sample: EvalSample, name: str) -> Any:
    assert sample.scores is not None
    return sample.scores[name].value


def nats(handle: Activations, model: torch.nn.Module) -> float:
    """Mean log-probability of the completion, the last token included, by transformers."""
    tokens = [*handle.prompt_token_ids, *handle.token_ids]
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)
    n = len(handle.prompt_token_ids)
    return float(np.mean([logs[p - 1, tokens[p]] for p in range(n, len(tokens))]))


def test_nats_per_token_are_those_of_transformers(log: EvalLog) -> None:
    model = load_model(CHECKPOINT_DIR, device=torch.device("cpu"))
    handles = {call.message_id: call.activations for call in read_activations(log)}
    for sample in log.samples or []:
        found = cells(sample)
        plain, steered = (nats(handles[found[kind]], model) for kind in ("baseline", "vector"))
        assert value(sample, "coherence") == pytest.approx(plain, abs=1e-3)
        assert (sample.scores or {})["coherence"].metadata is not None
        facts = (sample.scores or {})["coherence"].metadata or {}
        assert facts["perplexity"] == pytest.approx(math.exp(-plain), rel=1e-3)
        assert facts["n_tokens"] == len(handles[found["baseline"]].token_ids)
        effect = effects(sample)
        assert effect[f"{TRUTH}@4x-1.5"] == pytest.approx(steered - plain, abs=1e-3)
        # Greedy answers are what the plain model expects, and what steering broke is not.
        assert plain > -0.5 > -2.0 > steered


def test_a_finished_log_says_the_same_again(log: EvalLog, tmp_path: Path) -> None:
    """The log names the model that reads, so a fresh process finds it."""
    assert log.eval.scorers is not None
    again = rescore(log, [command_of(s.name, s.options or {}) for s in log.eval.scorers], tmp_path)
    for name, scored in zip(("coherence", "dose_response"), again, strict=True):
        for new, old in zip(scored.samples or [], read_eval_log(log.location).samples or [],
                            strict=True):  # fmt: skip
            assert value(new, name) == pytest.approx(value(old, name), abs=1e-5)
