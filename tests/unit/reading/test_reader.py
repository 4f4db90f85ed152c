"""`ProbeReader`: one probe, any number of calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inspect_ai.model import ModelOutput

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Calibration, Interval, Probe, ProbeCard, Threshold
from inspect_lens.reading import ProbeReader
from tests.kit.captured import captured

WIDTH = 4
ORGANISM = Path(__file__).parents[3] / "organism/checkpoint"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


THRESHOLD = Threshold(
    value=2.5, fpr=0.01, control="controls", n_control=400, n_above=3,
    interval=Interval(low=0.0, high=0.02, method="m"),
)  # fmt: skip


def probe() -> Probe:
    facts = ProbeCard(name="test/first-axis", layers=(1,), hidden=WIDTH, thresholds=(THRESHOLD,))
    return Probe.from_direction(np.eye(1, WIDTH), card=facts)


def output(values: list[float], n_prompt: int = 2) -> ModelOutput:
    """A call whose first axis has these values, at the layers 0 and 1."""
    rows = np.zeros((2, len(values), WIDTH), dtype=np.float32)
    rows[1, :, 0] = values
    return captured(rows, n_prompt=n_prompt)


@pytest.mark.anyio
async def test_reads_the_tokens_of_the_card_and_says_which() -> None:
    reading = await ProbeReader.of(probe()).read(output([9, 9, 1, 2, 6]))
    assert reading is not None
    assert reading.value == pytest.approx(3.0)
    assert reading.rows.positions == range(2, 5)
    np.testing.assert_allclose(reading.token_scores(), [1, 2, 6])
    assert reading.verdict == "above threshold"
    assert reading.first_crossing(2.5) == 2
    with pytest.raises(SpecError, match="one for the mean of an answer, which cannot stand in"):
        reading.first_crossing()  # the maximum over the tokens is another statistic
    assert reading.first_crossing(1.2, pool="mean") == 1
    assert reading.metadata()["source"] == "rows"


@pytest.mark.anyio
async def test_the_threshold_holds_for_the_cards_own_settings_only() -> None:
    reading = await ProbeReader.of(probe(), pool="max").read(output([9, 9, 1, 2, 6]))
    assert reading is not None
    assert (reading.value, reading.threshold, reading.verdict) == (6.0, None, None)
    with pytest.raises(SpecError, match="no threshold for the maximum"):
        reading.first_crossing()


@pytest.mark.anyio
async def test_activations_alone_are_enough() -> None:
    made = output([0, 0, 4])
    assert made.metadata is not None
    reading = await ProbeReader.of(probe()).read(made.metadata["activations"])
    assert reading is not None
    assert reading.value == 4.0


@pytest.mark.anyio
async def test_nothing_selected_is_no_reading_and_nothing_captured_is_an_error() -> None:
    assert await ProbeReader.of(probe()).read(output([1, 2], n_prompt=2)) is None
    reader = ProbeReader.of(probe(), source="captured")
    with pytest.raises(ArtifactError, match="no activations"):
        await reader.read(ModelOutput.from_content("m", "text"))
    with pytest.raises(SpecError, match="allowed are auto, captured, recompute"):
        ProbeReader.of(probe(), source="guess")  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_calibration_holds_where_the_threshold_does() -> None:
    calibration = Calibration(method="platt", set="s", n=10, slope=2.0, intercept=-1.0)
    card = ProbeCard(
        name="test/p", layers=(1,), hidden=WIDTH, thresholds=(THRESHOLD,), calibration=calibration
    )
    made = Probe.from_direction(np.eye(1, WIDTH), card=card)
    reading = await ProbeReader.of(made).read(output([9, 9, 0.5]))
    assert reading is not None
    assert reading.probability == 0.5
    assert reading.metadata()["calibration"] == {
        "method": "platt", "slope": 2.0, "intercept": -1.0, "set": "s",
    }  # fmt: skip
    for options in ({"pool": "max"}, {"positions": "all"}):
        other = await ProbeReader.of(made, **options).read(output([9, 9, 0.5]))  # type: ignore[arg-type]
        assert other is not None
        assert (other.probability, other.threshold) == (None, None)
    # A card that read the reasoning alone says nothing of a reading of the whole completion.
    part = Probe.from_direction(
        np.eye(1, WIDTH), card=card.model_copy(update={"selection": "reasoning"})
    )
    assert ProbeReader.of(part).threshold is not None
    assert ProbeReader.of(part, selection="").threshold is None
    assert ProbeReader.of(part, selection="").calibration is None


def test_log_odds_and_probabilities_agree_and_isotonic_ones_are_finite() -> None:
    platt = Calibration(method="platt", set="s", n=10, slope=3.0, intercept=0.5)
    scores = np.linspace(-300, 300, 7)
    expected = 1 / (1 + np.exp(-np.clip(3 * scores + 0.5, -700, 700)))
    np.testing.assert_allclose([platt.probability(s) for s in scores], expected, atol=1e-300)
    assert platt.logit(2.0) == 6.5
    steps = Calibration(method="isotonic", set="s", n=98, x=(0.0, 1.0), y=(0.0, 1.0))
    assert steps.probability(0.25) == 0.25
    assert steps.logit(-5.0) == pytest.approx(np.log(0.01 / 0.99))
    assert steps.logit(5.0) == pytest.approx(-steps.logit(-5.0))


WORDS = "It is so. No, it was not! Who says?"


def spoken() -> tuple[ModelOutput, list[float], list[list[float]]]:
    """A call of the organism's tokenizer, the value of each token, and those of each sentence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ORGANISM / "tokenizer.json"))
    ids = tokenizer.encode(WORDS, add_special_tokens=False).ids
    values = [float((7 * i) % 5) for i in range(len(ids) - 1)]
    # A sentence is over with the token that completes its words, which the text itself tells.
    lengths = [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]
    stops = [i + 1 for i, n in enumerate(lengths) if n in (9, 25)]
    parts = [values[a:b] for a, b in zip([2, *stops], [*stops, len(values)], strict=True)]
    rows = np.zeros((2, len(values), WIDTH), dtype=np.float32)
    rows[1, :, 0] = values
    return captured(rows, n_prompt=2, ids=tuple(ids)), values, parts


