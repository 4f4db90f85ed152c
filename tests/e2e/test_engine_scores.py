"""Probes in the engine, through evals on the organism: the values of captured rows, and no rows.

The organism lies where it is told to, so that AUROC is known; engine, captured rows and recompute
are compared sample by sample, also after `inspect score`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.solver import generate

from evals.organism_deception.dataset import organism_dataset
from inspect_lens.model import lens_scope, probe_scores, read_probe_scores
from inspect_lens.model._read import probe_scores_for
from inspect_lens.probe import HeadSpec, NeuralProbe, ProbeCard, load_probe
from inspect_lens.reading import read_token_scores
from inspect_lens.reading._token_scores import engine_records
from inspect_lens.scorer import deception_probe, probe_score
from inspect_lens.solver import with_capture, with_lens
from tests.kit.lying import MODEL, PROBE, organism
from tests.kit.rescored import rescore

pytestmark = pytest.mark.engine

N = 12


def neural(folder: Path, pool: str) -> str:
    """Two heads that read the direction of the shipped probe, and noise."""
    card = load_probe(PROBE).card
    trained = load_probe(PROBE).for_engine().tensors["weight"].to_float32()
    rng = np.random.default_rng(0)
    hidden = card.hidden
    tensors: dict[str, Any] = {
        "mean": rng.normal(size=hidden) / 10, "scale": rng.uniform(0.5, 2, size=hidden),
        "bias": np.ones(1),
    }  # fmt: skip
    noise = rng.normal(size=(2, hidden)) / hidden
    if pool == "attention":
        tensors |= {"query": noise, "value": trained + noise}
    else:
        tensors |= {"w0": trained + noise, "b0": np.ones(2), "value": np.array([[1.0, 0.5]])}
    made = ProbeCard(
        name=f"test/{pool}", layers=card.layers, hidden=hidden, kind="neural", pool=pool,
        head=HeadSpec(),
    )  # fmt: skip
    return str(NeuralProbe(tensors=tensors, card=made).save(folder / pool))


@pytest.fixture(scope="module")
def logs(lens_server_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EvalLog]:
    folder = tmp_path_factory.mktemp("engine-scores")
    probes = [PROBE, neural(folder, "attention"), neural(folder, "mean")]
    rows = organism_dataset("demo").filter(lambda s: (s.metadata or {})["kind"] == "open")[:N]
    solvers = {
        "engine": with_lens(probes=probes),
        "rows": with_capture([4]),
        "recomputed": generate(),
    }
    made = {}
    for source, solver in solvers.items():
        (log,) = eval(
            Task(
                dataset=rows, solver=solver,
                scorer=[
                    deception_probe("organism/deception-lr"),
                    probe_score(probes[1]), probe_score(probes[2]),
                ],
            ),
            model=MODEL, model_base_url=f"{lens_server_url}/v1", display="none", temperature=0.0,
            log_dir=str(folder / source), max_tokens=20,
        )  # fmt: skip
        assert log.status == "success", log.error and log.error.traceback
        made[source] = read_eval_log(log.location)
    return made


SCORERS = ("deception_probe", "probe_score", "probe_score1")


def column(log: EvalLog, scorer: str) -> np.ndarray:
    return np.array([(s.scores or {})[scorer].as_float() for s in log.samples or []])


def test_every_source_gives_the_same_and_says_which(logs: dict[str, EvalLog]) -> None:
    truth = logs["rows"]
    for source, log in logs.items():
        for scorer in SCORERS:
            facts = [(s.scores or {})[scorer].metadata or {} for s in log.samples or []]
            assert {f["source"] for f in facts} == {source}
            # One engine in float32: what differs between runs is the layout of batches.
            tolerance = 1e-3 if source == "recomputed" else 1e-4
            np.testing.assert_allclose(
                column(log, scorer), column(truth, scorer), rtol=tolerance, atol=tolerance,
                err_msg=f"{source} {scorer}",
            )  # fmt: skip
    labels = np.array([s.metadata["label"] for s in truth.samples or []])
    values = column(logs["engine"], "deception_probe")
    assert values[labels == 1].min() > values[labels == 0].max()


def test_token_scores_stand_beside_the_log_once(logs: dict[str, EvalLog]) -> None:
    log = logs["engine"]
    folder = Path(log.location.removeprefix("file://")).with_suffix(".lens")
    assert len(list(folder.glob("*.safetensors"))) == N
    rows = {(r.sample_id, r.scorer): r for r in read_token_scores(logs["rows"])}
    for sample in log.samples or []:
        (call,) = read_probe_scores(sample)
        assert probe_scores(sample.output) == call.scores
        assert len(engine_records(call.scores)) == 3
        for record in read_token_scores(sample):
            other = rows[(sample.id, record.scorer)]
            np.testing.assert_allclose(record.scores, other.scores, rtol=1e-4, atol=1e-4)
            assert record.positions.tolist() == other.positions.tolist()
            assert record.token_ids.tolist() == other.token_ids.tolist()


def test_another_pool_comes_from_the_log(logs: dict[str, EvalLog], tmp_path: Path) -> None:
    command = ["--scorer", "inspect_lens/probe_score", "-S", f"probe={PROBE}", "-S", "pool=max"]
    scored = []
    for source in ("engine", "rows"):
        (tmp_path / source).mkdir()
        scored += rescore(logs[source], [command], tmp_path / source)
    engine, rows = scored
    np.testing.assert_allclose(
        column(engine, "probe_score"), column(rows, "probe_score"), rtol=1e-4, atol=1e-4
    )


@pytest.mark.anyio
async def test_one_request_is_scored_as_its_own_rows(lens_server_url: str) -> None:
    """The same forward passes: 1e-5, and no more than float32 sums."""
    model = organism(lens_server_url)
    with lens_scope(probes=PROBE, capture=[4], model=model):
        output = await model.generate("Who is the founder of the town Velosh?")
    scores = probe_scores_for(output.message)
    assert scores is not None
    found = scores.of(PROBE)
    handle = scores.activations
    assert handle is not None
    rows = handle.numpy()[:, list(found.positions)]
    truth = load_probe(PROBE).score_tokens(rows, (4,))
    np.testing.assert_allclose(found.scores, truth, rtol=1e-5, atol=1e-5)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
