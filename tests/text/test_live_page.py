"""The live token page is what its script makes of its log, with the numbers of that log."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from inspect_ai.log import read_eval_log

from inspect_lens.model import read_activations
from inspect_lens.probe import load_probe
from tests.kit.live_page import LAYER, LOG, PAGE, write_page
from tests.kit.page import read_page
from tests.kit.reference import HuggingFace
from tests.kit.repository import ROOT


def without_blocks(html: str) -> str:
    """The page without what is compressed, which depends on the version of zlib."""
    return re.sub(r'<script id="page-blocks".*?</script>', "", html, flags=re.DOTALL)


def test_the_page_is_what_the_script_makes(tmp_path: Path) -> None:
    made = write_page(out=tmp_path / "tokens.html")
    assert made.notes == ()
    fresh, committed = read_page(made.path), read_page(PAGE)
    assert without_blocks(fresh.html) == without_blocks(committed.html), (
        "run: python -m tests.kit.live_page --page"
    )
    for new, old in zip(fresh.blocks, committed.blocks, strict=True):
        assert (new.calls, new.tokens, new.ids) == (old.calls, old.tokens, old.ids)
        np.testing.assert_array_equal(new.scores, old.scores)
    assert PAGE.stat().st_size < 400_000


def test_its_numbers_are_those_of_the_log_and_of_the_model() -> None:
    page, probe = read_page(PAGE), load_probe("organism/deception-lr")
    log = read_eval_log(str(LOG))
    samples = log.samples or []
    assert [s["id"] for s in page.facts["samples"]] == [s.id for s in samples]
    for shown, sample in zip(page.facts["samples"], samples, strict=True):
        score = (sample.scores or {})["deception_probe"]
        assert shown["values"][0] == pytest.approx(score.value, abs=1e-4)
        assert shown["label"] == sample.metadata["label"]
    # The last call of each sample, fed again to the model by transformers.
    model = HuggingFace(ROOT / "organism/checkpoint")
    calls = {call.sample_id: call for call in read_activations(log)}
    for block, sample in list(zip(page.blocks, samples, strict=True))[::3]:
        handle = calls[sample.id].activations
        rows = model.residual_stream([*handle.prompt_token_ids, *handle.token_ids[:-1]])[
            LAYER
        ].numpy()
        wanted = probe.score_tokens(rows)
        scored = block.scores[0][np.isfinite(block.scores[0])]
        # bfloat16 rounds each row by 0.4 % at most.
        n = handle.n_completion - 1
        np.testing.assert_allclose(scored[-n:], wanted[-n:], atol=0.1)


def test_the_figure_of_turns_shows_the_calls_of_the_log() -> None:
    probe = load_probe("organism/deception-lr")
    svg = (ROOT / "docs/assets/turns-light.svg").read_text(encoding="utf-8")
    shown = re.findall(r"<title>(demo-\d+), turn (\d): ([\d.-]+)</title>", svg)
    wanted = []
    turns: Counter[str] = Counter()
    for call in read_activations(read_eval_log(str(LOG))):
        handle, name = call.activations, str(call.sample_id)
        turns[name] += 1
        rows = handle.numpy()[0][handle.n_prompt :]
        wanted.append((name, str(turns[name]), float(probe.score_tokens(rows).max())))
    wanted = [(name, turn, value) for name, turn, value in wanted if turns[name] > 1]
    assert len(shown) == len(wanted) == 8
    for (name, turn, text), (found, number, value) in zip(shown, wanted, strict=True):
        assert (name, turn) == (found, number)
        assert float(text) == pytest.approx(value, abs=2e-3)


def test_the_log_knows_no_machine() -> None:
    text = read_eval_log(str(LOG)).model_dump_json()
    assert not re.search(r'"/(?:work|root|tmp|home|Users|opt|mnt)/[^"]*"', text)
    assert '"revision":null' in text
