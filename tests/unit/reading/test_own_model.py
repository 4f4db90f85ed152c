"""Whether a model is the card's is told by its weights; the name alone is no proof, nor a doubt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import get_model

from inspect_lens.probe import ModelRef, Probe, fingerprint_model
from inspect_lens.scorer import probe_score
from tests.kit.fake_server import FakeLensServer
from tests.kit.mock_evals import WIDTH, call, planted_probe, run, scores


def log_of(tmp_path: Path, probe: Probe) -> EvalLog:
    return run([call([3.0])], probe_score(probe), folder=tmp_path)


@pytest.mark.parametrize(
    ("card", "rate"),
    [
        (None, 0.01),
        (ModelRef(name="model"), 0.01),  # as the mock model is called
        (ModelRef(name="model", sha256="0" * 64), 0.01),
        (ModelRef(name="org/other", sha256="0" * 64), None),
        (ModelRef(name="unknown"), 0.01),
    ],
)
def test_a_rate_is_given_where_the_model_may_be_the_card_s(
    tmp_path: Path, card: ModelRef | None, rate: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = scores(log_of(tmp_path, planted_probe(model=card)))
    facts: dict[str, Any] = found.metadata or {}
    assert facts["model_verified"] is False
    assert (facts["fpr"], facts["threshold"]) == (rate, 2.5)
    assert ("no_rate" in facts) == (rate is None)
    assert ("'model'" in (found.explanation or "")) == (rate is None)
    assert ("calibrate on its answers" in (found.explanation or "")) == (rate is None)
    assert ("not known" in caplog.text) == (rate is None)


@pytest.mark.parametrize("own", [True, False])
def test_a_served_name_is_looked_up_at_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """The server tells the folder that it serves under the name."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    fingerprint = fingerprint_model(folder) if own else "0" * 64
    probe = planted_probe(model=ModelRef(name="org/trained", sha256=fingerprint))
    with FakeLensServer(hidden=WIDTH) as server:
        server.root = str(folder)
        (log,) = eval(
            Task(dataset=[Sample("who?")], scorer=probe_score(probe, source="recompute")),
            model=get_model("lens/org/tiny", base_url=server.url, memoize=False),
            display="none", log_dir="logs",
        )  # fmt: skip
    if own:
        (found,) = scores(log)
        assert (found.metadata or {})["model_verified"] is True
    else:
        assert log.error is not None
        assert "has fingerprint" in log.error.message


def test_samples_that_end_together_ask_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    probe = planted_probe(model=ModelRef(name="org/other", sha256="0" * 64))
    with FakeLensServer(hidden=WIDTH) as server:
        (log,) = eval(
            Task(dataset=[Sample("who?") for _ in range(8)], scorer=probe_score(probe)),
            model=get_model("lens/org/tiny", base_url=server.url, memoize=False, capture="all"),
            display="none", log_dir="logs",
        )  # fmt: skip
        # The provider asks when it attaches; the second time is for all samples.
        assert server.read.count("/v1/models") == 2
        assert server.read.count("/v1/inspect_lens") == 1
    assert log.status == "success"
    assert caplog.text.count("is not known") == 1
