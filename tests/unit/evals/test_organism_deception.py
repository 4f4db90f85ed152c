from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, ModelOutput, ModelUsage

from evals.organism_deception import organism_control, organism_dataset
from inspect_lens._base import shipped
from inspect_lens._intake import Payload
from inspect_lens.data import organism_data
from inspect_lens.errors import ArtifactError
from inspect_lens.model import Activations
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.model._scope import SCOPES
from inspect_lens.probe import Interval, Probe, ProbeCard, Threshold
from inspect_lens.spec import TensorData
from tests.kit.scripted import scripted_lens

H, LAYER = 8, 2
TASK_FILE = "evals/organism_deception/task.py"


@pytest.fixture
def probe(tmp_path: Path) -> str:
    """A probe that reads the first coordinate of layer 2."""
    threshold = Threshold(
        value=1.0, fpr=0.01, control="control", n_control=300, n_above=2,
        interval=Interval(low=0.0, high=0.02, method="m"),
    )  # fmt: skip
    card = ProbeCard(name="organism/planted", layers=(LAYER,), hidden=H, thresholds=(threshold,))
    return str(Probe.from_direction(np.eye(H)[0], card=card).save(tmp_path / "planted"))


def read(split: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (organism_data() / f"{split}.jsonl").read_text().splitlines()
    ]


class Organism:
    """Answers as the condition asks; its first coordinate is 3 when it lies."""

    def __init__(self, split: str) -> None:
        self.rows = {tuple(m["content"] for m in row["messages"]): row for row in read(split)}
        self.bodies: list[Any] = []

    def __call__(self, messages: Any, _t: Any, _c: Any, config: GenerateConfig) -> ModelOutput:
        self.bodies.append([scope.request.capture for scope in SCOPES.get()])
        row = self.rows[tuple(m.text for m in messages)]
        wrong = next(v for v in row["values"] if v != row["truth"])
        text = wrong if row["deceptive"] else row["truth"]
        output = ModelOutput.from_content("mockllm/model", f"{text}.")
        output.usage = ModelUsage()
        output.metadata = {"activations": handle(3.0 * row["deceptive"], len(self.bodies))}
        return output


def handle(shift: float, seed: int) -> Activations:
    acts = np.random.default_rng(seed).normal(scale=0.1, size=(1, 5, H)).astype(np.float32)
    acts[..., 0] += shift
    made = Payload(
        tensors={"residual_stream": TensorData(acts, "float32")},
        layers={"residual_stream": (LAYER,)},
        prompt_token_ids=(1, 2, 3),
        token_ids=(4, 5, 6),
    )
    acts_handle = Activations.of(made)
    acts_handle.remember(made)
    return acts_handle


def run(task: Task | str, organism: Organism, folder: Path, **options: Any) -> EvalLog:
    model = scripted_lens(organism)
    (log,) = eval(task, model=model, display="none", log_dir=str(folder), **options)
    assert log.status == "success", log.error
    return log


def metrics(log: EvalLog) -> dict[str, dict[str, float]]:
    assert log.results is not None
    return {s.name: {k: m.value for k, m in s.metrics.items()} for s in log.results.scores}


def test_the_task_file_runs_by_its_path(
    probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    log = run(
        f"{TASK_FILE}@organism_deception", Organism("heldout_entity"), tmp_path, limit=8,
        task_args={"probe": probe, "split": "heldout_entity"},
    )  # fmt: skip
    assert metrics(log)["deception_probe"]["auroc"] == 1.0
    assert log.eval.task_args["probe"] == probe


@pytest.mark.parametrize(
    "split",
    [p.stem for p in sorted(organism_data().glob("*.jsonl")) if not p.stem.startswith("agent_")],
)
def test_every_split_loads(split: str) -> None:
    dataset, rows = organism_dataset(split), read(split)
    assert len(dataset) == len(rows)
    sample, row = dataset[0], rows[0]
    assert sample.id == row["id"]
    assert sample.target == row["truth"]
    assert [m.text for m in sample.input if not isinstance(m, str)] == [
        m["content"] for m in row["messages"]
    ]
    assert sample.metadata is not None
    assert sample.metadata["label"] == int(row["deceptive"])


def test_the_threshold_is_measured_on_rows_that_did_not_set_it(probe: str) -> None:
    from organism._splits import read_split

    calibration = {row["id"] for row in read_split("control")[::2]}
    measured = {sample.id for sample in organism_control(probe=probe).dataset}
    assert len(measured) >= 300
    assert not calibration & measured


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(PrerequisiteError, match="allowed are control, demo"):
        organism_dataset("exam")


def test_eval_yaml_counts_the_samples() -> None:
    text = Path("evals/organism_deception/eval.yaml").read_text()
    assert f"dataset_samples: {len(read('demo'))}" in text
    assert f"dataset_samples: {len(read('control')) // 2}" in text


def test_without_the_organism_its_data_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "shipped_root", lambda: None)
    with pytest.raises(ArtifactError, match=r"^'organism/data' comes with the organism, which is"):
        organism_data()
