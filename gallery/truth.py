"""Geometry of Truth: probes of true statements across topics, and what negation does to them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gallery._chart import Heat
from gallery._replication import DataFile, Replication, Setting, Shown, Table
from inspect_lens.data import ProbeDataset, load_dataset
from inspect_lens.probe import Interval, auroc, delong_interval
from inspect_lens.train import (
    ActivationSet,
    BinaryEstimator,
    LogisticProbe,
    MassMeanProbe,
    fit_on,
)

TOPICS: Final = ("cities", "neg_cities", "sp_en_trans", "neg_sp_en_trans")
LICENCE: Final = "none stated in 2024-08; a later commit has CC BY 4.0"
FILES: Final = {
    topic: DataFile(f"{topic}.csv", "saprmarks/geometry-of-truth, datasets", LICENCE)
    for topic in TOPICS
}
TRAINED_ON: Final = (
    ("cities",), ("neg_cities",), ("cities", "neg_cities"), ("sp_en_trans",),
    ("sp_en_trans", "neg_sp_en_trans"),
)  # fmt: skip
FAMILIES: Final = {"logistic": LogisticProbe(), "mass-mean": MassMeanProbe()}
BATCH: Final = 32
"""Statements that transformers reads at once."""
STATEMENTS: Final = 400
"""Of each topic at most."""
PARTS: Final = ("train", "train", "select", "test")
"""Quarters of what statements are about; negated statements are where the others are."""


def measure(setting: Setting) -> dict[str, Any]:
    """AUROC of probes trained on each topic, on statements of all topics about other things."""
    limit = setting.n or STATEMENTS
    sets = {
        topic: load_dataset("geometry_of_truth", path=str(setting.files[file.name]), limit=limit)
        for topic, file in FILES.items()
    }
    with setting.server() as served:
        acts = {
            topic: served.store(topic, data, layers="all", positions="last_prompt")
            for topic, data in sets.items()
        }
    parts = {(topic, part): _part(own, part) for topic, own in acts.items() for part in PARTS}
    curves = {
        topic: [_own_auroc(parts[topic, "train"], parts[topic, "select"], layer)
                for layer in own.layers]
        for topic, own in acts.items()
    }  # fmt: skip
    mean = np.mean(list(curves.values()), axis=0)
    layers = acts["cities"].layers
    layer = layers[int(np.argmax(mean))]
    return {
        "layer": layer, "layers": len(layers), "curves": curves,
        "n": {topic: len(parts[topic, "test"]) for topic in TOPICS},
        "n_train": {topic: len(parts[topic, "train"]) for topic in TOPICS},
        "auroc": {
            family: {
                "+".join(trained): {t: list(_judged(estimator, trained, t, parts, layer))
                                    for t in TOPICS}
                for trained in TRAINED_ON
            }
            for family, estimator in FAMILIES.items()
        },
        "length": {t: _length(sets[t], parts[t, "test"]) for t in TOPICS},
        "plain": _plain(setting, sets, acts, layer),
    }  # fmt: skip


def part_of(group: str) -> str:
    """The part of a group: the same one in every topic and replication."""
    return PARTS[hashlib.sha256(group.encode()).digest()[0] % len(PARTS)]


def _part(acts: ActivationSet, part: str) -> ActivationSet:
    picks = [i for i, group in enumerate(acts.groups) if part_of(group) == part]
    return acts.subset(picks, name=f"{acts.name}, {part}")


def _own_auroc(train: ActivationSet, select: ActivationSet, layer: int) -> float:
    fitted = fit_on(LogisticProbe(), train, layer)
    x, labels, _ = select.rows(layer)
    return float(auroc(labels, fitted.decision_function(x)))


def _judged(
    estimator: BinaryEstimator,
    trained: Sequence[str],
    topic: str,
    parts: dict[tuple[str, str], ActivationSet],
    layer: int,
) -> tuple[float, float, float]:
    """AUROC with its interval."""
    rows = [parts[name, "train"].rows(layer) for name in trained]
    x, labels, groups = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    fitted = estimator.fit(x, labels, groups)
    test, truth, about = parts[topic, "test"].rows(layer)
    scores = fitted.decision_function(test)
    bounds: Interval = delong_interval(truth, scores, groups=list(about))
    return float(auroc(truth, scores)), bounds.low, bounds.high


def _length(data: ProbeDataset, test: ActivationSet) -> float:
    """AUROC of the number of characters, on the side that is better."""
    texts = {sample.id: sample.text for sample in data}
    area = float(auroc(test.labels, [len(texts[name]) for name in test.ids]))
    return max(area, 1.0 - area)


def _plain(
    setting: Setting, sets: dict[str, ProbeDataset], acts: dict[str, ActivationSet], layer: int
) -> dict[str, dict[str, float]]:
    """The logistic matrix by transformers and scikit-learn, without this package."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import StandardScaler

    wanted = {topic: set(own.ids) for topic, own in acts.items()}
    kept = [(topic, one) for topic, data in sets.items() for one in data if one.id in wanted[topic]]
    found = _last_rows(setting, [sample.text for _, sample in kept], layer)
    rows: dict[tuple[str, str], tuple[list[NDArray[np.float32]], list[bool]]] = {}
    for (topic, sample), row in zip(kept, found, strict=True):
        x, labels = rows.setdefault((topic, part_of(sample.group)), ([], []))
        x.append(row)
        labels.append(bool(sample.label))
    made: dict[str, dict[str, float]] = {}
    for trained in TRAINED_ON:
        fed = np.concatenate([rows[name, "train"][0] for name in trained])
        truth = np.concatenate([rows[name, "train"][1] for name in trained])
        scaler = StandardScaler().fit(fed)
        fitted = LogisticRegression(C=0.1, fit_intercept=False, max_iter=1000)
        fitted.fit(scaler.transform(fed), truth)
        made["+".join(trained)] = {
            topic: float(
                roc_auc_score(
                    rows[topic, "test"][1],
                    fitted.decision_function(scaler.transform(rows[topic, "test"][0])),
                )
            )
            for topic in TOPICS
        }
    return made


