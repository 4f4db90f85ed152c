"""What a probe does on a set that decided nothing about it, beside what is simpler than it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from inspect_lens._base.arguments import judged_arguments, one_or_several, refuse_idle
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    Baseline,
    ControlShift,
    Evaluation,
    Probe,
    RealisedRate,
    RecallAt,
    Threshold,
    auroc,
    average_precision,
    compare_auroc,
    count_groups,
    cross_validated_words,
    delong_interval,
    hash_words,
    is_learned,
    partial_auroc,
    rate_interval,
)
from inspect_lens.train.fitting._thresholds import fit_threshold
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import (
    behaviour_share,
    count_seen,
    labels_from,
    refuse_seen,
    warn_otherwise,
)

__all__ = [
    "bag_of_words_scores",
    "baseline",
    "evaluate_probe",
    "length_scores",
    "measure_baselines",
]

Floats = NDArray[np.float64]


def bag_of_words_scores(
    train_texts: str | Sequence[str], train_labels: ArrayLike, texts: str | Sequence[str]
) -> Floats:
    """What the words of texts say: logistic regression on one and two words, with TF-IDF.

    Args:
        train_texts: to learn from.
        train_labels: (training samples,) 0 and 1.
        texts: one or several, to judge.

    Raises:
        SpecError: labels do not fit the texts, a class is missing, or there is no word.

    Source:
        arXiv:2509.21344: text baselines beside every probe.

    Example:
        ```python
        from inspect_lens.train import bag_of_words_scores

        told = ["it is a lie", "it is the truth"] * 4
        lie, truth = bag_of_words_scores(told, [1, 0] * 4, ["what a lie", "the truth"])
        assert lie > 0 > truth
        ```
    """
    y, told = np.asarray(train_labels), one_or_several(train_texts)
    if len(told) != y.size or np.unique(y).size != 2:
        raise SpecError(
            f"train_texts: {len(told)} texts, {y.size} labels of {np.unique(y).size} "
            "classes; allowed is one label per text and both classes"
        )
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b"),
        LogisticRegression(max_iter=1000),
    )
    try:
        model.fit(told, y)
    except ValueError as error:
        raise SpecError(f"train_texts: {error}; allowed are texts with words") from None
    return np.asarray(model.decision_function(one_or_several(texts)), dtype=np.float64)


def length_scores(train_lengths: ArrayLike, train_labels: ArrayLike, lengths: ArrayLike) -> Floats:
    """Scores (samples,) of texts by length alone, in the direction that fits the training set.

    Args:
        train_lengths: (training samples,) in any unit.
        train_labels: (training samples,) 0 and 1.
        lengths: (samples,) to judge.

    Example:
        ```python
        from inspect_lens.train import length_scores

        assert length_scores([3, 4, 9], [1, 1, 0], [2, 8]).tolist() == [-2.0, -8.0]
        ```
    """
    sign = 1.0 if auroc(train_labels, train_lengths) >= 0.5 else -1.0
    return sign * np.asarray(lengths, dtype=np.float64)


def random_scores(
    seeds: Sequence[int], probe: AnyProbe, train: ActivationSet, data: ActivationSet
) -> Floats:
    """Scores (seeds, samples) by random directions like a probe; the training set has the sign."""
    others = [_random_direction(probe, seed) for seed in seeds]
    areas = [auroc(train.labels, scores) for scores in train.scores_of(others)]
    signs = np.array([1.0 if area >= 0.5 else -1.0 for area in areas])
    return np.asarray(signs[:, None] * data.scores_of(others))


def _random_direction(probe: AnyProbe, seed: int) -> Probe:
    rng = np.random.default_rng(seed)
    shape, card = (len(probe.layers), probe.hidden), probe.card
    if isinstance(probe, Probe):
        mean, scale = probe.mean, probe.scale
    else:
        mean, scale = (probe.tensors[name][None] for name in ("mean", "scale"))
        # A learned pool has no meaning for another direction.
        pool = "mean" if is_learned(card.pool) else card.pool
        card = card.model_copy(update={"kind": "linear", "head": None, "pool": pool})
    weight = (rng.normal(size=shape) / math.sqrt(probe.hidden)).astype(np.float32)
    bias = np.zeros(shape[0], dtype=np.float32)
    return Probe(weight=weight, bias=bias, mean=mean, scale=scale, card=card)


def judge_scores(texts: Sequence[str], judge: Callable[[str], float]) -> Floats:
    """What a judge says of each text, (samples,); larger means more of the concept."""
    scores = np.array([judge(text) for text in texts], dtype=np.float64)
    if not np.isfinite(scores).all():
        raise SpecError(
            f"judge: {int((~np.isfinite(scores)).sum())} answers are no finite number; allowed is "
            "one number per text; parse the judge's answer, and drop samples it cannot judge"
        )
    return scores


def baseline(
    name: str, data: ActivationSet, scores: ArrayLike, probe_scores: ArrayLike, *, note: str = ""
) -> Baseline:
    """Measure a baseline on a set, and test whether the probe is better.

    Args:
        name: of the baseline.
        data: the set.
        scores: (samples,) of the baseline.
        probe_scores: (samples,) of the probe.
        note: for the card.

    Returns:
        The record, whose test and interval count groups that hold several samples; without an area
        where a class is missing, without a test where groups are too few (`count_groups`).

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, baseline, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
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