@pytest.mark.anyio
async def test_a_pool_by_sentence_asks_the_models_tokenizer() -> None:
    call, _, parts = spoken()
    assert [len(part) > 1 for part in parts] == [True] * 3
    expected = max(sum(part) / len(part) for part in parts)
    card = ProbeCard(name="test/p", layers=(1,), hidden=WIDTH, thresholds=())
    made = Probe.from_direction(np.eye(1, WIDTH), card=card)
    for options, name in (
        ({"tokenizer": str(ORGANISM)}, None),
        ({}, str(ORGANISM)),
        ({}, f"{ORGANISM}:an-adapter"),
    ):
        reader = ProbeReader.of(made, pool="sentence_mean_max", **options)  # type: ignore[arg-type]
        reading = await reader.read(call, model_name=name)
        assert reading is not None
        assert reading.value == pytest.approx(expected)
        # A monitor sees the mean of a sentence while it is being written.
        first = next(i for i in range(len(parts[0])) if np.mean(parts[0][: i + 1]) > expected)
        assert reading.first_crossing(expected, pool="sentence_mean_max") == first


@pytest.mark.anyio
async def test_without_a_tokenizer_a_pool_by_sentence_says_what_to_do() -> None:
    reader = ProbeReader.of(probe(), pool="sentence_mean_max")
    with pytest.raises(ArtifactError, match="no tokenizer of no-such-model is on this machine"):
        await reader.read(spoken()[0], model_name="no-such-model")
    named = ProbeReader.of(probe(), pool="sentence_mean_max", tokenizer="no/such")
    with pytest.raises(ArtifactError, match="tokenizer='no/such': cannot be loaded"):
        named.read_captured(spoken()[0].metadata["activations"])  # type: ignore[index]
