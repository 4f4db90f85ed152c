"""A probe that asks a larger model only where it is unsure: what that costs, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gallery._chart import Line, Lines
from gallery._replication import Replication, Setting, Shown, Table
from gallery.truth import FILES, part_of
from inspect_lens.client import LensClient
from inspect_lens.data import load_dataset
from inspect_lens.probe import auroc, fingerprint_model
from inspect_lens.train import LogisticProbe, cascade_frontier, fit_on
from tests.kit.real_models import make_real_model

JUDGE: Final = "qwen2.5-coder-0.5b"
STATEMENTS: Final = 400
ASKED: Final = "Is this statement true? {statement} Answer with one word, Yes or No."
SHARES: Final = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


def measure(setting: Setting) -> dict[str, Any]:
    """Probe and judge on statements of other cities than those that trained the probe."""
    data = load_dataset(
        "geometry_of_truth",
        path=str(setting.files[FILES["cities"].name]),
        limit=setting.n or STATEMENTS,
    )
    with setting.server() as served:
        acts = served.store("cities", data, layers="all", positions="last_prompt")
    parts = {part: acts.subset([i for i, g in enumerate(acts.groups) if part_of(g) == part])
             for part in ("train", "select", "test")}  # fmt: skip
    fitted = {layer: fit_on(LogisticProbe(), parts["train"], layer) for layer in acts.layers}
    chosen = {layer: _scores(probe, parts["select"], layer) for layer, probe in fitted.items()}
    truth = {part: own.labels.astype(bool) for part, own in parts.items()}
    layer = max(chosen, key=lambda one: auroc(truth["select"], chosen[one]))
    texts = {sample.id: sample.text for sample in data}
    folder = make_real_model(JUDGE, setting.folder.parent / JUDGE)
    judge = Setting(JUDGE, folder, setting.work)
    n_select = len(parts["select"])
    judged = _judged(judge, [texts[name] for p in ("select", "test") for name in parts[p].ids])
    asked = {"select": judged[:n_select], "test": judged[n_select:]}
    probe = _scores(fitted[layer], parts["test"], layer)
    points = cascade_frontier(
        truth["test"], probe, asked["test"],
        probe_threshold=_best_threshold(truth["select"], chosen[layer]),
        judge_threshold=_best_threshold(truth["select"], asked["select"]),
        groups=list(parts["test"].groups), shares=SHARES,
    )  # fmt: skip
    return {
        "judge": fingerprint_model(str(judge.folder)), "n": len(probe),
        "n_train": len(parts["train"]), "layer": layer, "layers": len(acts.layers),
        "auroc": {"probe": float(auroc(truth["test"], probe)),
                  "judge": float(auroc(truth["test"], asked["test"]))},
        "points": [
            {"share": p.share, "recall": p.recall, "fpr": p.fpr, "accuracy": p.balanced_accuracy,
             "recall_interval": [p.recall_interval.low, p.recall_interval.high],
             "fpr_interval": [p.fpr_interval.low, p.fpr_interval.high]}
            for p in points
        ],
    }  # fmt: skip


def _scores(probe: Any, data: Any, layer: int) -> NDArray[np.float64]:
    found: NDArray[np.float64] = probe.decision_function(data.rows(layer)[0])
    return found


def _best_threshold(labels: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """The cut between two neighbouring scores that has the best balanced accuracy."""
    order = np.sort(scores)
    cuts = (order[1:] + order[:-1]) / 2
    right = [(scores[labels] > cut).mean() + (scores[~labels] <= cut).mean() for cut in cuts]
    return float(cuts[int(np.argmax(right))])


def _judged(judge: Setting, statements: list[str]) -> NDArray[np.float64]:
    """Log odds of Yes against No as the first token of the answer."""
    yes, no = (judge.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
    asked = {"layers": [judge.n_layers - 1], "top_k": 1, "tokens": [yes, no],
             "positions": "last_prompt"}  # fmt: skip
    found = []
    with judge.server(sites="resid_post") as served, LensClient(served.url) as client:
        for statement in statements:
            messages = [{"role": "user", "content": ASKED.format(statement=statement)}]
            prompt = judge.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            output = client.generate(prompt, max_tokens=1, lens=asked)
            assert output.receipt is not None
            assert output.receipt.lens is not None
            table = output.receipt.lens.result(output.activations)
            found.append(float(table.target_logprobs[0, 0, 0] - table.target_logprobs[0, 0, 1]))
    return np.array(found)


def show(numbers: dict[str, Any]) -> Shown:
    """Balanced accuracy by the share of statements that the judge reads."""
    points = numbers["points"]
    alone, judged = points[0], points[-1]
    between = max(points[1:-1], key=lambda p: p["accuracy"])
    said = f"the probe alone has a balanced accuracy of {alone['accuracy']:.3f}, the judge "
    said += f"({JUDGE}) of {judged['accuracy']:.3f}. "
    gain = between["accuracy"] - max(alone["accuracy"], judged["accuracy"])
    if gain > 0.02:
        said += f"Asking it about the {between['share']:.0%} that the probe is least sure of makes "
        said += f"{between['accuracy']:.3f}, better than both."
    elif judged["accuracy"] <= alone["accuracy"]:
        said += "The judge is no better than the probe, so asking it buys nothing."
    elif between["accuracy"] >= judged["accuracy"] - 0.02:
        said += f"Asking it about {between['share']:.0%} of the statements is as good as all."
    else:
        said += "No share between is as good as the judge alone, so what it costs is what it gives."
    lines = [
        Line("balanced accuracy", [(100 * p["share"], p["accuracy"]) for p in points]),
        _line("recall of true statements", points, "recall"),
        _line("false positive rate", points, "fpr"),
    ]
    rows = [
        [f"{p['share']:.0%}", f"{p['accuracy']:.3f}", _cell(p, "recall"), _cell(p, "fpr")]
        for p in points
    ]
    return Shown(
        said,
        [
            Table(
                f"{numbers['n']} statements about cities; the probe is of layer {numbers['layer']} "
                f"of {numbers['layers']}, trained on {numbers['n_train']} others. AUROC of the "
                f"probe {numbers['auroc']['probe']:.3f}, of the judge "
                f"{numbers['auroc']['judge']:.3f}. Both thresholds were set on a quarter of the "
                "cities that neither trains nor tests. Fingerprint of the judge's weights: "
                f"`{numbers['judge']}`.",
                ["read by the judge", "balanced accuracy", "recall", "false positive rate"], rows,
            )
        ],
        Lines(
            "Accuracy by the share that the judge reads", "percent read by the judge", "rate",
            lines, ticks=[100 * share for share in SHARES],
        ),
    )  # fmt: skip


def _line(series: str, points: Sequence[dict[str, Any]], key: str) -> Line:
    bands = [(low, high) for low, high in (p[f"{key}_interval"] for p in points)]
    return Line(series, [(100 * p["share"], p[key]) for p in points], bands)


def _cell(point: dict[str, Any], key: str) -> str:
    low, high = point[f"{key}_interval"]
    return f"{point[key]:.3f} [{low:.2f}, {high:.2f}]"


REPLICATION = Replication(
    title="A cascade of probe and judge",
    paper="Detecting High-Stakes Interactions with Activation Probes",
    arxiv="2506.10805",
    published="A probe that is a million times cheaper than a language model does nearly as well, "
    "and a cascade, in which the model reads only what the probe is unsure of, does better than "
    "each alone at a fraction of the cost.",
    method="The probe reads the smallest model and says whether a statement about a city is "
    "true. The judge is a model four times its size, asked whether the statement is true; its "
    "score is the log odds of Yes against No. `cascade_frontier` sends it the statements nearest "
    "to the probe's threshold.",
    limits="The task differs from the paper's, whose data are about high stakes, and the judge "
    "is far smaller than models that usually judge.",
    model="smollm2-135m",
    files=[FILES["cities"]],
    measure=measure,
    show=show,
)
