"""Patching on a real engine: Hugging Face passes with a hook, and planted facts of the organism."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from inspect_ai.dataset import Sample

from evals.organism_causal_tracing import fact_dataset
from inspect_lens._patching.runs import Run, next_token
from inspect_lens.errors import SpecError
from inspect_lens.patch import CausalTrace, PatchSweep, causal_trace, embedding_std, patch_sweep
from inspect_lens.patch._sweep import open_runs
from inspect_lens.spec import Replace
from tests.kit.patched import SlowRuns
from tests.kit.repository import ROOT

pytestmark = pytest.mark.engine

CLEAN = "The temple Vustem is found in Kestria. The river Figubim is found in"
CORRUPTED = "The mineral Nubrush is found in Dorrick. The river Kusubrer is found in"
ANSWER, FOIL = " Kestria", " Maruland"


@pytest.fixture(scope="module")
def slow() -> SlowRuns:
    return SlowRuns(ROOT / "organism/checkpoint")


def slowly(slow: SlowRuns, function: Any, *args: Any, **options: Any) -> Any:
    """The same call, on Hugging Face passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspect_lens.patch._sweep.open_runs", lambda _: slow)
        return function(slow, *args, **options)


def pairs(n: int) -> list[tuple[str, str, Sample, Sample]]:
    """Clean and corrupted prompts that differ in a statement without meaning, and in one name."""
    facts = [s for s in fact_dataset() if str(s.input).endswith("is found in")]
    found: list[tuple[str, str, Sample, Sample]] = []
    for a, b in itertools.combinations(facts, 2):
        same = str(a.input).split()[1] == str(b.input).split()[1]
        if not same or a.target == b.target or any(a in pair[2:] for pair in found):
            continue
        first, other = [s for s in facts if s not in (a, b)][len(found) :: 7][:2]
        clean = f"{first.input}{first.target}. {a.input}"
        found.append((clean, f"{other.input}{other.target}. {b.input}", a, b))
    return found[:n]


def test_a_run_patched_into_itself_is_equal_to_the_bit(offline_llm: Any) -> None:
    found = patch_sweep(
        offline_llm, CLEAN, CLEAN, answer=ANSWER, foil=FOIL,
        positions=[0, 4, -2, -1], in_flight=1, floor_runs=2,
    )  # fmt: skip
    assert (found.logprob == found.clean.logprob).all()
    assert (found.metric == found.corrupted.metric).all()
    assert found.floor == 0.0
    assert not found.above_floor.any()


@pytest.mark.parametrize("site", ["resid_post", "resid_pre"])
def test_a_layer_patched_at_all_positions_is_the_clean_run(offline_llm: Any, site: Any) -> None:
    runs = open_runs(offline_llm)
    ids, bad = runs.tokens(CLEAN), runs.tokens(CORRUPTED)
    wanted = [next_token(runs, CLEAN, ids, answer, "answer") for answer in (ANSWER, FOIL)]
    rows = runs.capture(ids, None, site)
    at = tuple(range(len(bad)))
    assert len(ids) == len(bad)
    every = [
        Run(bad, (Replace(rows=rows.values[[i]], layers=(i,), positions=at, site=site),))
        for i in rows.layers
    ]
    clean, corrupted, *patched = [
        values for _, values in sorted(runs.logprobs([Run(ids), Run(bad), *every], wanted, 64))
    ]
    gap = (clean[0] - clean[1]) - (corrupted[0] - corrupted[1])
    assert gap > 10
    for answer, foil in patched:
        recovered = ((answer - foil) - (corrupted[0] - corrupted[1])) / gap
        assert recovered == pytest.approx(1.0, abs=1e-5)


def test_cells_are_forward_passes_with_a_hook(offline_llm: Any, slow: SlowRuns) -> None:
    """Closed form, against Hugging Face: log-probabilities of every cell to 1e-3."""
    asked: dict[str, Any] = {"answer": ANSWER, "foil": FOIL, "positions": [3, 9, -4, -1]}
    for options in ({}, {"alpha": 0.5, "layers": [1, 4]}, {"window": 3, "layers": [2]}):
        found: PatchSweep = patch_sweep(offline_llm, CLEAN, CORRUPTED, **asked, **options)
        wanted: PatchSweep = slowly(slow, patch_sweep, CLEAN, CORRUPTED, **asked, **options)
        assert found.layers == wanted.layers
        assert found.tokens == wanted.tokens
        np.testing.assert_allclose(found.logprob, wanted.logprob, atol=1e-3)
        np.testing.assert_allclose(found.foil_logprob, wanted.foil_logprob, atol=1e-3)  # type: ignore[arg-type]
        np.testing.assert_allclose(found.clean, wanted.clean, atol=1e-3)
        assert found.floor < 1e-3


