"""Steering by a vector of contrast pairs: dose, coherence, and random vectors as control."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState

from gallery._chart import Line, Lines
from gallery._replication import DataFile, Replication, Setting, Shown, Table
from inspect_lens.scorer import dose_response, dose_table
from inspect_lens.solver import steering_sweep
from inspect_lens.train import extract_vector, split_by_group

EMOTIONS: Final = {
    label: DataFile(f"{name}.json", "andyzoujm/representation-engineering, data/emotions", "MIT")
    for label, name in ((1, "happiness"), (0, "sadness"))
}
PAIRS: Final = 100
SHARES: Final = (-0.4, -0.2, -0.1, 0.1, 0.2, 0.4)
"""Lengths of what is added, as shares of the stream's mean norm at the layer."""
ASKED: Final = (
    "Write two sentences about a walk through a town.", "Tell me a very short story about a dog.",
    "How was your week?", "Describe a letter that arrives in the morning.",
    "Write two sentences about a train journey.", "Tell me about the weather today.",
    "Describe a kitchen in the evening.", "Write the first lines of a diary entry.",
    "Tell me about a visit to a friend.", "Describe a small garden.",
    "Write two sentences about a football match.", "Tell me about a day at school.",
    "Describe an old house.", "Write a short message to a neighbour.",
    "Tell me about a phone call.", "Describe a market on Saturday.",
)  # fmt: skip
HAPPY: Final = (
    "happy happiness joy joyful joyous delight delighted delightful smile smiled smiling laugh "
    "laughed laughter love loved lovely wonderful beautiful excited excitement exciting cheerful "
    "bright warm warmth great amazing fun glad pleased pleasure celebrate celebrated blessed "
    "grateful proud hope hopeful enjoy enjoyed enjoying fantastic"
)
SAD: Final = (
    "sad sadness sorrow cry cried crying tears tear grief grieving loss lost lonely loneliness "
    "alone empty emptiness pain painful hurt broken dark darkness cold death died dead dying miss "
    "missed missing despair hopeless regret sorry gloomy tired sick worried fear afraid bleak"
)


@scorer(metrics=[mean()])
def happier() -> Scorer:
    """1 where an answer has more happy than sad words of the lists, 0 for fewer, else one half."""
    happy, sad = set(HAPPY.split()), set(SAD.split())

    async def score(state: TaskState, target: Target) -> Score:
        words = re.findall(r"[a-z]+", state.output.completion.lower())
        more = sum(word in happy for word in words) - sum(word in sad for word in words)
        return Score(value=0.5 if more == 0 else float(more > 0), answer=state.output.completion)

    return score


