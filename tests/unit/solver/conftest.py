"""Evals of solvers on a fake server, with a vector and a probe of its width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.util import Store

from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.solver import GateDecisions
from inspect_lens.spec import LensRequest, parse_extra_args
from inspect_lens.vector import Vector, VectorCard
from tests.kit.fake_server import FakeLensServer

H, LAYER = 8, 2


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere: Path) -> None:
    raw = np.arange(2.0 * H).reshape(2, H) + 1
    card = VectorCard(name="tiny/v", layers=(1, LAYER), layer=LAYER, hidden=H)
    Vector.from_raw(raw, card=card).save(elsewhere / "vectors/tiny/v")
    # Reads the position-free part of a row; the fake model's tokens decide it.
    weight = np.zeros(H)
    weight[1] = 1.0
    facts = ProbeCard(name="tiny/p", layers=(LAYER,), hidden=H)
    Probe.from_direction(weight, card=facts).save(elsewhere / "probes/tiny/p")


def run(
    server: FakeLensServer,
    solver: Any,
    *,
    n: int = 2,
    scorer: Any = None,
    config: GenerateConfig | None = None,
    by_model: GenerateConfig | None = None,
    fails: bool = False,
) -> EvalLog:
    plain = GenerateConfig(extra_body={"chat_template_kwargs": {"x": 1}})
    task = Task(
        dataset=[Sample(input=f"tell me about number {i}", target="steered") for i in range(n)],
        solver=solver,
        scorer=scorer,
        config=config or (GenerateConfig() if by_model else plain),
    )
    model = get_model(
        "lens/org/tiny", base_url=server.url, memoize=False, config=by_model or GenerateConfig()
    )
    (log,) = eval(task, model=model, display="none", log_dir="logs")
    assert (log.status == "error") == fails, log.error
    return log


def sample(log: EvalLog, i: int = 0) -> EvalSample:
    assert log.samples is not None
    return log.samples[i]


def sent(body: dict[str, Any]) -> LensRequest:
    return parse_extra_args(body.get("vllm_xargs")) or LensRequest()


def decisions(log: EvalLog) -> Any:
    return GateDecisions(store=Store(sample(log).store)).decisions
