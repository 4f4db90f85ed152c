"""Tasks over the rollouts of arXiv:2502.03407: answered anew, or read as they were recorded."""

from __future__ import annotations

from typing import Any, Literal

from inspect_ai import Task
from inspect_ai.dataset import Dataset
from inspect_ai.model import GenerateConfig

from evals.kit.arguments import required_probe
from evals.kit.grading import graded_probe
from evals.kit.samples import load_samples
from inspect_lens import judged_arguments
from inspect_lens.reading import ProbeReader
from inspect_lens.scorer import deception_probe
from inspect_lens.solver import read_given, with_capture
from inspect_lens.view import probe_viewer

__all__ = ["Policy", "rollout_task"]

Policy = Literal["on", "off"]
"""`on`: the model that is probed answers, and a judge grades; `off`: the recorded answers are
read, with the grades that came with them."""


_ASKED_WITH: dict[str, dict[str, Any]] = {"apollo_sandbagging": {"system": True}}
"""By set: the source reads answers without the system message, and asks with it."""


@judged_arguments
def rollout_task(
    name: str,
    rubric: str,
    *,
    data: str | None,
    probe: str | None,
    layer: int | None,
    policy: Policy,
    max_tokens: int,
    temperature: float,
) -> Task:
    """A task over one of the rollout sets.

    Args:
        name: of the set in `inspect_lens.data.DATASETS`.
        rubric: for the judge, one of `RUBRICS`.
        data: file or folder of rollouts.
        probe: a deception probe of the model that is evaluated.
        layer: one of the probe's layers.
        policy: who answers.
        max_tokens: longest answer.
        temperature: of sampling.

    Returns:
        The task.

    Raises:
        SpecError: a policy that is neither, or no file.
    """
    probe = required_probe(probe)
    reader = ProbeReader.of(probe, layer=layer)
    if policy == "off":
        return Task(
            dataset=load_samples(name, data),
            solver=read_given(reader.probe.layers, reader.probe.site),
            scorer=deception_probe(probe, layer=layer),
            viewer=probe_viewer(),
        )
    return Task(
        dataset=_once(load_samples(name, data, on_policy=True, **_ASKED_WITH.get(name, {}))),
        solver=with_capture(**reader.capture),
        scorer=graded_probe(probe, rubric, layer),
        config=GenerateConfig(temperature=temperature, max_tokens=max_tokens),
        viewer=probe_viewer({"graded_probe": ("probe", "grade", "deceptive")}),
    )


def _once(dataset: Dataset) -> Dataset:
    """Each prompt once: rollouts repeat a prompt with other answers."""
    first = {(s.metadata or {})["group"]: s.id for s in reversed(dataset)}
    return dataset.filter(lambda s: first[(s.metadata or {})["group"]] == s.id)
