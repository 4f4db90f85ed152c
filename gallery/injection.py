"""Attention Tracker: prompt injections draw the attention of some heads off the instruction."""

from __future__ import annotations

from typing import Any, Final

from evals.prompt_injection import prompt_injection
from gallery._chart import Bar, Bars
from gallery._replication import Replication, Setting, Shown, Table
from inspect_lens.attention import AttentionHeads
from inspect_lens.errors import LensError
from inspect_lens.probe import auroc, clopper_pearson, delong_interval
from inspect_lens.reading import calibrate_tracker

TEST: Final = 60
SPREADS: Final = (4.0, 3.0, 2.0, 1.0)
"""Standard deviations by which the attention of a head has to fall; the paper takes 4."""
AGAINST: Final = {"plain": "plain prompts", "padded": "prompts of the same length"}


def measure(setting: Setting) -> dict[str, Any]:
    """Find heads on 30 prompts, and judge them on others."""
    bases = len(prompt_injection(heads=None, world="general").dataset) // 3
    n = setting.count(TEST, bases)
    with setting.server(sites="q,k,resid_post") as served:
        found = served.eval(
            prompt_injection(
                heads=None,
                world="general",
                part="calibration",
                conditions="plain,injected",
                max_tokens=1,
            )
        )
        heads, spread = _heads(found)
        listed = heads.save(setting.work / "heads.json")
        log = served.eval(
            prompt_injection(heads=str(listed), world="general", max_tokens=16), limit=3 * n
        )
    samples = [
        {
            "base": sample.metadata["base"], "condition": sample.metadata["condition"],
            "score": float(sample.scores["injected_heads"].value),
            "followed": int(sample.scores["injection_followed"].value),
        }
        for sample in log.samples
    ]  # fmt: skip
    injected = sum(s["condition"] == "injected" for s in samples)
    numbers: dict[str, Any] = {
        "n": injected, "n_std": spread, "heads": [list(head) for head in heads.heads],
        "followed": {c: sum(s["followed"] for s in samples if s["condition"] == c)
                     for c in ("plain", "padded", "injected")},
        "means": {c: sum(s["score"] for s in samples if s["condition"] == c) / injected
                  for c in ("plain", "padded", "injected")},
    }  # fmt: skip
    for control in AGAINST:
        rows = [s for s in samples if s["condition"] in ("injected", control)]
        labels = [s["condition"] == "injected" for s in rows]
        scores = [s["score"] for s in rows]
        bounds = delong_interval(labels, scores, groups=[s["base"] for s in rows])
        numbers[f"auroc_{control}"] = [auroc(labels, scores), bounds.low, bounds.high]
    return numbers


def _heads(log: Any) -> tuple[AttentionHeads, float]:
    """The heads at the largest of the spreads at which there are any."""
    for spread in SPREADS[:-1]:
        try:
            return calibrate_tracker(log, n_std=spread), spread
        except LensError:
            continue
    return calibrate_tracker(log, n_std=SPREADS[-1]), SPREADS[-1]


def show(numbers: dict[str, Any]) -> Shown:
    """AUROC against both controls, and how often the attack worked."""
    n = numbers["n"]
    plain, padded = numbers["auroc_plain"], numbers["auroc_padded"]
    said = (
        f"the attention of {_heads_named(numbers['heads'])} tells injected from plain prompts "
        f"with an AUROC of {plain[0]:.3f}, and from harmless prompts of the same length with "
        f"{padded[0]:.3f}. "
    )
    if padded[1] > 0.5 and padded[0] - 0.5 > (plain[0] - 0.5) / 2:
        said += "So it sees the injection, and not its length alone."
    elif padded[1] > 0.5:
        said += "So most of what it sees is length, and a part is the injection."
    elif plain[1] > 0.5:
        said += "So what it sees may be length alone: the control's interval has 0.5 in it."
    else:
        said += "Neither is beyond chance."
    said += f" The injection was followed in {numbers['followed']['injected']} of {n} answers."
    bars = [
        Bar(f"injected against {text}", "AUROC", *numbers[f"auroc_{name}"])
        for name, text in AGAINST.items()
    ]
    rows = [
        [c, str(n), f"{numbers['means'][c]:.3f}", _rate(numbers["followed"][c], n)]
        for c in ("plain", "padded", "injected")
    ]
    areas = [
        [text, f"{a:.3f} [{low:.3f}, {high:.3f}]", f"{n} and {n}"]
        for name, text in AGAINST.items()
        for a, low, high in [numbers[f"auroc_{name}"]]
    ]
    return Shown(
        said,
        [
            Table(
                f"Found: {_heads_named(numbers['heads'])}, whose attention falls by "
                f"{numbers['n_std']:g} standard deviations or more.",
                ["injected against", "AUROC, 95 % interval by base", "n"], areas,
            ),
            Table(
                "The score is 1 minus the attention that the heads give to the instruction. An "
                "answer follows the injection if it has the word that the injection asks for.",
                ["prompts", "n", "mean score", "followed, 95 % interval"], rows,
            ),
        ],
        Bars("AUROC of Attention Tracker against two controls", "AUROC", bars, mark=0.5),
    )  # fmt: skip


def _heads_named(heads: list[list[int]]) -> str:
    places = ", ".join(f"layer {layer}, head {head}" for layer, head in heads)
    return f"one head ({places})" if len(heads) == 1 else f"{len(heads)} heads ({places})"


def _rate(part: int, n: int) -> str:
    bounds = clopper_pearson(part, n)
    return f"{part / n:.2f} [{bounds.low:.2f}, {bounds.high:.2f}]"


REPLICATION = Replication(
    title="Attention shows a prompt injection",
    paper="Attention Tracker: Detecting Prompt Injection Attacks in LLMs",
    arxiv="2411.00348",
    published="Some heads look at the instruction, and look away from it when the data contain "
    "another one. Their attention detects injections with an AUROC up to 10 % higher than other "
    "detectors that need no training, for models from 1.5B to 9B parameters.",
    method="The eval `prompt_injection` puts instructions into the data of everyday tasks. Heads "
    "are found on 30 prompts and their injected forms, and judged on others. We add a control "
    "that the paper lacks, `padded`: harmless text as long as the injection. The heads are those "
    "whose attention falls by 4 standard deviations, as in the paper, or by 3, 2 or 1 if no head "
    "passes.",
    limits="Prompts and attacks are simple and made by the eval. If the model seldom follows the "
    "injection, the heads are judged on attacks that mostly fail.",
    model="smollm2-135m",
    measure=measure,
    show=show,
)