def measure(setting: Setting) -> dict[str, Any]:
    """Find the vector on scenarios, and steer answers to other prompts with it."""
    prompts = ASKED[: setting.count(len(ASKED), len(ASKED))]
    rows = [
        {"prompt": text, "label": label, "group": f"pair {i}"}
        for label, file in EMOTIONS.items()
        for i, text in enumerate(
            json.loads(setting.files[file.name].read_text(encoding="utf-8"))[:PAIRS]
        )
    ]  # fmt: skip
    with setting.server() as served:
        acts = served.prompts("emotions", rows, layers="all", positions="last_prompt", max_tokens=1)
        train, selection = split_by_group(acts, seed=0)
        middle = range(len(acts.layers) // 4, 3 * len(acts.layers) // 4)
        vector = extract_vector(
            train, name=f"{setting.model}/happiness", rows="last", selection=selection,
            layers=middle, description="happier",
        )  # fmt: skip
        layer = vector.default_layer()
        scales = {share: round(vector.relative_scale(layer, share), 4) for share in SHARES}
        task = Task(
            dataset=MemoryDataset([Sample(input=text) for text in prompts]),
            solver=steering_sweep(
                vector, list(scales.values()), controls=["random"], control_draws=2
            ),
            scorer=dose_response(happier()),
            config=GenerateConfig(temperature=0.0, max_tokens=40),
        )  # fmt: skip
        log = served.eval(task)
    share_of = {scale: share for share, scale in scales.items()}
    points = [
        {
            "kind": row.kind, "share": share_of[row.scale], "mean": row.mean,
            "effect": row.effect, "coherence": row.coherence,
            "low": row.interval.low if row.interval else None,
            "high": row.interval.high if row.interval else None,
        }
        for row in dose_table(log)
        if row.scale
    ]  # fmt: skip
    return {
        "n": len(prompts), "n_pairs": len(train) // 2, "layer": layer, "layers": len(acts.layers),
        "auroc": vector.card.separation[vector.layers.index(layer)], "points": points,
    }  # fmt: skip


def show(numbers: dict[str, Any]) -> Shown:
    """Happier answers by dose, beside random vectors."""
    points = numbers["points"]
    own = {p["share"]: p for p in points if p["kind"] == "vector"}
    chance = {p["share"]: p for p in points if p["kind"] == "random"}
    plain = next(iter(own.values()))["mean"] - next(iter(own.values()))["effect"]
    works = [s for s, p in own.items() if p["coherence"] >= 0.9 and _beyond(p, s)]
    up, down = max(own), min(own)
    said = f"the unsteered mean is {plain:.2f} (1: more happy words, 0: more sad ones). "
    said += f"Adding {up:.0%} of the stream's norm makes it {own[up]['mean']:.2f}, and taking it "
    said += f"away {own[down]['mean']:.2f}; random vectors {chance[up]['mean']:.2f} and "
    said += f"{chance[down]['mean']:.2f}. "
    if any(s > 0 for s in works) and any(s < 0 for s in works):
        said += "The vector steers both ways while answers stay coherent."
    elif works:
        doses = " and ".join(f"{s:+.0%}" for s in sorted(works))
        said += f"Only at {doses} does the interval exclude no change, with coherent answers."
    else:
        said += "No dose at which answers stay coherent has an effect beyond chance."
    shares = sorted(own)
    lines = [
        Line(name, [(100 * s, found[s]["mean"]) for s in shares],
             [(found[s]["mean"] - found[s]["effect"] + found[s]["low"],
               found[s]["mean"] - found[s]["effect"] + found[s]["high"]) for s in shares])
        for name, found in (("the vector", own), ("random, same length", chance))
    ]  # fmt: skip
    lines.append(Line("coherent answers, the vector", [(100 * s, own[s]["coherence"])
                                                       for s in shares]))  # fmt: skip
    rows = [
        [f"{s:+.0%}", f"{own[s]['mean']:.2f}", _effect(own[s]), f"{own[s]['coherence']:.2f}",
         _effect(chance[s]), f"{chance[s]['coherence']:.2f}"]
        for s in shares
    ]  # fmt: skip
    return Shown(
        said,
        [
            Table(
                f"{numbers['n']} prompts, layer {numbers['layer']} of {numbers['layers']}. The "
                f"vector is of {numbers['n_pairs']} pairs of scenarios, and separates the pairs "
                f"that chose the layer with an AUROC of {numbers['auroc']:.3f}, which is therefore "
                "too high an estimate. The dose is a share of the stream's mean "
                "norm. The effect is the difference from the unsteered answers, with its 95 % "
                "interval over prompts.",
                ["dose", "mean", "effect", "coherent", "random: effect", "random: coherent"], rows,
            )
        ],
        Lines(
            "Answers by dose", "dose, percent of the stream's norm",
            "1: more happy than sad words", lines, ticks=[100 * s for s in shares],
        ),
    )  # fmt: skip


def _beyond(point: dict[str, Any], share: float) -> bool:
    """Whether the effect goes where the dose points, with its whole interval."""
    return bool(point["low"] > 0 if share > 0 else point["high"] < 0)


def _effect(point: dict[str, Any]) -> str:
    return f"{point['effect']:+.2f} [{point['low']:+.2f}, {point['high']:+.2f}]"


REPLICATION = Replication(
    title="Steering with contrast pairs",
    paper="Representation Engineering",
    arxiv="2310.01405",
    published="Directions read from pairs of contrasting scenarios control what a chat model "
    "writes: with the direction of happiness added, Llama-2-Chat answers as if it were happy. "
    "Later work on steering asks for the dose at which answers fall apart, and for random "
    "vectors as a control.",
    method="The vector is the difference of mean activations at the last token of the prompt "
    "between 100 scenarios of happiness and 100 of sadness, from the paper's own set, paired by "
    "their place in the files. Its layer is one of the middle half, chosen on a part of the "
    "pairs. It is added at six doses, beside two random vectors of the same length, while the "
    "model answers prompts about other things. An answer counts 1 if it has more words of a "
    "happy list than of a sad one, 0 if fewer, and one half if as many.",
    limits="A list of words misses irony, and happiness in other words. Coherence here means "
    "that an answer is not empty and does not loop.",
    model="smollm2-135m",
    files=list(EMOTIONS.values()),
    measure=measure,
    show=show,
)
