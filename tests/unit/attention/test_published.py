"""What others published for a model, by its name, with source and licence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inspect_lens import published_settings
from inspect_lens._base.published import PUBLISHED
from inspect_lens._cli import app
from inspect_lens.attention import AttentionHeads, import_heads, load_heads
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.scorer import attention_tracker, document_rank
from tests.kit.field_data import field_file

TRACKER = ("qwen2", "granite3_8b", "llama3_8b", "gemma2_9b", "phi3", "mistral_7b")


def test_each_has_a_source_a_licence_and_one_use() -> None:
    assert len({(one.model, one.kind) for one in PUBLISHED}) == len(PUBLISHED)
    for one in PUBLISHED:
        assert "github.com/" in one.source, one
        assert all((one.source, one.licence, "/" in one.model)), one
        assert one.heads or one.files, one
        assert len(set(one.heads)) == len(one.heads)


@pytest.mark.parametrize("name", TRACKER)
def test_heads_are_those_of_the_authors_configurations(name: str) -> None:
    theirs = import_heads(field_file(f"attention_tracker/{name}-attn_config.json"))
    (ours,) = published_settings(theirs.model, kind="attention_tracker")
    assert ours.heads == theirs.heads


def test_heads_are_loaded_by_the_name_of_the_model(tmp_path: Path) -> None:
    listed = load_heads("qwen/qwen2-1.5b-instruct")
    assert (listed.method, listed.model) == ("attention_tracker", "Qwen/Qwen2-1.5B-Instruct")
    assert listed.threshold is None
    assert listed.found is not None
    assert "CC-BY-NC" in listed.found.source
    core = load_heads("mistralai/Mistral-7B-Instruct-v0.2", method="core")
    assert core.heads[:2] == ((15, 21), (15, 1))
    mine = AttentionHeads(method="core", model="m", heads=((0, 1),))
    assert load_heads(mine.save(tmp_path / "mine.json")) == mine, "a file comes first"
    attention_tracker("Qwen/Qwen2-1.5B-Instruct", instruction="system")
    document_rank("microsoft/phi-4")
    for wrong, method in (("microsoft/phi-4", "attention_tracker"), ("org/none", None)):
        with pytest.raises(ArtifactError, match="inspect-lens settings MODEL"):
            load_heads(wrong, method=method)  # type: ignore[arg-type]


def test_heads_of_your_own_below_the_folder_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen2-1.5B-Instruct"
    mine = AttentionHeads(method="core", model="m", heads=((1, 1),))
    mine.save(f"heads/{name}.json")
    assert load_heads(name) == mine
    assert load_heads(f"vllm-lens/{name}") == load_heads(f"lens/{name}") != mine
    with pytest.raises(SpecError, match=r"kind='heads'; allowed are attention_tracker, core"):
        published_settings(name, kind="heads")  # type: ignore[arg-type]


def test_the_command_lists_them() -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["settings", *words])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    said = run("meta-llama/Meta-Llama-3-8B-Instruct")
    assert "heads 5.18 7.12 9.29 17.2 (layer.head)" in said
    assert "layer 12" in said
    assert "resid_pre" in said
    assert "revision not stated" in said
    every = json.loads(run("--json"))["settings"]
    assert len(every) == len(PUBLISHED)
    with pytest.raises(ArtifactError, match=r"allowed are .*Qwen/Qwen2-1\.5B-Instruct"):
        run("org/none")
    assert published_settings("lens/Qwen/Qwen2-1.5B-Instruct")[0].kind == "attention_tracker"