def test_chat_messages_are_tokens_of_the_template(offline_llm: Any, slow: SlowRuns) -> None:
    chat = [
        {"role": "user", "content": "Where is the river Figubim found?"},
        {"role": "assistant", "content": "The river Figubim is found in"},
    ]
    runs = open_runs(offline_llm)
    ids = runs.tokens(chat)
    assert ids == slow.tokens(chat)
    assert runs.tokens(chat[:1])[-1] == slow.tokens("<|assistant|>")[0]
    token = next_token(runs, chat, ids, ANSWER, "answer")
    ((_, (logprob,)),) = runs.logprobs([Run(ids)], [token], 1)
    assert logprob > np.log(0.9), "the organism knows it"
    # An answer that the model begins itself.
    begun = next_token(runs, chat[:1], runs.tokens(chat[:1]), "The", "answer")
    assert runs.texts([begun]) == ["The"]


def test_traces_are_forward_passes_with_noise(offline_llm: Any, slow: SlowRuns) -> None:
    asked: dict[str, Any] = {
        "subject": "Figubim", "answer": ANSWER, "draws": 2, "layers": [0, 3], "noise": 5.0,
    }  # fmt: skip
    prompt = "The river Figubim is found in"
    found: CausalTrace = causal_trace(offline_llm, prompt, **asked)
    wanted: CausalTrace = slowly(slow, causal_trace, prompt, **asked)
    assert found.noise_std == pytest.approx(wanted.noise_std, rel=1e-5)
    np.testing.assert_allclose(found.corrupted, wanted.corrupted, atol=1e-3)
    np.testing.assert_allclose(found.restored, wanted.restored, atol=1e-3)


def test_the_word_that_decides_is_found_among_words_that_only_differ(offline_llm: Any) -> None:
    right = 0
    made = pairs(10)
    for clean, corrupted, good, bad in made:
        found = patch_sweep(
            offline_llm, clean, corrupted, answer=good.target, foil=bad.target,
            align="ends", layers=[0],
        )  # fmt: skip
        name, text = str((bad.metadata or {})["subject"]), "".join(found.tokens)
        start = text.rindex(name)
        ends = np.cumsum([len(token) for token in found.tokens])
        stop = int(ends[found.best().position])
        right += start < stop <= start + len(name)
        assert found.clean.metric > 5 > -5 > found.corrupted.metric
    assert right == len(made) == 10


def test_the_name_of_a_fact_is_the_early_site(offline_llm: Any) -> None:
    facts = list(fact_dataset())[::11]
    std = embedding_std(offline_llm, [str((s.metadata or {})["subject"]) for s in facts])
    found = [
        causal_trace(
            offline_llm, str(s.input), subject=str((s.metadata or {})["subject"]),
            answer=str(s.target), draws=4, layers=[0, 5], noise=5.0, std=std,
        )
        for s in facts
    ]  # fmt: skip
    assert np.mean([trace.clean for trace in found]) > 0.95
    assert np.mean([trace.total_effect for trace in found]) > 0.3
    early = [trace.best(layers=(0,)).position in trace.subject for trace in found]
    assert sum(early) == len(facts) == 20
    # Behind the last block the last token has everything.
    assert all(t.best(layers=(5,)).position == len(t.tokens) - 1 for t in found)
    # Most of a prompt is no subject, so that this is no matter of chance.
    assert np.mean([len(t.subject) / len(t.positions) for t in found]) < 0.5


def test_prompts_of_unequal_length_are_refused_by_their_tokens(offline_llm: Any) -> None:
    with pytest.raises(
        SpecError, match=r"they differ at clean\[1:\d\] = .* and corrupted"
    ) as error:
        patch_sweep(
            offline_llm,
            "The river Talmo is found in",
            "The Velosh is found in",
            answer=" Verun",
        )
    assert "' found'" not in str(error.value), "what both end with is not named"
