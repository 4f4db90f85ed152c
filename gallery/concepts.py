"""AxBench's concept detection: difference in means, a probe, and baselines that read no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gallery._chart import Bar, Bars
from gallery._replication import DataFile, Replication, Setting, Shown, Table
from inspect_lens.probe import auroc
from inspect_lens.train import (
    ActivationSet,
    BinaryEstimator,
    LogisticProbe,
    MeanDifferenceProbe,
    bag_of_words_scores,
    length_scores,
)

SOURCE: Final = "stanfordnlp/axbench, axbench/concept10/prod_2b_l10_v1"
LICENCE: Final = "Apache-2.0; concepts of Neuronpedia, CC BY 4.0"
TRAIN, TEST = (
    DataFile(f"concept10_2b_l10_{part}_data.parquet", SOURCE, LICENCE)
    for part in ("train", "latent_eval")
)
EACH: Final = 16
"""Positive texts of each concept that train, and of each kind that test."""
NEGATIVE: Final = 64
WORDS: Final = 48
"""Of an answer at most."""
DEPTHS: Final = {"10 of 26": 10 / 26, "20 of 26": 20 / 26}
"""Where the paper reads Gemma-2-2B."""
METHODS: Final[dict[str, Callable[[], BinaryEstimator]]] = {
    "difference in means": lambda: MeanDifferenceProbe(scaling="none"),
    "logistic probe": LogisticProbe,
}
WITHOUT: Final = ("bag of words", "length")


def measure(setting: Setting) -> dict[str, Any]:
    """AUROC of each method for each concept."""
    train, test = (pd.read_parquet(setting.files[file.name]) for file in (TRAIN, TEST))
    kinds = [
        train[train.category == "positive"].groupby("concept_id"),
        test[test.category != "hard negative"].groupby(["concept_id", "category"]),
    ]
    each = setting.count(EACH, min(int(kind.size().min()) for kind in kinds))
    positive = kinds[0].head(each)
    negative = train[train.category == "negative"].iloc[:NEGATIVE]
    train = pd.concat([positive, negative])
    test = test.groupby(["concept_id", "category"]).head(each)
    with setting.server() as served:
        sets = {
            name: served.prompts(
                name, [_row(i, row) for i, row in enumerate(table.to_dict("records"))],
                layers=sorted({_layer(setting, depth) for depth in DEPTHS.values()}),
                positions="completion",
            )
            for name, table in (("train", train), ("test", test))
        }  # fmt: skip
    names = train.drop_duplicates("concept_id").set_index("concept_id").output_concept.to_dict()
    return {
        "n_train": each, "n_negative": NEGATIVE, "n_test": each,
        "layers": {depth: _layer(setting, share) for depth, share in DEPTHS.items()},
        "concepts": [
            {"concept": names[k]} | _judged(setting, k, train, test, sets)
            for k in sorted(k for k in names if k >= 0)
        ],
    }  # fmt: skip


def _layer(setting: Setting, depth: float) -> int:
    return round(setting.n_layers * depth)


def _text(row: dict[str, Any]) -> str:
    return " ".join(str(row["output"]).split()[:WORDS])


def _row(i: int, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": str(i), "prompt": str(row["input"]), "completion": _text(row), "group": str(i),
        "label": int(row["category"] == "positive"),
    }  # fmt: skip


def _judged(
    setting: Setting, concept: int, train: Any, test: Any, sets: dict[str, ActivationSet]
) -> dict[str, float]:
    """AUROC of positive texts of a concept against negative and hard negative ones."""
    picked = np.flatnonzero(train.concept_id.isin([concept, -1]))
    judged = np.flatnonzero(test.concept_id == concept)
    texts = {name: [_text(row) for row in table.iloc[at].to_dict("records")]
             for name, table, at in (("train", train, picked), ("test", test, judged))}  # fmt: skip
    labels = (train.iloc[picked].category == "positive").to_numpy()
    truth = (test.iloc[judged].category == "positive").to_numpy()
    baselines = _without_model(texts["train"], labels, texts["test"])
    found = {name: float(auroc(truth, scores)) for name, scores in baselines.items()}
    for layer in {_layer(setting, share): None for share in DEPTHS.values()}:
        own = _of(sets["train"], picked)
        x, of_rows, groups = own.rows(layer)
        for method, make in METHODS.items():
            fitted = make().fit(x, of_rows, groups)
            scores = [
                float(fitted.decision_function(rows).max())
                for rows in _of(sets["test"], judged).sequences(layer)
            ]
            found[f"{method}, layer {layer}"] = float(auroc(truth, scores))
    return found


def _without_model(
    learn: Sequence[str], labels: NDArray[np.bool_], judge: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Scores of the baselines that a probe's card has, too; both learn from the training texts."""
    lengths = [[len(text) for text in texts] for texts in (learn, judge)]
    return {
        "bag of words": bag_of_words_scores(learn, labels, judge),
        "length": length_scores(lengths[0], labels, lengths[1]),
    }


