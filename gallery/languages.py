"""The logit lens between two languages: which one a multilingual model is in on the way."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from scipy.stats import ttest_1samp

from gallery._chart import Line, Lines
from gallery._replication import Replication, Setting, Shown, Table
from inspect_lens.client import LensClient
from inspect_lens.errors import SpecError

WORDS: Final = (
    ("livre", "书", "book"), ("eau", "水", "water"), ("feu", "火", "fire"),
    ("montagne", "山", "mountain"), ("fleur", "花", "flower"), ("soleil", "太阳", "sun"),
    ("lune", "月", "moon"), ("chien", "狗", "dog"), ("chat", "猫", "cat"),
    ("poisson", "鱼", "fish"), ("oiseau", "鸟", "bird"), ("cheval", "马", "horse"),
    ("arbre", "树", "tree"), ("porte", "门", "door"), ("main", "手", "hand"),
    ("coeur", "心", "heart"), ("ville", "城市", "city"), ("neige", "雪", "snow"),
    ("pluie", "雨", "rain"), ("vent", "风", "wind"), ("mer", "海", "sea"),
    ("riz", "米", "rice"), ("thé", "茶", "tea"), ("roi", "王", "king"),
    ("route", "路", "road"), ("pont", "桥", "bridge"), ("vin", "酒", "wine"),
    ("pain", "面包", "bread"), ("lait", "牛奶", "milk"), ("nuage", "云", "cloud"),
    ("étoile", "星", "star"), ("pied", "脚", "foot"),
    ("maison", "房子", "house"), ("clé", "钥匙", "key"), ("lit", "床", "bed"),
    ("chaise", "椅子", "chair"), ("fenêtre", "窗", "window"), ("sang", "血", "blood"),
    ("oeil", "眼", "eye"), ("nez", "鼻子", "nose"), ("bouche", "嘴", "mouth"),
    ("dent", "牙", "tooth"), ("feuille", "叶", "leaf"), ("herbe", "草", "grass"),
    ("pierre", "石", "stone"), ("sable", "沙", "sand"), ("rivière", "河", "river"),
    ("île", "岛", "island"), ("forêt", "森林", "forest"), ("vache", "牛", "cow"),
    ("mouton", "羊", "sheep"), ("cochon", "猪", "pig"), ("souris", "鼠", "mouse"),
    ("loup", "狼", "wolf"), ("ours", "熊", "bear"), ("oeuf", "蛋", "egg"),
    ("sel", "盐", "salt"), ("sucre", "糖", "sugar"), ("pomme", "苹果", "apple"),
    ("fer", "铁", "iron"), ("école", "学校", "school"), ("nuit", "夜", "night"),
    ("bateau", "船", "boat"), ("épée", "剑", "sword"),
)  # fmt: skip
"""French, Chinese, English. The first half chooses the layer, and the second half is tested."""
SHOTS: Final = 4


def measure(setting: Setting) -> dict[str, Any]:
    """Probabilities of the Chinese and of the English word at the end of a French one's line."""
    n = setting.count(len(WORDS), len(WORDS))
    if n < 2:
        raise SpecError(f"--n {n}: one word chooses the layer and another is tested, so 2 or more")
    words = WORDS[:n]
    found: list[dict[str, Any]] = []
    with setting.server() as served, LensClient(served.url) as client:
        for i, (french, chinese, english) in enumerate(words):
            shots = [WORDS[(i + 1 + k) % len(WORDS)] for k in range(SHOTS)]
            other = WORDS[(i + len(WORDS) // 2) % len(WORDS)][2]
            lines = [f'Français: "{fr}" - 中文: "{zh}"' for fr, zh, _ in shots]
            prompt = "\n".join([*lines, f'Français: "{french}" - 中文: "'])
            tokens = [_first(setting, text) for text in (chinese, english, f" {english}", other,
                                                         f" {other}")]  # fmt: skip
            wanted = list(dict.fromkeys(tokens))
            output = client.generate(
                prompt, max_tokens=1,
                lens={"layers": "all", "top_k": 1, "tokens": wanted, "positions": "last_prompt"},
            )  # fmt: skip
            assert output.receipt is not None
            assert output.receipt.lens is not None
            table = output.receipt.lens.result(output.activations)
            chances = np.exp(table.target_logprobs[0])
            at = {token: k for k, token in enumerate(wanted)}
            zh, en, en_space, no, no_space = (chances[:, at[token]] for token in tokens)
            found.append(
                {
                    "word": french,
                    "Chinese": zh.tolist(),
                    "English": np.maximum(en, en_space).tolist(),
                    "another English word": np.maximum(no, no_space).tolist(),
                    "said": setting.tokenizer.decode(int(table.token_ids[0, -1, 0])),
                }
            )
    return {"n": len(found), "shots": SHOTS, "words": found}


def _first(setting: Setting, text: str) -> int:
    return int(setting.tokenizer.encode(text, add_special_tokens=False)[0])


KINDS: Final = ("Chinese", "English", "another English word")


def show(numbers: dict[str, Any]) -> Shown:
    """Mean probabilities by layer, and whether English comes before Chinese."""
    every = {k: np.array([word[k] for word in numbers["words"]]) for k in KINDS}
    half = numbers["n"] // 2
    peak = int(np.argmax(every["English"][:half].mean(axis=0)))
    chances = {k: v[half:] for k, v in every.items()}
    means = {k: v.mean(axis=0) for k, v in chances.items()}
    gap = chances["English"] - chances["another English word"]
    n, layers = gap.shape
    bounds = ttest_1samp(gap[:, peak], 0.0).confidence_interval()
    last = float(means["Chinese"][-1])
    lead = chances["English"][:, peak] - chances["Chinese"][:, peak]
    ahead = ttest_1samp(lead, 0.0).confidence_interval()
    said = f"the English word is likeliest after layer {peak} of {layers}, as {half} words say. "
    said += f"For {n} others its mean probability there is {means['English'][peak]:.3f}; the "
    said += f"Chinese one has {means['Chinese'][peak]:.3f} there and {last:.3f} at the end. "
    by = f"it is ahead of Chinese for {(lead > 0).sum()} of {n} words, and by {lead.mean():.3f} "
    by += f"[{ahead.low:.3f}, {ahead.high:.3f}] on average"
    if not bounds.low > 0:  # NaN for a single word
        said += "That is not beyond another English word, so no English is shown on the way."
    elif ahead.low > 0:
        faintly = "" if means["English"][peak] >= 0.1 else ", faintly"
        said += f"English shows beyond chance there: {by}. So the model passes through English "
        said += f"before it writes Chinese{faintly}."
    elif ahead.high > 0:
        said += f"English shows beyond chance there, and {by}. That is not beyond chance, so the "
        said += "detour through English is not shown."
    else:
        said += "English shows beyond chance, but never ahead of Chinese: the detour is faint."
    lines = [
        Line(kind, [(float(i), float(v)) for i, v in enumerate(values)])
        for kind, values in means.items()
    ]
    high = max(0.05, float(np.ceil(max(v.max() for v in means.values()) * 10) / 10))
    rows = [
        [str(i), *(f"{means[k][i]:.4f}" for k in KINDS)]
        for i in range(layers)
        if means["English"][i] > 0.001 or means["Chinese"][i] > 0.001 or i == layers - 1
    ]
    right = (chances["Chinese"][:, -1] > 0.5).sum()
    return Shown(
        said,
        [
            Table(
                f"Mean probability of the word's first token, {n} words; layers below "
                "0.001 in both are left out. The Chinese word has more than half of the "
                f"probability at the end for {right} of them. The difference between the English "
                f"word and another one after layer {peak} has the 95 % interval "
                f"[{bounds.low:.4f}, {bounds.high:.4f}].",
                ["after layer", *KINDS], rows,
            )
        ],
        Lines(
            "Mean probability by layer, logit lens", "after layer", "mean probability", lines,
            high=high, ticks=[float(i) for i in range(0, layers, 2 if layers < 20 else 4)],
        ),
    )  # fmt: skip


REPLICATION = Replication(
    title="Another language in the middle layers",
    paper="Do Llamas Work in English? On the Latent Language of Multilingual Transformers",
    arxiv="2402.10588",
    published="By the logit lens, Llama-2 of 7B to 70B, asked to translate French into Chinese, "
    "gives the English word a high probability in its middle layers, and the Chinese one only in "
    "the last.",
    method="The prompt is the paper's: four lines with a French and a Chinese word, and a fifth "
    "without its Chinese word. The logit lens reads the last token at every layer. We count the "
    "first token of the Chinese and of the English word, with and without a space in front; the "
    "English word of another line is the control. Half of the words choose the layer at which the "
    "English word is likeliest, and all numbers are of the other half.",
    limits="The logit lens reads middle layers with the last layer's matrix, which misses what is "
    "written there in other coordinates. A first token can begin other words, too.",
    model="gemma3-270m",
    measure=measure,
    show=show,
)
