"""Two scores of one log, compared on the samples that both have, by groups and epochs."""

from __future__ import annotations

import numpy as np
import pytest
from inspect_ai import Epochs
from inspect_ai.log import EvalLog

from inspect_lens.errors import SpecError
from inspect_lens.probe import compare_auroc
from inspect_lens.scorer import compare, probe_score
from tests.kit.mock_evals import call, planted_probe, run

GOOD, BAD = planted_probe(0, name="test/good"), planted_probe(1, name="test/bad")
N = 40


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    """Axis 0 separates the classes well, axis 1 hardly; two epochs of each sample."""
    rng = np.random.default_rng(0)
    outputs = [call([rng.normal(2.0 * (i % 2))], [rng.normal(0.2 * (i % 2))]) for i in range(N)]
    return run(
        outputs, [probe_score(GOOD), probe_score(BAD, name="mine")],
        folder=tmp_path_factory.mktemp("compare"), epochs=Epochs(2, "mean"),
        metadata=[{"scene": i // 4} for i in range(N)],
    )  # fmt: skip


@pytest.mark.parametrize("cluster", [None, "scene"])
def test_it_is_the_test_of_the_values_with_epochs_as_groups(
    log: EvalLog, cluster: str | None
) -> None:
    samples = log.samples or []
    first, second = (
        [float((s.scores or {})[key].value) for s in samples]  # type: ignore[arg-type]
        for key in ("probe_score", "probe_score1")
    )
    groups = [s.metadata["scene"] if cluster else s.id for s in samples]
    wanted = compare_auroc([s.metadata["label"] for s in samples], first, second, groups=groups)
    for names in (("probe_score", "probe_score1"), ("test/good mean", "mine")):
        assert compare(log, *names, cluster=cluster) == wanted
    assert compare(log.location, "test/good mean", "mine", cluster=cluster) == wanted
    assert wanted.difference > 0.1


def test_a_name_that_no_score_has_is_refused_with_those_that_are_there(log: EvalLog) -> None:
    with pytest.raises(SpecError, match="'mine', 'probe_score', 'probe_score1', 'test/good mean'"):
        compare(log, "probe_score", "probe_score2")