def _of(data: ActivationSet, picked: NDArray[np.intp]) -> ActivationSet:
    at = {name: i for i, name in enumerate(data.ids)}
    return data.subset([at[str(i)] for i in picked])


def _mean(concepts: Sequence[dict[str, Any]], method: str) -> float:
    return float(np.mean([concept[method] for concept in concepts]))


def _best(concepts: Sequence[dict[str, Any]], methods: Sequence[str]) -> str:
    return max(methods, key=lambda method: _mean(concepts, method))


def show(numbers: dict[str, Any]) -> Shown:
    """Mean AUROC by method, and what the baselines that read no model have."""
    concepts = numbers["concepts"]
    methods = [key for key in concepts[0] if key != "concept"]
    means = {method: _mean(concepts, method) for method in methods}
    own = [method for method in methods if method not in WITHOUT]
    picks = [_best([c for c in concepts if c is not one], own) for one in concepts]
    best = max(own, key=picks.count)
    area = float(np.mean([one[pick] for one, pick in zip(concepts, picks, strict=True)]))
    said = f"{best.replace(',', ' at')} finds ten concepts with a mean AUROC of {area:.3f}; "
    said += f"a bag of words, which reads no model, has {means['bag of words']:.3f}, and length "
    said += f"{means['length']:.3f}. "
    if area >= 0.9:
        said += "So detection works in a model this small"
    elif area > 0.6:
        said += "So concepts are found, less well than in the paper's models"
    else:
        said += "So concepts are hardly found"
    ahead = area > means["bag of words"]
    said += ", and the model adds to the words." if ahead else ", but the words alone do as well."
    bars = [
        Bar(method, "mean over ten concepts", mean, *_spread(concepts, method))
        for method, mean in means.items()
    ]
    rows = [
        [concept["concept"], *(f"{concept[method]:.2f}" for method in methods)]
        for concept in concepts
    ]
    at = ", ".join(f"{n} for {depth}" for depth, n in numbers["layers"].items())
    return Shown(
        said,
        [
            Table(
                f"AUROC of {numbers['n_test']} texts with a concept against {numbers['n_test']} "
                f"without it and the hard negatives, trained on {numbers['n_train']} and "
                f"{numbers['n_negative']}. Layers of this model: {at}.",
                ["concept", *methods], rows,
            )
        ],
        Bars(
            "Mean AUROC of concept detection; lines are the lowest and the highest concept",
            "AUROC", bars, mark=0.5,
        ),
    )  # fmt: skip


def _spread(concepts: Sequence[dict[str, Any]], method: str) -> tuple[float, float]:
    values = [concept[method] for concept in concepts]
    return min(values), max(values)


REPLICATION = Replication(
    title="Detecting concepts",
    paper="AxBench: Steering LLMs? Even Simple Baselines Outperform Sparse Autoencoders",
    arxiv="2501.17148",
    published="In Gemma-2 of 2B and 9B, difference in means, linear probes and ReFT-r1 find "
    "concepts with a mean AUROC of about 0.94 to 0.95, and sparse autoencoders do worse.",
    method="The concepts are the ten that the benchmark publishes for layer 10 of Gemma-2-2B. "
    "Each method learns a direction from tokens of answers with and without a concept, and the "
    "score of a text is that of its highest token, as in the paper. The layers are at the same "
    "shares of the depth as the paper's two, and each concept is judged by the method and layer "
    "that the other nine choose. Answers are cut to 48 words, and fewer are used than in the "
    "paper. A bag of words and the length, which read no model, learn from the same texts.",
    limits="With sixteen texts of each kind, the AUROC of one concept is known to about 0.1. "
    "Most negatives are about something else altogether, which words show, too.",
    model="smollm2-135m",
    files=[TRAIN, TEST],
    measure=measure,
    show=show,
)
