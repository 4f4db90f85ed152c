"""Logs that were moved with their files are read on every surface, without a word about it."""

from __future__ import annotations

import gc
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
from inspect_ai import score
from inspect_ai.analysis import samples_df
from inspect_ai.log import edit_score, read_eval_log, read_eval_log_sample
from inspect_ai.scorer import ScoreEdit

from inspect_lens.errors import ArtifactError
from inspect_lens.model import _places, activations, activations_for, know_log
from inspect_lens.model._handle import MEMORY, MESSAGES
from inspect_lens.reading import captured_calls_column, lens_column
from inspect_lens.scorer import probe_score
from tests.kit.mock_evals import call, metric_values, planted_probe, run, scores

PROBE = planted_probe()


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A log in another folder than the one it was written in, in a process that knows neither."""
    old = tmp_path / "old"
    old.mkdir()
    log = run([call([1.0], folder=old), call([4.0], folder=old)], probe_score(PROBE), folder=old)
    shutil.move(old, tmp_path / "new")
    MEMORY.clear()
    MESSAGES._items.clear()
    _places._roots.clear()
    return str(tmp_path / "new" / Path(log.location).name)


def test_it_is_scored(moved: str) -> None:
    log = score(read_eval_log(moved), probe_score(PROBE), action="overwrite", display="none")
    assert [s.value for s in scores(log)] == [1.0, 4.0]


def test_it_fills_columns(moved: str) -> None:
    frame = samples_df(moved, columns=[lens_column(PROBE), captured_calls_column()], quiet=True)
    assert frame["axis"].tolist() == [1.0, 4.0]


def test_columns_work_in_other_processes(moved: str) -> None:
    columns = [lens_column(PROBE), captured_calls_column()]
    assert pickle.loads(pickle.dumps(columns))[0].name == "axis"
    frame = samples_df([moved], columns=columns, quiet=True, parallel=2)
    assert frame["axis"].tolist() == [1.0, 4.0]
    assert frame["captured_calls"].tolist() == [1, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_an_output_has_its_activations(moved: str, whole: bool) -> None:
    sample = (read_eval_log(moved).samples or [])[0] if whole else read_eval_log_sample(moved, id=0)
    handle = activations(sample.output)
    assert handle is not None
    assert handle.numpy().shape == (2, 3, 4)


def test_a_message_alone_has_its_activations(moved: str) -> None:
    """A monitor that runs over a log is given messages, and no transcript."""
    log = read_eval_log(moved)
    message = (log.samples or [])[0].messages[-1]
    handle = activations_for(message)
    assert handle is not None
    assert handle.numpy().shape == (2, 3, 4)
    # With the log goes what is known of its messages.
    del log
    gc.collect()
    assert activations_for(message) is None


def test_the_policy_is_asked_before_a_file_is_looked_for(
    moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, bool] = {}
    policy = _places.may_follow

    def note(address: str) -> bool:
        asked[str(Path(address).parents[1])] = allowed = policy(address)
        return allowed

    monkeypatch.setattr(_places, "_roots", OrderedDict())
    monkeypatch.setattr(_places, "may_follow", note)
    know_log(moved)
    handle = activations(read_eval_log_sample(moved, id=0).output)
    assert handle is not None
    assert handle.numpy().size
    shutil.rmtree(Path(moved).parent / "planted.lens")
    MEMORY.clear()
    with pytest.raises(ArtifactError, match="does not lie next to it"):
        handle.numpy()
    assert asked == {str(Path(moved).parent.parent / "old"): False, str(Path(moved).parent): True}


def test_an_edited_score_keeps_the_metrics(moved: str) -> None:
    log = read_eval_log(moved)
    edit_score(
        log, sample_id=0, score_name="probe_score", edit=ScoreEdit(value=5.0, metadata={"by": "me"})
    )
    assert metric_values(log)["auroc"] == 0.0
