"""Lists of heads as files: written, found by name, taken from other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from inspect_lens.attention import AttentionHeads, HeadsFound, import_heads, load_heads
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.train import fit_threshold

HEADS = AttentionHeads(
    method="attention_tracker", model="my/model", heads=((9, 2), (3, 1)), head_scores=(0.5, 0.25),
    found=HeadsFound(data="made up", n_samples={"normal": 10}, settings={"n_std": 4}, n_heads=64),
)  # fmt: skip


def test_a_list_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threshold = fit_threshold([i / 100 for i in range(100)], 0.05, control="harmless")
    heads = HEADS.with_threshold(threshold)
    path = heads.save(tmp_path / "heads/my/model.json")
    assert load_heads(path) == load_heads(str(path)) == load_heads(heads) == heads
    assert load_heads(heads.model_dump(mode="json")) == heads, "as the log of an eval has it"
    assert json.loads(path.read_text())["heads"] == [[9, 2], [3, 1]]
    below = tmp_path / "evals/mine"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert load_heads("my/model") == load_heads("my/model.json") == heads
    assert heads.layers == (3, 9)


def test_a_list_comes_with_the_package() -> None:
    heads = load_heads("organism/attention-tracker")
    assert heads.model == "organism"
    assert heads.found is not None
    assert heads.threshold is not None
    assert set(heads.layers) <= set(range(6))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a list"),
        ('{"heads": [[0, 1]]}', "import_heads"),
        ("{", r"json: not a list of heads \(JSONDecodeError: .*\); allowed is a JSON object"),
        ('{"format": "inspect_lens/heads/1", "method": "core", "heads": []}', "each once"),
        ('{"format": "inspect_lens/heads/1", "method": "core", "heads": [[0, -1]]}', "from 0"),
        (
            '{"format": "inspect_lens/heads/1", "method": "core", "heads": [[0, 1]], "x": 1}',
            "x: no such field",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "heads.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match=message):
        load_heads(path)


def test_a_name_that_is_not_there_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heads").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=str(tmp_path / "heads")):
        load_heads("nobody/nothing")
    with pytest.raises(ArtifactError, match="was not found"):
        load_heads("../heads/nothing")


@pytest.mark.parametrize(
    "change", [{"heads": ((0, 1), (0, 1))}, {"head_scores": (1.0,)}, {"method": "guess"}]
)
def test_a_list_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AttentionHeads.model_validate(HEADS.model_dump() | change)


def test_configurations_of_other_tools_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "model_info": {"provider": "attn-hf", "model_id": "meta-llama/Meta-Llama-3-8B-Instruct"},
        "params": {"important_heads": [[5, 18], [7, 12]], "temperature": 0.1},
    }
    path.write_text(json.dumps(config))
    heads = import_heads(path)
    assert heads.heads == ((5, 18), (7, 12))
    assert (heads.model, heads.method) == ("meta-llama/Meta-Llama-3-8B-Instruct", "imported")
    path.write_text(json.dumps({"0-0": 0.1, "12-11": 1.0, "3-7": 0.5, "3-6": 0.5}))
    core = import_heads(path, model="mistral", top=3)
    assert core.heads == ((12, 11), (3, 6), (3, 7))
    assert (core.method, core.head_scores) == ("core", (1.0, 0.5, 0.5))
    path.write_text(json.dumps({"params": {"heads": []}}))
    with pytest.raises(ArtifactError, match="important_heads"):
        import_heads(path)
    with pytest.raises(SpecError, match="top=0"):
        import_heads(path, top=0)
