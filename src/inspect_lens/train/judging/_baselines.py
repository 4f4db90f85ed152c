"""What something simpler does on the same samples; a probe without these beside it says little."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    Baseline,
    Probe,
    auroc,
    compare_auroc,
    cross_validated_words,
    delong_interval,
    hash_words,
    is_learned,
)
from inspect_lens.train.sets._dataset import ActivationSet

Floats = NDArray[np.float64]


def bag_of_words_scores(
    train_texts: Sequence[str], train_labels: ArrayLike, texts: Sequence[str]
) -> Floats:
    """Score texts by a logistic regression on words, without activations.

    Args:
        train_texts: (samples,) what the probe was trained on, as text.
        train_labels: (samples,) 0 and 1.
        texts: (samples,) what to score.

    Returns:
        (samples,) decision values.

    Raises:
        SpecError: lengths disagree, a class is missing, or there is no word.

    Source:
        arXiv:2509.21344: text baselines beside every probe. TF-IDF of one and two words,
        scikit-learn's defaults otherwise.

    Example:
        ```python
        from inspect_lens.train import bag_of_words_scores

        texts = ["it is a lie", "it is the truth"] * 10
        scores = bag_of_words_scores(texts, [1, 0] * 10, ["a lie again", "the truth again"])
        assert scores[0] > scores[1]
        ```
    """
    y = np.asarray(train_labels)
    if len(train_texts) != y.size or np.unique(y).size != 2:
        raise SpecError(
            f"train_texts: {len(train_texts)} texts, {y.size} labels of {np.unique(y).size} "
            "classes; allowed is one label per text and both classes"
        )
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b"),
        LogisticRegression(max_iter=1000),
    )
    try:
        model.fit(list(train_texts), y)
    except ValueError as error:
        raise SpecError(f"train_texts: {error}; allowed are texts with words") from None
    scores: Floats = np.asarray(model.decision_function(list(texts)), dtype=np.float64)
    return scores


def length_scores(train_lengths: ArrayLike, train_labels: ArrayLike, lengths: ArrayLike) -> Floats:
    """Score texts by length alone, longer or shorter as fits the training set.

    Args:
        train_lengths: (samples,) tokens or characters.
        train_labels: (samples,) 0 and 1.
        lengths: (samples,) of what to score.

    Returns:
        (samples,) the length or its negative.

    Example:
        ```python
        from inspect_lens.train import length_scores

        # Positives are longer in the training set, so longer counts as positive.
        assert length_scores([3, 9], [0, 1], [5, 6]).tolist() == [5.0, 6.0]
        ```
    """
    sign = 1.0 if auroc(train_labels, train_lengths) >= 0.5 else -1.0
    return sign * np.asarray(lengths, dtype=np.float64)


def random_direction_scores(
    probe: AnyProbe, train: ActivationSet, data: ActivationSet, *, seed: int = 0
) -> Floats:
    """Score samples by a random direction, at the layers and with the pool of a probe.

    Args:
        probe: whose layers, scaler and pool are used; a learned pool has no meaning for another
            direction, and the mean stands in.
        train: decides the sign.
        data: what to score.
        seed: of the direction.

    Returns:
        (samples,) scores.

    Example:
        ```python
        from inspect_lens.probe import auroc
        from inspect_lens.train import ActivationSet, LDAProbe, random_direction_scores, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        by_chance = random_direction_scores(probe, train, test, seed=0)
        assert auroc(test.labels, by_chance) < auroc(test.labels, test.scores(probe))
        ```
    """
    made: Floats = random_scores([seed], probe, train, data)[0]
    return made


def random_scores(
    seeds: Sequence[int], probe: AnyProbe, train: ActivationSet, data: ActivationSet
) -> Floats:
    """What `random_direction_scores` gives, of several directions, from one pass over each set."""
    others = [_random_direction(probe, seed) for seed in seeds]
    areas = [auroc(train.labels, scores) for scores in train.scores_of(others)]
    signs = np.array([1.0 if area >= 0.5 else -1.0 for area in areas])
    made: Floats = signs[:, None] * data.scores_of(others)
    return made


def _random_direction(probe: AnyProbe, seed: int) -> Probe:
    rng = np.random.default_rng(seed)
    shape, card = (len(probe.layers), probe.hidden), probe.card
    if isinstance(probe, Probe):
        mean, scale = probe.mean, probe.scale
    else:
        mean, scale = (probe.tensors[name][None] for name in ("mean", "scale"))
        pool = "mean" if is_learned(card.pool) else card.pool
        linear = {"kind": "linear", "head": None, "pool": pool}
        card = card.model_copy(update=linear)
    return Probe(
        weight=(rng.normal(size=shape) / math.sqrt(probe.hidden)).astype(np.float32),
        bias=np.zeros(shape[0], dtype=np.float32),
        mean=mean,
        scale=scale,
        card=card,
    )


def judge_scores(texts: Sequence[str], judge: Callable[[str], float]) -> Floats:
    """Score texts by a judge that reads them, such as a language model.

    Args:
        texts: (samples,) what the judge reads.
        judge: from text to a number; larger means more of the concept.

    Returns:
        (samples,) scores.

    Raises:
        SpecError: the judge returns something that is not a finite number.

    Example:
        ```python
        from inspect_lens.train import judge_scores

        # In the place of the length: what a language model says of the text.
        assert judge_scores(["a lie", "the truth"], lambda text: float(len(text))).tolist() == [
            5.0,
            9.0,
        ]
        ```
    """
    scores = np.array([judge(text) for text in texts], dtype=np.float64)
    if not np.isfinite(scores).all():
        raise SpecError(
            f"judge: {int((~np.isfinite(scores)).sum())} answers are no finite number; allowed is "
            "one number per text; parse the judge's answer, and drop samples it cannot judge"
        )
    return scores


def baseline(
    name: str,
    data: ActivationSet,
    scores: ArrayLike,
    probe_scores: ArrayLike,
    *,
    note: str = "",
) -> Baseline:
    """Measure a baseline on a set, and test whether the probe is better.

    Where groups of the set hold several samples, test and interval count groups.

    Args:
        name: of the baseline.
        data: the set.
        scores: (samples,) of the baseline.
        probe_scores: (samples,) of the probe.
        note: for the card.

    Returns:
        The record; without an area where a class is missing, without a test where groups are too
        few (`inspect_lens.probe.count_groups`), and `test` then says so.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, baseline, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        lengths = [len(ids) for ids in test.ids]
        record = baseline("length", test, lengths, test.scores(probe))
        print(record.auroc, record.p_value)
        ```
    """
    area = auroc(data.labels, scores)
    if math.isnan(area) or min(data.n_positive, data.n_negative) < 2:
        return Baseline(name=name, set=data.name, note=note or "one class only")
    interval = delong_interval(data.labels, scores, groups=data.groups)
    test = compare_auroc(data.labels, probe_scores, scores, groups=data.groups)
    one_sided = test.p_value / 2.0 if test.difference > 0 else 1.0 - test.p_value / 2.0
    return Baseline(
        name=name,
        set=data.name,
        auroc=area,
        auroc_interval=interval,
        p_value=None if math.isnan(one_sided) else one_sided,
        test=test.interval.method,
        note=note,
        difference=None if test.too_few else test.interval,
    )


def measure_baselines(
    probe: AnyProbe,
    train: ActivationSet,
    heldout: Sequence[ActivationSet],
    *,
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    judges: Mapping[str, Callable[[str], float]] | None = None,
    n_random: int = 20,
    seed: int = 0,
) -> tuple[Baseline, ...]:
    """Measure every baseline on every held-out set.

    Args:
        probe: the probe that stands beside them.
        train: what it was trained on.
        heldout: the sets it is judged on.
        texts: kinds of text, each with the texts (samples,) of every set by name; a bag of
            words is trained on each kind: `{"prompt": {"train": [...], "test": [...]}}`. By default
            the columns `prompt_text` and `completion` of the sets, where all have them.
        judges: by name; they read the first kind of text.
        n_random: random directions; the one with the median area is reported.
        seed: of the directions.

    Returns:
        Records in a fixed order; sets of one class have none.

    Raises:
        SpecError: texts are missing for a set, or do not fit, or two sets have one name.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, measure_baselines, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        texts = {
            "answer": {s.name: ["lie" if y else "truth" for y in s.labels] for s in (train, test)}
        }
        for record in measure_baselines(probe, train, [test], texts=texts, n_random=5):
            print(record.name, record.auroc, record.p_value)
        ```
    """
    made = []
    texts = _texts_of([train, *heldout]) if texts is None else texts
    names = [d.name for d in (train, *heldout)]
    if texts and len(set(names)) != len(names):
        raise SpecError(
            f"texts: go by the names of the sets, and these are {names}; allowed are unique names, "
            "else words of a test set would be trained on; rename one"
        )
    lengths = [int(m.sum()) for m in train.mask]
    for data in heldout:
        if not data.n_positive or not data.n_negative:
            continue  # nothing to tell apart
        ours = data.scores(probe)
        for kind, by_set in (texts or {}).items():
            for needed in (train, data):
                if len(by_set.get(needed.name, ())) != len(needed):
                    raise SpecError(
                        f"texts[{kind!r}][{needed.name!r}]: {len(by_set.get(needed.name, ()))} "
                        f"texts for {len(needed)} samples; allowed is one each"
                    )
            learn, judge_on = by_set[train.name], by_set[data.name]
            words = bag_of_words_scores(learn, train.labels, judge_on)
            made.append(baseline(f"bag of words ({kind})", data, words, ours))
            by_characters = length_scores(
                [len(t) for t in learn], train.labels, [len(t) for t in judge_on]
            )
            made.append(baseline(f"length ({kind})", data, by_characters, ours, note="characters"))
        by_length = length_scores(lengths, train.labels, [int(m.sum()) for m in data.mask])
        made.append(baseline("length", data, by_length, ours, note="tokens that are read"))
        if n_random:
            tries = random_scores(range(seed, seed + n_random), probe, train, data)
            order = sorted(tries, key=partial(auroc, data.labels))
            note = f"median of {n_random}, signs by the training set"
            made.append(baseline("random direction", data, order[n_random // 2], ours, note=note))
        for name, judge in (judges or {}).items():
            made.append(baseline(name, data, judge_scores(_read_by(texts, data), judge), ours))
    return tuple(made)


def baselines_within(
    probe: AnyProbe,
    data: ActivationSet,
    *,
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> tuple[Baseline, ...]:
    """Measure how well length and words of a set tell its own labels.

    Words are judged by cross-validation with whole groups; length counts in the direction that
    fits the set, which flatters it. So these are upper bounds of what such a baseline can do, and
    a set whose instructions give the label away has one of 1.0 for its prompts.

    Args:
        probe: that stands beside them.
        data: the set.
        texts: as of `measure_baselines`.

    Returns:
        Records in a fixed order; none where a class is missing.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, baselines_within, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        assert [record.name for record in baselines_within(probe, test)] == ["length"]
        ```
    """
    if not data.n_positive or not data.n_negative:
        return ()
    ours, lengths = data.scores(probe), [int(m.sum()) for m in data.mask]
    made = []
    for kind, by_set in (_texts_of([data]) if texts is None else texts).items():
        hashed = [hash_words(text) for text in by_set[data.name]]
        words = cross_validated_words(hashed, data.labels, groups=data.groups)
        note = "cross-validated on this set"
        made.append(baseline(f"bag of words ({kind})", data, words, ours, note=note))
    scores = length_scores(lengths, data.labels, lengths)
    note = "tokens that are read, in the direction that fits this set"
    made.append(baseline("length", data, scores, ours, note=note))
    return tuple(made)


def _texts_of(sets: Sequence[ActivationSet]) -> dict[str, dict[str, Sequence[str]]]:
    """Texts that stores bring as columns, where every set has some."""
    found: dict[str, dict[str, Sequence[str]]] = {}
    for kind, column in (("prompt", "prompt_text"), ("answer", "completion")):
        if all(any(d.columns.get(column, ())) for d in sets):
            found[kind] = {d.name: d.columns[column] for d in sets}
    return found


def _read_by(
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None, data: ActivationSet
) -> Sequence[str]:
    """What a judge reads: the first kind of text."""
    if not texts:
        raise SpecError("judges: there are no texts to read; allowed is texts= with one kind")
    return next(iter(texts.values()))[data.name]
