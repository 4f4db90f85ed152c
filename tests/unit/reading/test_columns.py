from __future__ import annotations

from pathlib import Path

import pytest
from inspect_ai.analysis import SampleSummary, samples_df

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations_df
from inspect_lens.reading import captured_calls_column, lens_column
from inspect_lens.reading._shared import complete_arguments
from inspect_lens.scorer import probe_score
from tests.kit.mock_evals import call, planted_probe, run

PROBE = planted_probe()


def test_values_and_counts_come_from_the_files(tmp_path: Path) -> None:
    outputs = [call([1.0, 4.0], folder=tmp_path), call([2.0], folder=tmp_path)]
    outputs[1].metadata = None  # this one captured nothing
    log = run([outputs[0], outputs[0]], probe_score(PROBE), folder=tmp_path)
    frame = samples_df(
        log.location,
        columns=[
            *SampleSummary,
            lens_column(PROBE),
            lens_column(PROBE, "top", pool="max"),
            lens_column(PROBE, "flagged", threshold="fpr=0.01"),
            lens_column(PROBE, "above", pool="max", threshold=3.0),
            captured_calls_column(),
        ],
        quiet=True,
    )
    assert frame["axis"].tolist() == [2.5, 2.5]
    assert frame["top"].tolist() == [4.0, 4.0]
    assert frame["flagged"].tolist() == [False, False]  # at its threshold, and not above it
    assert frame["above"].tolist() == [True, True]
    assert frame["captured_calls"].tolist() == [1, 1]
    with pytest.raises(SpecError, match="allowed are last, all"):
        lens_column(PROBE, over="median")  # type: ignore[arg-type]


def test_a_sample_without_a_capture_has_no_value_and_no_row(tmp_path: Path) -> None:
    blind = call([2.0])
    blind.metadata = None
    log = run([call([1.0], folder=tmp_path), blind], [], folder=tmp_path)
    frame = samples_df(log.location, columns=[lens_column(PROBE, on_missing="skip")], quiet=True)
    assert frame["axis"].isna().tolist() == [False, True]
    calls = activations_df(log)
    assert calls["sample_id"].tolist() == [0]
    row = calls.iloc[0]
    assert (row["shape"], row["dtype"], row["layers"]) == ((2, 3, 4), "float32", (0, 1))
    assert (row["n_prompt"], row["n_completion"], row["epoch"]) == (2, 2, 1)
    assert row["uri"].startswith("planted.lens/")
    assert row["message_id"]


def test_a_path_a_folder_and_several_logs_list_the_same_calls(tmp_path: Path) -> None:
    log = run([call([1.0], folder=tmp_path)], [], folder=tmp_path)
    for logs in (log.location, tmp_path, [log], [log.location]):
        frame = activations_df(logs)  # type: ignore[arg-type]
        assert frame["sha256"].tolist() == activations_df(log)["sha256"].tolist()
    with pytest.raises(ArtifactError, match="nowhere: holds no log"):
        activations_df([log, str(tmp_path / "nowhere")])
    assert activations_df([]).columns.tolist()[:4] == ["log", "sample_id", "epoch", "message_id"]


def test_what_a_docstring_tells_of_no_parameter_is_an_error() -> None:
    doc = "Do.\n\n    Args:\n        layers: which.\n    "
    with pytest.raises(TypeError, match=r"Args documents \['layers'\]"):
        complete_arguments(doc, ["layer"])
