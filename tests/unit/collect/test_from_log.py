"""A log as a store: labels, groups, the model that it is tied to, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig

from inspect_lens.collect import log_to_store
from inspect_lens.errors import NotCapturedError, SpecError
from inspect_lens.scorer import probe_score
from inspect_lens.train import ActivationSet
from tests.kit.mock_evals import call, planted_probe, run


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    folder = tmp_path_factory.mktemp("log")
    outputs = [call([float(i)] * (i + 1), folder=folder) for i in range(4)]
    facts: list[dict[str, Any]] = [{"scenario": i // 2} for i in range(4)]
    return run(outputs, probe_score(planted_probe()), folder=folder, metadata=facts, epochs=2)


def test_rows_labels_and_groups_are_those_of_the_log(log: EvalLog, tmp_path: Path) -> None:
    store = log_to_store(log.location, tmp_path / "acts", group="scenario")
    data = ActivationSet.from_store(store)
    assert len(data.ids) == 8
    for name, label, group, acts in zip(data.ids, data.labels, data.groups, data.acts, strict=True):
        i = int(name.partition("/")[0])
        assert (label, group) == (i % 2 == 1, str(i // 2))
        assert acts[1, :, 0].tolist() == [i] * (i + 1)
    assert (data.model, data.layers) == ("model", store.layers)
    with pytest.raises(SpecError, match="holds another run"):
        log_to_store(log.location, tmp_path / "acts", label=lambda sample: 1)


def test_a_store_says_what_its_calls_were_sampled_with(tmp_path: Path) -> None:
    """Of a model in a role, or with the task's config, the model of the eval knows nothing."""
    outputs = [call([1.0, 2.0], folder=tmp_path) for _ in range(2)]
    log = run(outputs, [], folder=tmp_path, temperature=0.7, seed=3)
    store = log_to_store(log, tmp_path / "acts")
    asked = json.loads((tmp_path / "acts" / "manifest.json").read_text())["request"]
    assert (asked["temperature"], asked["seed"], len(store)) == (0.7, 3, 2)
    # Without the events, the config of the eval is what is known.
    for sample in log.samples or []:
        sample.events = []
    log.eval.model_generate_config = GenerateConfig(temperature=0.5)
    plain = log_to_store(log, tmp_path / "plain", on_missing="skip").manifest["request"]
    assert plain["temperature"] == 0.5


def test_labels_come_from_a_score_or_a_function_too(log: EvalLog, tmp_path: Path) -> None:
    some = log_to_store(log, tmp_path / "some", label=lambda s: None if s.id == 0 else s.id == 3)
    assert sorted(ActivationSet.from_store(some).labels) == [False] * 4 + [True] * 2
    texts = log_to_store(log, tmp_path / "texts", label=lambda s: str(s.id % 2))  # as of a CSV file
    assert sum(ActivationSet.from_store(texts).labels) == 4
    with pytest.raises(SpecError, match="sample 2 has 2"):
        log_to_store(log, tmp_path / "no", label="score:probe_score")
    with pytest.raises(SpecError, match=r"0 labelled calls"):
        log_to_store(log, tmp_path / "none", label="nothing")


def test_a_call_without_activations_is_an_error_or_left_out(tmp_path: Path) -> None:
    outputs = [call([1.0, 2.0], folder=tmp_path) for _ in range(2)]
    outputs[0].metadata = None
    log = run(outputs, [], folder=tmp_path)
    with pytest.raises(NotCapturedError, match="captured nothing"):
        log_to_store(log, tmp_path / "all")
    store = log_to_store(log, tmp_path / "rest", on_missing="skip")
    assert np.asarray(ActivationSet.from_store(store).labels).tolist() == [True]


@pytest.mark.parametrize(
    ("told", "kept"),
    [(("judge", "judge"), "judge"), (("judge", ""), "")],
)
def test_where_labels_come_from_is_what_all_samples_say(
    told: tuple[str, str], kept: str, tmp_path: Path
) -> None:
    outputs = [call([1.0, 2.0], folder=tmp_path) for _ in told]
    facts: list[dict[str, Any]] = [{"label_source": source} for source in told]
    log = run(outputs, [], folder=tmp_path, metadata=facts)
    store = log_to_store(log, tmp_path / "acts")
    assert ActivationSet.from_store(store).label_source == kept


def test_what_no_card_has_a_word_for_is_refused(tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = [{"label_source": "human"}, {"label_source": "judge"}]
    outputs = [call([1.0, 2.0], folder=tmp_path) for _ in facts]
    log = run(outputs, [], folder=tmp_path, metadata=facts)
    with pytest.raises(SpecError, match=r"label_source='human'; allowed are instruction, judge"):
        log_to_store(log, tmp_path / "acts")


def test_a_label_that_no_sample_has_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    outputs = [call([1.0, 2.0], folder=tmp_path)]
    log = run(outputs, probe_score(planted_probe()), folder=tmp_path, metadata=[{"lies": 1}])
    for wrong, near in (("lie", "lies"), ("score:probe_scores", "score:probe_score")):
        with pytest.raises(SpecError, match=rf"label='{wrong}'; did you mean '{near}'\?"):
            log_to_store(log, tmp_path / "acts", label=wrong)


def test_a_label_that_is_none_in_each_sample_is_not_proposed(log: EvalLog, tmp_path: Path) -> None:
    assert log.samples is not None
    for sample in log.samples:
        sample.metadata = {"lied": None}
    with pytest.raises(SpecError, match=r"has label='lied'; it is None or unscored in each$"):
        log_to_store(log, str(tmp_path / "store"), label="lied")
    for sample in log.samples:
        sample.metadata, sample.scores = {}, {}
    with pytest.raises(SpecError, match=r"has label='lied'; there is nothing that could be one$"):
        log_to_store(log, str(tmp_path / "store"), label="lied")


def test_the_metadata_of_all_samples_are_columns(tmp_path: Path) -> None:
    outputs = [call([1.0, 2.0], folder=tmp_path) for _ in range(2)]
    facts: list[dict[str, Any]] = [
        {"condition": "honest", "truth": "Rome", "n": 3, "values": ["a"], "text": "a" * 257},
        {"condition": "lie", "truth": "Rome", "only_here": True, "text": "b"},
    ]
    log = run(outputs, [], folder=tmp_path, metadata=facts)
    data = ActivationSet.from_store(log_to_store(log, tmp_path / "acts"))
    columns = {name: data.columns[name] for name in ("condition", "truth")}
    assert columns == {"condition": ("honest", "lie"), "truth": ("Rome", "Rome")}
    assert not {"n", "values", "only_here", "text"} & set(data.columns)


def test_metadata_take_no_name_of_the_store_and_a_mark_is_no_truth(tmp_path: Path) -> None:
    outputs = [call([1.0, 2.0], folder=tmp_path) for _ in range(2)]
    facts: list[dict[str, Any]] = [
        {"id": "x", "group": "y", "truth": i == 0, "first": i == 0} for i in range(2)
    ]
    log = run(outputs, [], folder=tmp_path, metadata=facts)
    data = ActivationSet.from_store(log_to_store(log, tmp_path / "acts"))
    assert (data.key("id"), data.key("group")) == (data.ids, data.groups)
    assert data.groups == ("0", "1")
    assert data.key("first") == ("True", "False")
    assert "truth" not in data.columns
