"""Sets that different engines computed are named wherever they stand side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inspect_lens._cli._output import Made
from inspect_lens.errors import SpecError
from inspect_lens.probe import CaptureFacts, Probe
from inspect_lens.probe.card._files import render_card
from inspect_lens.train import (
    ActivationSet,
    LDAProbe,
    calibrate,
    calibrate_threshold,
    evaluate_probe,
    extract_vector,
    refusal_candidates,
    select_layer,
    style_shift,
    train_probe,
    transfer_probe,
)

MADE = CaptureFacts(engine="vllm 0.32.0", dtype="bfloat16", kv_cache_dtype="bfloat16")
OTHERS = {
    "dtype": ("float16", "dtype float16 instead of bfloat16"),
    "quantization": ("fp8", "quantization fp8 instead of none"),
    "kv_cache_dtype": ("fp8", "kv_cache_dtype fp8 instead of bfloat16"),
    "engine": ("vllm 0.33.0", "engine vllm 0.33.0 instead of vllm 0.32.0"),
}


def planted(name: str, n: int = 120, *, seed: int, positive: float = 0.5, **facts: Any) -> Any:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(n) < positive * n
    acts = tuple((rng.normal(size=(2, 3, 4)) + 2.0 * label).astype(np.float32) for label in labels)
    return ActivationSet(
        name=name, model="org/tiny", layers=(0, 1), labels=labels, acts=acts, capture=MADE,
        groups=tuple(f"{name}/{i}" for i in range(n)),
        ids=tuple(f"{name}-{i}" for i in range(n)), **facts,
    )  # fmt: skip


TRAIN, SELECTION, TEST = (planted(n, seed=i) for i, n in enumerate(("train", "chosen", "test")))
CONTROL = planted("control", 400, seed=9, positive=0.0)


def elsewhere(data: ActivationSet, field: str = "dtype") -> ActivationSet:
    return replace(data, capture=MADE.model_copy(update={field: OTHERS[field][0]}))


def trained(**changed: Any) -> tuple[Probe, list[str]]:
    sets = {"selection": SELECTION, "control": CONTROL, "held_out": [TEST], "train": TRAIN}
    sets |= changed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = train_probe(LDAProbe(), sets.pop("train"), name="t/p", **sets)
    assert isinstance(made, Probe)
    return made, [str(w.message) for w in caught if "computed with" in str(w.message)]


def test_sets_of_one_engine_and_sets_that_do_not_tell_are_silent() -> None:
    assert trained()[1] == []
    made, said = trained(control=replace(CONTROL, capture=None))
    assert said == []
    assert "computed with" not in " ".join(made.card.warnings)


@pytest.mark.parametrize("field", OTHERS)
@pytest.mark.parametrize("which", ["control", "selection", "held_out"])
def test_training_names_the_set_and_the_card_keeps_it(which: str, field: str) -> None:
    data = {"control": CONTROL, "selection": SELECTION, "held_out": TEST}[which]
    there = elsewhere(data, field)
    made, said = trained(**{which: [there] if which == "held_out" else there})
    (told,) = dict.fromkeys(text for text in said if text.startswith(repr(data.name)))
    assert OTHERS[field][1] in told
    assert "'train'" in told
    card = made.card
    assert told in card.warnings
    assert len(said) == len(set(said)), "each once"
    assert told in render_card(card, sha256="0")
    assert told in "\n".join(Made(probe=made, folder="p", evaluations=card.evaluations).lines())


def test_a_held_out_set_of_the_controls_engine_differs_from_training_alone() -> None:
    made, said = trained(control=elsewhere(CONTROL), held_out=[elsewhere(TEST)])
    (of_test,) = made.card.evaluations[0].computed_otherwise
    assert "unlike 'train'," in of_test
    assert said[-1] == of_test


def test_a_threshold_and_probabilities_of_another_engine_are_said(tmp_path: Any) -> None:
    made, _ = trained()
    new = calibrate_threshold(made, elsewhere(CONTROL, "quantization"), 0.05)
    scores = TEST.scores(made)
    facts = elsewhere(TEST, "dtype").capture
    assert facts is not None
    fitted = calibrate(scores, TEST.labels, name="labelled", numerics=facts.numerics)
    anew = made.with_card(thresholds=(new,), calibration=fitted, evaluations=())
    assert "set with quantization fp8 instead of none" in "\n".join(
        Made(probe=anew, folder="p", evaluations=()).lines()
    )
    said = " ".join(anew.card.warnings)
    assert "'labelled' was computed with dtype float16 instead of bfloat16" in said
    loaded = Probe.load(anew.save(tmp_path / "p"))
    assert loaded.card.calibration == fitted


def _evaluate(**facts: Any) -> Any:
    return evaluate_probe(trained()[0], elsewhere(TEST), **facts)


@pytest.mark.parametrize(
    "use",
    [
        _evaluate,
        lambda: select_layer(LDAProbe(), TRAIN, elsewhere(SELECTION), card=trained()[0].card),
        lambda: extract_vector(TRAIN, name="t/v", selection=elsewhere(SELECTION)),
        lambda: refusal_candidates(elsewhere(TRAIN), TEST, n_positions=2),
        lambda: style_shift(trained()[0], TEST, elsewhere(TEST)),
        lambda: transfer_probe(
            trained()[0], TRAIN, TRAIN, layer=0, control=elsewhere(CONTROL), fpr=0.05
        ),
    ],
)
def test_whoever_takes_two_sets_says_so(use: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="computed with .* instead of .*, unlike '"):
        use()


def test_a_vectors_card_keeps_it() -> None:
    with pytest.warns(UserWarning, match="computed with"):
        made = extract_vector(TRAIN, name="t/v", selection=elsewhere(SELECTION))
    assert any("'chosen' was computed with dtype float16" in note for note in made.card.notes)


def test_two_sides_of_a_refusal_are_of_one_model() -> None:
    with pytest.raises(SpecError, match="activations of model 'org/other'"):
        refusal_candidates(replace(TRAIN, model="org/other"), TEST, n_positions=2)