def _last_rows(setting: Setting, texts: Sequence[str], layer: int) -> list[NDArray[np.float32]]:
    """The residual stream behind a layer at the last token of each text, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.float32).model
    found: list[NDArray[np.float32]] = []
    for start in range(0, len(texts), BATCH):
        ids = [
            torch.tensor(setting.tokenizer(t)["input_ids"]) for t in texts[start : start + BATCH]
        ]
        # No token sees those behind it, so what fills short texts up changes nothing.
        filled = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        with torch.no_grad():
            rows = model(filled, output_hidden_states=True).hidden_states[layer + 1]
        found += [row[len(own) - 1].numpy() for row, own in zip(rows, ids, strict=True)]
    return found


def show(numbers: dict[str, Any]) -> Shown:
    """The matrix, and whether cities are told right, turned by negation, and carried to Spanish."""
    found = numbers["auroc"]["logistic"]
    area, low, _ = found["cities"]["cities"]
    turned, turned_low, turned_high = found["cities"]["neg_cities"]
    said = f"a probe of `cities` has an AUROC of {area:.3f} on other cities, "
    said += f"and of {turned:.3f} on negated statements. "
    if low <= 0.5:
        said += "So truth of this kind is not linearly readable here, and nothing can carry over."
    elif turned_high < 0.5:
        said += "The inversion is there: negation turns the probe around."
    elif turned_low > 0.5:
        said += "It carries over to negations, so the paper's inversion is not there."
    else:
        said += "It is lost on negations, which are neither inverted nor told right."
    said += f" Trained on cities and their negations it has {_on_words(found)}; a mass-mean probe "
    said += f"has {_on_words(numbers['auroc']['mass-mean'])}."
    names = list(found)
    values = [[found[name][topic][0] for topic in TOPICS] for name in names]
    matrices = [
        Table(
            f"AUROC with its 95 % interval, {family} probe of layer {numbers['layer']} of "
            f"{numbers['layers']}. Rows: trained on.",
            ["", *TOPICS],
            [[name, *(_cell(row[topic]) for topic in TOPICS)] for name, row in matrix.items()],
        )
        for family, matrix in numbers["auroc"].items()
    ]
    worst = max(
        abs(numbers["plain"][name][topic] - found[name][topic][0])
        for name in names
        for topic in TOPICS
    )
    rows = [
        [topic, str(numbers["n_train"][topic]), str(numbers["n"][topic]),
         f"{max(numbers['curves'][topic]):.3f}", f"{numbers['length'][topic]:.3f}"]
        for topic in TOPICS
    ]  # fmt: skip
    sizes = Table(
        "Statements, the best layer's AUROC on the quarter that chooses the layer, and the AUROC "
        "of the number of characters on the test quarter. The logistic matrix was also made with "
        "transformers and scikit-learn alone, from the same statements: the largest difference of "
        f"a cell is {worst:.4f}.",
        ["topic", "train", "test", "best layer", "length alone"], rows,
    )  # fmt: skip
    return Shown(
        said,
        [*matrices, sizes],
        Heat(
            "AUROC of logistic probes by what they were trained on and tested on", "tested on",
            "trained on", TOPICS, names, values, middle=0.5,
        ),
    )  # fmt: skip


def _on_words(matrix: dict[str, dict[str, list[float]]]) -> str:
    """What was trained on cities and their negations, on Spanish words and on theirs."""
    parts = []
    for topic, what in (("sp_en_trans", "Spanish words"), ("neg_sp_en_trans", "their negations")):
        cell = matrix["cities+neg_cities"][topic]
        low, high = cell[1:]
        chance = "not beyond" if low <= 0.5 <= high else "beyond" if low > 0.5 else "below"
        parts.append(f"{_cell(cell)} on {what} ({chance} chance)")
    return " and ".join(parts)


def _cell(found: Sequence[float]) -> str:
    return f"{found[0]:.3f} [{found[1]:.2f}, {found[2]:.2f}]"


REPLICATION = Replication(
    title="Truth across topics, and under negation",
    paper="The Geometry of Truth",
    arxiv="2310.06824",
    published="In Llama-2 of 7B to 70B, true and false statements are linearly separable at the "
    "end of the statement. In the smaller models, a probe of `cities` is turned around on "
    "`neg_cities`. A probe of statements and their negations carries over to other topics, "
    "better in larger models, and mass-mean probes carry over as well as logistic ones or "
    "better.",
    method="Each statement is read as raw text, at its last token. The things that statements "
    "are about are split in four: half of them train, a quarter chooses one layer for all (by "
    "the mean AUROC of the topics' own probes), and a quarter tests. A city and its negations "
    "are in the same quarter. Intervals are DeLong's, with all statements about one thing as one "
    "group.",
    limits="Statements are short and formulaic, and true ones are also likelier as text.",
    model="smollm2-135m",
    files=list(FILES.values()),
    measure=measure,
    show=show,
)
