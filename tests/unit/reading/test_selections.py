"""Tokens are read by what they are: a card's selection is honoured by every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import score
from inspect_ai.log import read_eval_log
from inspect_ai.model import ModelOutput

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations
from inspect_lens.reading import ProbeReader, _calls, read_token_scores
from inspect_lens.scorer import deception_probe, monitor_alarm, probe_ensemble, probe_score
from tests.kit.captured import captured
from tests.kit.mock_evals import WIDTH, planted_probe, run, scores
from tests.kit.repository import ROOT

TOKENIZER = str(ROOT / "organism/checkpoint")
PARTS: list[tuple[str, str, float]] = [
    ("prompt", "Who says?", 100.0),
    ("tag", "<think>", 50.0),
    ("reasoning", "I lie.", 7.0),
    ("tag", "</think>", 50.0),
    ("answer", "It is so.", 1.0),
    ("answer", "<tool_call>", 1.0),
    ("tool_calls", "No was not", 4.0),
    ("answer", "</tool_call>", 1.0),
    ("unread", ".", 9.0),
]
"""What a call says, part by part, and what the probe reads in each token of the part."""


def spoken(folder: Path | None = None) -> tuple[ModelOutput, dict[str, list[float]]]:
    """The call, and the values of each part."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
    ids: list[int] = []
    values: list[float] = []
    parts: dict[str, list[float]] = {}
    for name, text, value in PARTS:
        made = tokenizer.encode(text, add_special_tokens=False).ids
        ids += made[:1] if name == "unread" else made
        parts.setdefault(name, []).extend([value] * len(made))
        values += [value] * len(made)
    rows = np.zeros((2, len(ids) - 1, WIDTH), dtype=np.float32)
    rows[1, :, 0] = values[: len(ids) - 1]
    n_prompt = len(parts["prompt"])
    return captured(rows, n_prompt=n_prompt, ids=tuple(ids), folder=folder), parts


def wanted(parts: dict[str, list[float]], selection: str) -> float:
    after = parts["answer"] + parts["tool_calls"]
    return float(np.mean(after if selection == "answer" else parts[selection]))


SELECTIONS = ["reasoning", "answer", "tool_calls", "prompt"]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.anyio
async def test_a_reader_reads_what_is_selected(selection: str) -> None:
    output, parts = spoken()
    reader = ProbeReader.of(
        planted_probe(), selection=selection, tokenizer=TOKENIZER, source="captured"
    )
    reading = await reader.read(output)
    assert reading is not None
    assert reading.value == pytest.approx(wanted(parts, selection))
    handle = activations(output)
    assert handle is not None
    again = reader.read_captured(handle)
    assert again is not None
    assert again.value == reading.value
    # A threshold for the whole completion is none for a part of it.
    assert reading.threshold is None
    facts = reading.metadata()
    assert facts["selection"] == selection
    assert facts["n_tokens"] == len(reading.token_scores())
    assert len(facts["positions"]) == 2


@pytest.mark.anyio
async def test_the_last_k_and_a_pattern() -> None:
    output, parts = spoken()

    async def read(selection: str, **options: Any) -> Any:
        made = ProbeReader.of(planted_probe(), selection=selection, tokenizer=TOKENIZER, **options)
        return await made.read(output)

    n = len(parts["reasoning"])
    assert (await read("last:1")).value == 1.0
    assert len((await read(f"last:{n}")).token_scores()) == n
    assert (await read("regex:I lie")).value == 7.0
    assert await read("regex:never said") is None
    # Positions that are given bound what is selected.
    assert await read("reasoning", positions="prompt") is None


def test_a_wrong_selection_is_refused_at_once() -> None:
    for selection in ("thoughts", "last", "regex:("):
        with pytest.raises(SpecError, match="selection="):
            ProbeReader.of(planted_probe(), selection=selection)


def test_a_card_with_a_selection_is_honoured_everywhere(tmp_path: Path) -> None:
    """By scorers, monitors and data frames, live and in a finished log."""
    output, parts = spoken(tmp_path)
    output.model = f"mockllm/{TOKENIZER}"
    path = str(planted_probe(selection="reasoning").save(tmp_path / "p"))
    options: dict[str, Any] = {"tokenizer": TOKENIZER}
    made = [probe_score(path, **options), probe_score(path, selection="answer", **options)]
    log = run([output], made, folder=tmp_path)
    reasoning, answer = (log.samples or [])[0].scores.values()  # type: ignore[union-attr]
    assert reasoning.value == 7.0
    assert (reasoning.answer, answer.answer) == ("above threshold", None)
    assert answer.value == pytest.approx(wanted(parts, "answer"))
    (record,) = read_token_scores(reasoning)
    assert set(record.scores) == {7.0}
    assert len(record.positions) == len(parts["reasoning"])
    again = score(read_eval_log(log.location), made[0], action="overwrite", display="none")
    assert scores(again)[0].value == 7.0


@pytest.mark.parametrize("make", [probe_score, monitor_alarm, deception_probe])
def test_without_a_tokenizer_a_selection_is_an_error_and_not_ignored(
    tmp_path: Path, make: Any
) -> None:
    output, _ = spoken(tmp_path)
    log = run([output], make(planted_probe(selection="answer")), folder=tmp_path)
    assert log.status == "error"
    assert log.error is not None
    assert "no tokenizer" in log.error.message
    assert "selection='answer'" in log.error.message


def test_an_ensemble_reads_each_card_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, parts = spoken(tmp_path)

    found = _calls.TokenTexts.of("", tokenizer=TOKENIZER)
    monkeypatch.setattr(_calls.CallTexts, "of", lambda *_, **__: found)
    pair = {
        name: str(planted_probe(name=f"t/{name}", selection=name).save(tmp_path / name))
        for name in ("reasoning", "tool_calls")
    }
    log = run([output], probe_ensemble(pair, "vote"), folder=tmp_path)
    (found_scores,) = scores(log)
    assert found_scores.value == {"reasoning": 7.0, "tool_calls": 4.0, "ensemble": 1.0}
    assert parts["tool_calls"]


def test_not_all_of_a_selection_was_captured() -> None:
    output, _ = spoken()
    handle = activations(output)
    assert handle is not None
    with pytest.raises(ArtifactError, match="mlp_out was not captured"):
        ProbeReader.of(
            planted_probe(site="mlp_out"), selection="answer", tokenizer=TOKENIZER
        ).read_captured(handle)
