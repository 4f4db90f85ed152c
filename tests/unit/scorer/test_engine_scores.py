"""Every scorer of probes says the same of engine scores, captured rows and recomputed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import get_model
from inspect_ai.solver import generate

from inspect_lens.probe import HeadSpec, NeuralProbe, Probe, ProbeCard
from inspect_lens.reading import ProbeReader, read_message, read_token_scores
from inspect_lens.scorer import deception_probe, probe_cascade, probe_ensemble, probe_score
from inspect_lens.solver import with_capture, with_lens
from inspect_lens.view import write_view
from tests.kit.fake_server import FakeLensServer
from tests.kit.mock_evals import platt

pytestmark = pytest.mark.usefixtures("elsewhere")

H, LAYER = 8, 2


def probes(folder: Path) -> dict[str, str]:
    rng = np.random.default_rng(0)
    base = {"mean": rng.normal(size=H) + 5, "scale": rng.uniform(2, 4, size=H), "bias": np.ones(1)}
    card = {"layers": (LAYER,), "hidden": H}
    made = {
        "linear": Probe(
            weight=rng.normal(size=(1, H)), bias=np.ones(1), mean=base["mean"][None],
            scale=base["scale"][None],
            card=ProbeCard(name="org/linear", calibration=platt(), **card),
        ),
        "mlp": NeuralProbe(
            tensors=base | {
                "w0": rng.normal(size=(5, H)), "b0": rng.normal(size=5),
                "value": rng.normal(size=(1, 5)),
            },
            card=ProbeCard(
                name="org/mlp", kind="neural", pool="mean", head=HeadSpec(), calibration=platt(),
                **card,
            ),
        ),
        "attention": NeuralProbe(
            tensors=base | {n: rng.normal(size=(3, H)) for n in ("query", "value")},
            card=ProbeCard(
                name="org/attention", kind="neural", pool="attention", head=HeadSpec(), **card
            ),
        ),
    }  # fmt: skip
    return {name: str(probe.save(folder / name)) for name, probe in made.items()}


def solvers(saved: dict[str, str]) -> dict[str, Any]:
    return {
        "engine": with_lens(probes=list(saved.values())),
        "rows": with_capture([LAYER]),
        "recomputed": generate(),
    }


def run(server: FakeLensServer, folder: Path, solver: Any, scorers: Any) -> EvalLog:
    rows = [Sample(input=f"tell me about number {i}", metadata={"label": i % 2}) for i in range(4)]
    model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
    task = Task(dataset=rows, solver=solver, scorer=scorers)
    (log,) = eval(task, model=model, display="none", log_dir=str(folder / "logs"))
    assert log.status == "success", log.error
    return read_eval_log(log.location)


def values(log: EvalLog, name: str) -> np.ndarray:
    found = [(s.scores or {})[name].value for s in log.samples or []]
    return np.array([list(v.values()) if isinstance(v, dict) else v for v in found], dtype=float)


def test_a_table_of_scorers_and_sources(tmp_path: Path) -> None:
    saved = probes(tmp_path)
    scorers = [
        probe_score(saved["linear"]),
        probe_score(saved["mlp"]),
        probe_score(saved["attention"]),
        deception_probe(saved["linear"]),
        probe_cascade(saved["linear"], question="Is it?", band=(1e8, 1e9), unit="score"),
        probe_ensemble({"a": saved["linear"], "b": saved["mlp"]}),
    ]  # fmt: skip
    names = (
        "probe_score", "probe_score1", "probe_score2", "deception_probe", "probe_cascade",
        "probe_ensemble",
    )  # fmt: skip
    with FakeLensServer() as server:
        logs = {
            source: run(server, tmp_path / source, solver, scorers)
            for source, solver in solvers(saved).items()
        }
    for name in names:
        for source, log in logs.items():
            facts = [(s.scores or {})[name].metadata or {} for s in log.samples or []]
            parts = [part for f in facts for part in f.get("probes", {"": f}).values()]
            assert {part["source"] for part in parts} == {source}, name
            np.testing.assert_allclose(
                values(log, name), values(logs["rows"], name), rtol=1e-5, atol=1e-5, err_msg=name
            )
    for source, log in logs.items():
        found = {(r.scorer, r.turn): r for r in read_token_scores(log) if r.sample_id == 1}
        assert found[("probe_score", 0)].source == source
        for (scorer, _), record in found.items():
            other = next(
                r for r in read_token_scores(logs["rows"])
                if (r.sample_id, r.scorer, r.probe) == (1, scorer, record.probe)
            )  # fmt: skip
            np.testing.assert_allclose(record.scores, other.scores, rtol=1e-5, atol=1e-5)
            assert record.positions.tolist() == other.positions.tolist()
            assert record.token_ids.tolist() == other.token_ids.tolist()


def test_a_probe_that_did_not_run_is_recomputed_from_the_same_tokens(tmp_path: Path) -> None:
    saved = probes(tmp_path)
    with FakeLensServer() as server:
        log = run(
            server, tmp_path / "a", with_lens(probes=saved["linear"]), probe_score(saved["mlp"])
        )
        rows = run(server, tmp_path / "b", with_capture([LAYER]), probe_score(saved["mlp"]))
    assert {(s.scores or {})["probe_score"].metadata["source"] for s in log.samples or []} == {
        "recomputed"
    }  # fmt: skip
    np.testing.assert_allclose(values(log, "probe_score"), values(rows, "probe_score"), rtol=1e-6)


def test_tokens_that_the_engine_did_not_score_are_not_made_up(tmp_path: Path) -> None:
    saved = probes(tmp_path)
    with FakeLensServer() as server:
        log = run(
            server, tmp_path, with_lens(probes=saved["linear"]),
            probe_score(saved["linear"], positions="all"),
        )  # fmt: skip
        whole = run(
            server, tmp_path / "b", with_lens(probes=saved["linear"], probe_positions="all"),
            probe_score(saved["linear"], positions="all"),
        )  # fmt: skip
    (sources,) = {(s.scores or {})["probe_score"].metadata["source"] for s in log.samples or []}
    assert sources == "recomputed"
    (sources,) = {(s.scores or {})["probe_score"].metadata["source"] for s in whole.samples or []}
    assert sources == "engine"
    np.testing.assert_allclose(values(log, "probe_score"), values(whole, "probe_score"), rtol=1e-6)


@pytest.mark.anyio
async def test_the_call_behind_a_message_is_read_from_the_engine(tmp_path: Path) -> None:
    saved = probes(tmp_path)
    with FakeLensServer() as server:
        model = get_model(
            "lens/org/tiny", base_url=server.url, memoize=False, probes=saved["linear"],
            capture=str(LAYER),
        )  # fmt: skip
        output = await model.generate("tell me")
        scored = await read_message(ProbeReader.of(saved["linear"]), output.message)
        # The same call captured what another probe reads.
        other = await read_message(ProbeReader.of(saved["mlp"]), output.message)
    assert scored is not None
    assert other is not None
    assert (scored.source, other.source) == ("engine", "rows")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_viewer_shows_what_the_engine_scored(tmp_path: Path) -> None:
    saved = probes(tmp_path)
    with FakeLensServer() as server:
        scored = run(
            server, tmp_path / "a", with_lens(probes=saved["linear"]), probe_score(saved["linear"])
        )
        bare = run(server, tmp_path / "b", with_lens(probes=saved["linear"]), [])
    for log in (scored, bare):
        page = write_view(
            log, tmp_path / "page.html", probes=[saved["linear"]] if log is scored else []
        )
        assert (page.n_kept, page.n_lost) == (4, 0)
        assert page.n_scored > 0
