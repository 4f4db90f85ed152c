"""Every baseline of a probe on the sets that it is judged on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, Baseline, auroc, cross_validated_words, hash_words
from inspect_lens.train.sets._dataset import ActivationSet

from ._baselines import (
    bag_of_words_scores,
    baseline,
    judge_scores,
    length_scores,
    random_scores,
)

__all__ = ["baselines_within", "measure_baselines"]


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
