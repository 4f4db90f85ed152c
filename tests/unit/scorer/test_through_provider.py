"""The whole client path: task, solver, provider, HTTP, sidecar, scorer, and the log again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval, score
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.solver import generate

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.scorer import probe_score
from inspect_lens.solver import with_capture
from tests.kit.fake_server import FakeLensServer, residual, tokens_of

pytestmark = pytest.mark.usefixtures("elsewhere")

H, LAYER = 8, 2
COMPLETION = 3


def saved_probe(folder: Path) -> str:
    """Sums the residual stream at layer 2; the first coordinate there is the position."""
    card = ProbeCard(name="org/tiny", layers=(LAYER,), hidden=H)
    return str(Probe.from_direction(np.ones(H), card=card).save(folder / "probe"))


def run(
    server: FakeLensServer, folder: Path, solver: Any, *, probe: str, **options: Any
) -> EvalLog:
    task = Task(
        dataset=[Sample(input=f"tell me about number {i}", metadata={"label": i}) for i in (0, 1)],
        solver=solver,
        scorer=probe_score(probe, **options),
        config=GenerateConfig(extra_body={"chat_template_kwargs": {"x": 1}}),
    )
    model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
    (log,) = eval(task, model=model, display="none", log_dir=str(folder / "logs"))
    return log


def values(log: EvalLog) -> list[float]:
    assert log.status == "success", log.error
    assert log.samples is not None
    return [next(iter((s.scores or {}).values())).as_float() for s in log.samples]


def expected(i: int) -> float:
    """The mean over the completion without its last sampled token."""
    prompt = tokens_of(f"tell me about number {i}")
    # The fake server renders a chat with its roles; only the number of prompt tokens matters.
    tokens = prompt + tokens_of("word00 word01 word02")
    fed = list(range(len(prompt), len(tokens) - 1))
    acts = residual(tokens, (LAYER,), fed, H).to_float32()
    return float(acts[0].sum(axis=1, dtype=np.float64).mean())


def test_capture_score_reload_and_score_again(tmp_path: Path) -> None:
    probe = saved_probe(tmp_path)
    with FakeLensServer() as server:
        log = run(server, tmp_path, with_capture([LAYER], positions="completion"), probe=probe)
        bodies = server.requests
    assert log.samples is not None
    first = next(iter((log.samples[0].scores or {}).values()))
    assert first.metadata is not None
    start, stop = first.metadata["positions"]
    assert stop - start == first.metadata["n_tokens"] == COMPLETION - 1
    shift = start - len(tokens_of("tell me about number 0"))
    assert values(log) == pytest.approx([expected(0) + shift, expected(1) + shift])
    # The task's own extra_body survived.
    assert all(body["chat_template_kwargs"] == {"x": 1} for body in bodies)
    # The server is gone; the sidecar is not.
    again = score(
        read_eval_log(log.location), probe_score(probe), action="overwrite", display="none"
    )
    assert values(again) == values(log)


def test_without_capture_the_eval_says_how_to_capture(tmp_path: Path) -> None:
    probe = saved_probe(tmp_path)
    with FakeLensServer() as server:
        log = run(server, tmp_path, generate(), probe=probe, source="captured")
    assert log.error is not None
    assert "with_capture([2])" in log.error.message


@pytest.mark.parametrize(("layers", "positions"), [([], "all"), ([2], "assistant"), (["a"], "all")])
def test_with_capture_refuses_a_wrong_spec_before_any_sample(layers: Any, positions: Any) -> None:
    with pytest.raises(SpecError):
        with_capture(layers, positions=positions)