@judged_arguments
def measure_baselines(
    probe: AnyProbe,
    train: ActivationSet,
    held_out: Sequence[ActivationSet],
    *,
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    judges: Mapping[str, Callable[[str], float]] | None = None,
    n_random: int = 20,
    seed: int = 0,
) -> tuple[Baseline, ...]:
    """Measure every baseline on every held-out set that has both classes.

    Args:
        probe: the probe that stands beside them.
        train: what it was trained on.
        held_out: the sets it is judged on.
        texts: kinds of text, each with the texts (samples,) of every set by name; a bag of
            words is trained on each kind: `{"prompt": {"train": [...], "test": [...]}}`. By default
            the columns `prompt_text` and `completion` of the sets, where all have them.
        judges: by name; they read the first kind of text.
        n_random: random directions; the one with the median area is reported.
        seed: of the directions.

    Raises:
        SpecError: texts are missing for a set, or do not fit, or two sets have one name.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, measure_baselines, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        texts = {
            "answer": {s.name: ["lie" if y else "truth" for y in s.labels] for s in (train, test)}
        }
        for record in measure_baselines(probe, train, [test], texts=texts, n_random=5):
            print(record.name, record.auroc, record.p_value)
        ```
    """
    made = []
    texts = _texts_of([train, *held_out]) if texts is None else texts
    names = [d.name for d in (train, *held_out)]
    if texts and len(set(names)) != len(names):
        raise SpecError(
            f"texts: go by the names of the sets, and these are {names}; allowed are unique names, "
            "else words of a test set would be trained on; rename one"
        )
    lengths = [int(m.sum()) for m in train.mask]
    for data in held_out:
        if not data.n_positive or not data.n_negative:
            continue  # nothing to tell apart
        ours = data.scores(probe)
        for kind in texts:
            learn, judge_on = (_texts(texts, kind, one) for one in (train, data))
            words = bag_of_words_scores(learn, train.labels, judge_on)
            made.append(baseline(f"bag of words ({kind})", data, words, ours))
            sizes, new = [len(t) for t in learn], [len(t) for t in judge_on]
            by_length = length_scores(sizes, train.labels, new)
            made.append(baseline(f"length ({kind})", data, by_length, ours, note="characters"))
        by_length = length_scores(lengths, train.labels, [int(m.sum()) for m in data.mask])
        made.append(baseline("length", data, by_length, ours, note="tokens that are read"))
        if n_random:
            tries = random_scores(range(seed, seed + n_random), probe, train, data)
            order = sorted(tries, key=partial(auroc, data.labels))
            note = f"median of {n_random}, signs by the training set"
            made.append(baseline("random direction", data, order[n_random // 2], ours, note=note))
        for name, judge in (judges or {}).items():
            if not texts:
                raise SpecError(
                    "judges: there are no texts to read; allowed is texts= with one kind"
                )
            read = next(iter(texts.values()))[data.name]
            made.append(baseline(name, data, judge_scores(read, judge), ours))
    return tuple(made)


def baselines_within(
    probe: AnyProbe,
    data: ActivationSet,
    *,
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> tuple[Baseline, ...]:
    """How well length and words of a set tell its own labels; nothing where a class is missing."""
    # Words are judged by cross-validation, and length counts in the direction that fits the set.
    if not data.n_positive or not data.n_negative:
        return ()
    ours, lengths = data.scores(probe), [int(m.sum()) for m in data.mask]
    made = []
    texts = _texts_of([data]) if texts is None else texts
    for kind in texts:
        hashed = [hash_words(text) for text in _texts(texts, kind, data)]
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


def _texts(
    texts: Mapping[str, Mapping[str, Sequence[str]]], kind: str, data: ActivationSet
) -> Sequence[str]:
    """Those of one set, one for each sample."""
    found = texts[kind].get(data.name, ())
    if len(found) != len(data):
        raise SpecError(
            f"texts[{kind!r}][{data.name!r}]: {len(found)} texts for {len(data)} samples; allowed "
            "is one each"
        )
    return found


_RATES: Final = (0.01, 0.05)
_PARTIAL: Final = 0.05


@judged_arguments
def evaluate_probe(
    probe: AnyProbe,
    data: ActivationSet,
    *,
    control: ActivationSet | None = None,
    train: ActivationSet | None = None,
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    disjoint_by: str = "group",
    allow_seen: bool = False,
    n_random: int = 20,
    seed: int = 0,
) -> Evaluation:
    """Measure a probe and simpler baselines on a held-out set.

    Samples that the probe's card lists as its own (`ProbeCard.seen`) are refused; where the card
    lists none, `Evaluation.n_seen` is None, as nobody can tell.

    Args:
        probe: with a threshold, if recall and false positive rate are wanted.
        data: the set.
        control: harmless samples: recall at 1% and 5% of them, the area of the set's positives
            against them, and whether the set's negatives are like them.
        train: what the probe was fitted on. With it, baselines learn from it and are compared with
            the probe in pairs (`measure_baselines`). Without it, the length and the words of the
            set's own texts are judged on its own labels, words by cross-validation; these are
            upper bounds.
        texts: as of `measure_baselines`; by default the columns `prompt_text` and `completion`.
        disjoint_by: key that keeps it apart from the training set; written down, not checked.
        allow_seen: measure also on samples that trained the probe, chose its layer or set its
            threshold; `n_seen` counts them.
        n_random: random directions among the baselines; 0 leaves them out.
        seed: of the directions.

    Returns:
        AUROC with DeLong's interval (Obuchowski's, where groups hold several samples), partial
        area, average precision, recall, false positive rate and balanced accuracy at the first
        stored threshold with Clopper and Pearson's intervals, or those of Korn and Graubard where
        groups hold several samples; None where a class is missing. Where
        groups are too few, `too_few` says so, and the interval of the AUROC is the careful one of
        `delong_interval`.

    Raises:
        SpecError: layers or width do not fit, or samples took part in making the probe.

    Warns:
        UserWarning: the set was computed with another engine, dtype or quantisation than those that
            made the probe, or than `control` or `train`.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, evaluate_probe, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        found = evaluate_probe(probe, test, control=control, train=train)
        assert found.auroc_interval.low < found.auroc < found.auroc_interval.high
        print(found.recall, [(r.fpr, r.recall) for r in found.recalls], found.best_baseline)
        ```
    """
    if train is None:
        refuse_idle(evaluate_probe, "without train=", n_random=n_random, seed=seed)
    if not allow_seen:
        refuse_seen(probe, data)
    scores = data.scores(probe)
    area = auroc(data.labels, scores)
    counts = count_groups(data.labels, data.groups)
    facts: dict[str, Any] = {"n_groups": counts.total}
    if not math.isnan(area):
        facts |= {
            "auroc": area,
            "too_few": counts.too_few,
            "auroc_interval": delong_interval(data.labels, scores, groups=data.groups),
            "partial_auroc": partial_auroc(data.labels, scores, max_fpr=_PARTIAL),
            "average_precision": average_precision(data.labels, scores),
        }
        if train is not None:
            facts["baselines"] = measure_baselines(
                probe, train, [data], texts=texts, n_random=n_random, seed=seed
            )
        else:
            facts["baselines"] = baselines_within(probe, data, texts=texts)
    facts["rates"] = tuple(_realised(probe, data, threshold) for threshold in probe.card.thresholds)
    for threshold, rate in zip(probe.card.thresholds, facts["rates"], strict=True):
        if threshold is probe.threshold:
            facts |= {"recall": rate.recall, "recall_interval": rate.recall_interval}
            facts |= {"fpr": rate.rate, "fpr_interval": rate.interval}
            if rate.recall is not None and rate.rate is not None:
                facts["balanced_accuracy"] = (rate.recall + 1.0 - rate.rate) / 2.0
    if control is not None:
        facts |= _against(probe, control.negatives(), data, scores)
    return Evaluation(
        name=data.name,
        sha256=data.sha256,
        n_positive=data.n_positive,
        n_negative=data.n_negative,
        disjoint_by=disjoint_by,
        n_seen=count_seen(probe, data),
        label_source=labels_from(data),
        behaviour=behaviour_share(data),
        computed_otherwise=warn_otherwise(
            data, *filter(None, (train, control)), made=probe.card.computed_with
        ),
        **facts,
    )


def _realised(probe: AnyProbe, data: ActivationSet, threshold: Threshold) -> RealisedRate:
    """What a threshold of the card does on the answers of a set."""
    statistic = threshold.statistic or probe.card.answer
    values = data.statistic(probe, statistic)
    lengths = [int(mask.sum()) for mask in data.mask]
    facts: dict[str, Any] = {}
    sides = {("recall", "recall_interval"): data.labels, ("rate", "interval"): ~data.labels}
    for (share, bounds), which in sides.items():
        picks = np.flatnonzero(which)
        if picks.size:
            hits = np.concatenate([values[i] for i in picks]) > threshold.value
            groups = [data.groups[i] for i in picks for _ in values[i]]
            facts |= {share: float(hits.mean()), bounds: rate_interval(hits, groups)}
    if sizes := [lengths[i] for i in np.flatnonzero(~data.labels)]:
        covers = [statistic.covers(n, threshold.n_tokens) for n in sizes]
        facts |= {"n_tokens": (min(sizes), max(sizes)), "outside": 1.0 - float(np.mean(covers))}
    return RealisedRate(
        statistic=str(statistic),
        threshold=threshold.value,
        nominal=threshold.fpr,
        holds_for=threshold.n_tokens,
        **facts,
    )


def _against(
    probe: AnyProbe, control: ActivationSet, data: ActivationSet, scores: Floats
) -> dict[str, Any]:
    """The set's positives against a control set, and whether its negatives are alike."""
    harmless = control.scores(probe)
    facts: dict[str, Any] = {}
    for side, ours in (("positive", data.labels), ("negative", ~data.labels)):
        if not ours.any():
            continue
        both = np.concatenate([scores[ours], harmless])
        first = np.arange(both.size) < int(ours.sum())
        # The same group in both sets, such as one scenario, stays one.
        groups = [*_of(data, ours), *control.groups]
        area, interval = auroc(first, both), delong_interval(first, both, groups=groups)
        if side == "positive":
            facts |= {"auroc_control": area, "auroc_control_interval": interval}
        else:
            facts["control_shift"] = ControlShift(
                control=control.name, auroc=area, interval=interval
            )
    if data.n_positive:
        facts["recalls"] = _recalls(control, harmless, data, scores)
    return facts


def _recalls(
    control: ActivationSet, harmless: Floats, data: ActivationSet, scores: Floats
) -> tuple[RecallAt, ...]:
    lengths = [int(mask.sum()) for mask in control.mask]
    span = (min(lengths), max(lengths))
    made = []
    for fpr in _RATES:
        if harmless.size < round(1.0 / fpr):
            continue  # no threshold of so few holds the rate
        value = fit_threshold(harmless, fpr, groups=control.groups, allow_few=True).value
        hits = scores[data.labels] > value
        made.append(
            RecallAt(
                fpr=fpr, control=control.name, threshold=value, recall=float(hits.mean()),
                interval=rate_interval(hits, _of(data, data.labels)), n_tokens=span,
            )
        )  # fmt: skip
    return tuple(made)


def _of(data: ActivationSet, which: NDArray[np.bool_]) -> list[str]:
    return [data.groups[i] for i in np.flatnonzero(which)]
