"""The format is read and judged; nothing of it is guessed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from inspect_lens.errors import ArtifactError
from inspect_lens.oracle import load_oracle
from inspect_lens.oracle._load import read_config

PLAIN = "Layer: 2\n ? ? ? \n"


def test_a_published_file_gives_the_published_prefix(write_oracle: Any) -> None:
    config = read_config(write_oracle())
    assert config.prefix((2,), 3) == PLAIN
    assert (config.hook_onto_layer, config.steering_coefficient) == (1, 1.0)
    assert config.act_layer_combinations == ((1,), (2,), (3,))


def test_a_template_with_line_feeds_means_the_same(write_oracle: Any) -> None:
    template = "Layer: {layer}\n{special_token} * {num_positions} \n"
    assert read_config(write_oracle(prefix_template=template)).prefix((2,), 3) == PLAIN


def test_each_layer_of_a_set_has_its_block(write_oracle: Any) -> None:
    config = read_config(write_oracle(act_layer_combinations=[[1, 3]]))
    assert config.prefix((1, 3), 2) == "Layer: 1\n ? ? \nLayer: 3\n ? ? \n"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("hook_onto_layer", ..., "is needed"),
        ("hook_onto_layer", -1, "of 0 or more"),
        ("hook_onto_layer", "1", "integer"),
        ("hook_onto_layer", True, "integer"),
        ("special_token", ..., "is needed"),
        ("special_token", "", "at least 1"),
        ("special_token", 5, "a text"),
        ("prefix_template", ..., "is needed"),
        ("prefix_template", "{special_token} * {num_positions}\n", "'{layer}' 0 times"),
        ("prefix_template", "Layer: {layer}\n ? ? \n", "0 times"),
        ("prefix_template", "{layer}{layer}{special_token} * {num_positions}", "2 times"),
        ("prefix_template", "{layer} {special_token} * {num_positions} {other}", "other"),
        ("prefix_template", "{layer} {special_token} * {num_positions} {", "no template"),
        ("steering_coefficient", ..., "is needed"),
        ("steering_coefficient", "1.0", "number"),
        ("act_layer_combinations", ..., "is needed"),
        ("act_layer_combinations", [], "at least 1"),
        ("act_layer_combinations", [[]], "at least 1"),
        ("act_layer_combinations", [[1, 1]], "twice"),
        ("act_layer_combinations", [[-2]], "of 0 or more"),
        ("act_layer_combinations", [18], "a list"),
        ("act_layer_combinations", [[0.5]], "integer"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    write_oracle: Any, field: str, value: Any, reason: str
) -> None:
    with pytest.raises(ArtifactError) as error:
        read_config(write_oracle(**{field: value}))
    assert field in str(error.value)
    assert reason in str(error.value)


def test_a_whole_coefficient_is_a_number(write_oracle: Any) -> None:
    assert read_config(write_oracle(steering_coefficient=2)).steering_coefficient == 2.0


def test_unknown_fields_warn_and_those_of_the_training_do_not(
    write_oracle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"lr": 1e-5, "wandb_project": "x", "train_batch_size": 16, "dataset_configs": []}
    with caplog.at_level(logging.WARNING, logger="inspect_lens"):
        read_config(write_oracle("quiet", **known))
        assert not caplog.records
        read_config(write_oracle("loud", injection_mode="replace", **known))
    (record,) = caplog.records
    assert "injection_mode" in record.getMessage()
    assert "wandb_project" not in record.getMessage()


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_what_is_no_object_is_refused(write_oracle: Any, text: str) -> None:
    folder = write_oracle()
    (folder / "ao_config.json").write_text(text)
    with pytest.raises(ArtifactError, match="ao_config"):
        read_config(folder)


def test_an_oracle_is_found_by_name_and_by_path(
    write_oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_oracle("mine")
    below = tmp_path / "evals" / "deep"
    below.mkdir(parents=True)
    for place in (tmp_path, below):
        monkeypatch.chdir(place)
        for name in ("mine", "oracles/mine", str(folder)):
            found = load_oracle(name)
            assert found.path.resolve() == folder
            assert found.base_model == "org/tiny"
    assert load_oracle(found) is found


def test_other_weights_are_another_adapter_on_the_server(write_oracle: Any) -> None:
    first, second = load_oracle(write_oracle("a")), load_oracle(write_oracle("b", weights=b"other"))
    assert first.adapter.startswith("a-")
    assert first.adapter.partition("-")[2] != second.adapter.partition("-")[2]
    assert first.lora_request["lora_path"] == str(first.path)
    served = load_oracle(first, served_as="theirs")
    assert served.lora_request == {"lora_name": "theirs", "lora_int_id": 1}


def test_an_oracle_of_the_hub_is_fetched_whole_and_at_its_revision(
    write_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = write_oracle("cached"), []

    def download(repo: str, name: str, revision: str | None) -> str:
        asked.append((repo, name, revision))
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_oracle("hf://org/repo@v2").path == folder
    assert {a[1] for a in asked} == {p.name for p in folder.iterdir()}
    assert {(a[0], a[2]) for a in asked} == {("org/repo", "v2")}

    def gone(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", gone)
    with pytest.raises(ArtifactError, match=r"could not be downloaded.*no network"):
        load_oracle("hf://org/repo")


def test_what_is_missing_is_named(write_oracle: Any) -> None:
    write_oracle("tiny")
    with pytest.raises(ArtifactError, match=r"'nobody' was not found.*there: .*tiny"):
        load_oracle("nobody")
    folder = write_oracle("no-weights")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="adapter_model"):
        load_oracle(folder)
    folder = write_oracle("no-lora")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ArtifactError, match="LoRA"):
        load_oracle(folder)
    with pytest.raises(ArtifactError, match="hf://owner/repository"):
        load_oracle("hf://nothing")
    with pytest.raises(ArtifactError, match="a list"):
        load_oracle(["x"])  # type: ignore[arg-type]
