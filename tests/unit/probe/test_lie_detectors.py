"""`import_probe`: files of the package lie-detectors, against the scores of that package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import (
    NeuralProbe,
    Probe,
    TokenText,
    fingerprint_model,
    import_probe,
    load_probe,
    select_tokens,
)
from inspect_lens.reading import ProbeReader
from inspect_lens.reading._thresholds import promise
from tests.kit.lie_detectors import ARCHITECTURES, FOLDER, HIDDEN, LAYER, write_probes

NAN = float("nan") * torch.ones(4)


def check(folder: Path, architecture: str) -> None:
    """Our scores of a file are those that the package gave."""
    theirs = np.load(folder / "rows.npz")
    probe = import_probe(folder / f"{architecture}.pt", name="mine/lies", kind="apollo")
    ours = probe.score_tokens(theirs["rows"])
    assert np.abs(ours - theirs[architecture]).max() < 1e-5
    assert probe.threshold is not None
    assert probe.threshold.value == pytest.approx(float(theirs[f"{architecture}.threshold"]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_the_package_that_wrote_the_file(architecture: str) -> None:
    check(FOLDER, architecture)


@pytest.mark.parametrize("module", ["deception.detectors.utils.types", "lie_detectors.types"])
@pytest.mark.parametrize("seed", [1, 2])
def test_scores_are_those_of_the_package_beside(tmp_path: Path, seed: int, module: str) -> None:
    pytest.importorskip("lie_detectors", reason="lie-detectors is not installed beside")
    write_probes(tmp_path, seed=seed, module=module)
    for architecture in ARCHITECTURES:
        check(tmp_path, architecture)


def test_the_engine_form_scores_as_the_probe(tmp_path: Path) -> None:
    rows = np.load(FOLDER / "rows.npz")
    linear = import_probe(FOLDER / "lr.pt", name="mine/lies").for_engine()
    weight = linear.tensors["weight"].to_float32()
    made = rows["rows"] @ weight.reshape(-1) + linear.tensors["bias"].to_float32()
    np.testing.assert_allclose(made, rows["lr"], atol=1e-4)
    mlp = import_probe(FOLDER / "mlp.pt", name="mine/lies").for_engine()
    parts = {name: tensor.to_float32() for name, tensor in mlp.tensors.items()}
    inner = np.maximum(rows["rows"] @ parts["w1"][0].T + parts["b1"], 0)
    np.testing.assert_allclose(
        inner @ parts["w2"].reshape(-1) + parts["b2"], rows["mlp"], atol=1e-4
    )


def test_the_card_says_what_is_known_and_what_is_not(tmp_path: Path) -> None:
    probe = import_probe(FOLDER / "lr.pt", name="organism/lies")
    assert isinstance(probe, Probe)
    card = probe.card
    assert (card.layers, card.hidden, card.positions) == ((LAYER,), HIDDEN, "completion")
    assert card.model is not None
    assert card.model.name == "organism/checkpoint"
    assert card.model.sha256 == fingerprint_model("organism/checkpoint")
    assert card.follow_up is not None
    assert (card.follow_up.question, card.follow_up.lie) == (
        "Did you lie just now? Say yes or no.", "yes",
    )  # fmt: skip
    assert probe.threshold is not None
    assert (probe.threshold.fpr, probe.threshold.control) == (0.02, "Alpaca")
    assert "was not measured here" in probe.threshold.guarantee
    said = promise(ProbeReader.of(probe), probe.threshold.value).text
    assert "2.00% of Alpaca samples may exceed it, as AISI lie-detectors states; that" in said
    said = " ".join(card.notes)
    assert "train_dataset random" in said
    assert "Not stated: the engine" in said
    folder = probe.save(tmp_path / "lies")
    again = load_probe(folder)
    assert again.sha256 == probe.sha256
    text = (folder / "card.md").read_text()
    assert "as AISI lie-detectors states of Alpaca" in text
    assert "0 of 0" not in text
    assert "Did you lie just now?" in text


@pytest.mark.parametrize(
    ("kind", "lie"),
    [("were-you-honest", "no"), ("were-you-truthful", "no"), ("did-you-lie", "yes")],
)
def test_kinds_that_ask_read_the_reply(kind: Any, lie: str) -> None:
    probe = import_probe(FOLDER / "mlp.pt", name="mine/lies", kind=kind, question="Really?")
    assert isinstance(probe, NeuralProbe)
    assert probe.card.follow_up is not None
    assert (probe.card.follow_up.question, probe.card.follow_up.lie) == ("Really?", lie)
    pieces = ("…", "did", " I", " say", " no", "?", "\n\n", "Yes", ".")
    read = select_tokens(TokenText(pieces=pieces, n_prompt=1), probe.card.selection)
    assert np.flatnonzero(read).tolist() == [7]


def test_a_kind_that_reads_the_answer_has_no_question() -> None:
    probe = import_probe(FOLDER / "dim.pt", name="mine/lies", kind="targeted", layer=7, model="m/x")
    card = probe.card
    assert (card.follow_up, card.selection, card.layers) == (None, "", (7,))
    assert card.model is not None
    assert card.model.name == "m/x"
    with pytest.raises(SpecError, match="reads the answer itself"):
        import_probe(FOLDER / "dim.pt", name="mine/lies", kind="apollo", question="Really?")


def test_what_cannot_be_known_has_to_be_said(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "lr.pt", tmp_path / "probe.pt")
    with pytest.raises(SpecError, match=r"kind=None.*were-you-honest"):
        import_probe(tmp_path, name="mine/lies")
    with pytest.raises(SpecError, match=r"question: .*word for word"):
        import_probe(tmp_path, name="mine/lies", kind="did-you-lie")
    with pytest.raises(SpecError, match="log-odds of yes and no"):
        import_probe(tmp_path, name="mine/lies", kind="unrelated")
    content = {
        "state_dict": {"direction": torch.ones(8), "threshold": torch.tensor(0.0)},
        "hyperparams": {"probe_architecture": "dim"},
    }
    torch.save(content, tmp_path / "bare.pt")
    with pytest.raises(SpecError, match="layer=None"):
        import_probe(tmp_path / "bare.pt", name="mine/lies", kind="apollo")


class _Runs:
    """Runs a command where its pickle is loaded without care."""

    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {}, "hyperparams": _Runs()}, "holds more than tensors"),
        ({"state_dict": {}}, "not a probe of lie-detectors"),
        ({"state_dict": {}, "hyperparams": {"probe_architecture": "svm"}}, "dim, lr or mlp"),
        ([1, 2], "not a probe of lie-detectors"),
        (
            {
                "state_dict": {"direction": "x", "threshold": "y"},
                "hyperparams": {"layer": 1, "probe_architecture": "dim"},
            },
            "not a probe of lie-detectors",
        ),
        (
            {
                "state_dict": {"direction": NAN, "threshold": torch.ones(1)},
                "hyperparams": {"layer": 1, "probe_architecture": "dim"},
            },
            "NaN or infinity",
        ),
        (
            {
                "state_dict": {
                    "direction": torch.ones(1).expand(1 << 20), "threshold": torch.ones(1)
                },
                "hyperparams": {"layer": 1, "probe_architecture": "dim"},
            },
            "declare more than",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_such_probe_is_refused(
    tmp_path: Path, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "probe.pt")
    with pytest.raises(ArtifactError, match=message):
        import_probe(tmp_path, name="mine/lies", kind="apollo")
    assert "must not run" not in capsys.readouterr().out


def test_an_address_on_the_hub_is_downloaded_with_its_readme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def download(repo: str, name: str, revision: str | None = None) -> str:
        asked.append((repo, name, revision))
        return str(FOLDER / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    probe = import_probe("hf://org/dyl-x@main", name="mine/lies", checkpoint="lr.pt")
    assert asked == [("org/dyl-x", "lr.pt", "main"), ("org/dyl-x", "README.md", "main")]
    assert probe.card.follow_up is not None


def with_readme(folder: Path, calibration: str, *, windows: bool = False) -> Path:
    """A copy of the probe beside another README."""
    shutil.copy(FOLDER / "dim.pt", folder / "probe.pt")
    text = (
        "---\ntags:\n  - apollo\n---\n| Target model | `org/m` |\n"
        f"| Calibration | {calibration} |\n"
    )
    written = f"\ufeff{text}".replace("\n", "\r\n") if windows else text
    (folder / "README.md").write_bytes(written.encode())
    return folder


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(
    ("said", "rate"),
    [("5% FPR on Alpaca", 0.05), ("0,5% FPR on Alpaca", 0.005), ("2.5 % FPR on Alpaca", 0.025)],
)
def test_a_readme_is_read_as_windows_writes_it(
    tmp_path: Path, said: str, rate: float, windows: bool
) -> None:
    probe = import_probe(with_readme(tmp_path, said, windows=windows), name="mine/lies")
    assert probe.threshold is not None
    assert (probe.threshold.fpr, probe.threshold.control) == (pytest.approx(rate), "Alpaca")
    assert probe.card.model is not None
    assert probe.card.model.name == "org/m"


@pytest.mark.parametrize("said", ["0% FPR on Alpaca", "150% FPR on Alpaca"])
def test_a_stated_rate_is_one_that_a_threshold_can_hold(tmp_path: Path, said: str) -> None:
    with pytest.raises(ArtifactError, match=f"'{said}'; allowed are rates above 0"):
        import_probe(with_readme(tmp_path, said), name="mine/lies")


def test_a_missing_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"probe\.pt: cannot be read"):
        import_probe(tmp_path, name="mine/lies", kind="apollo")
