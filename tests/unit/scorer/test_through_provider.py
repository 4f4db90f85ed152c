"""The whole client path: task, solver, provider, HTTP, sidecar, scorer, and the log again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.solver import generate

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.scorer import probe_score
from inspect_lens.solver import with_capture
from tests.kit.fake_server import FakeLensServer

pytestmark = pytest.mark.usefixtures("elsewhere")

H, LAYER = 8, 2


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
