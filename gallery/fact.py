"""Causal tracing and patching of facts: where a model keeps what it knows about a subject."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gallery._chart import Heat
from gallery._replication import DataFile, Replication, Setting, Shown, Table
from inspect_lens.client import LensClient
from inspect_lens.errors import SpecError
from inspect_lens.patch import CausalTrace, causal_trace, patch_sweep
from inspect_lens.spec import Site

KNOWN: Final = DataFile(
    "known_1000.json",
    "rome.baulab.info/data/dsets, for kmeng01/rome; also LoryPack/LLM-LieDetector, "
    "data/raw_questions",
    "of the repositories: MIT (rome), BSD-3-Clause (LLM-LieDetector)",
)
FACTS: Final = 6
DRAWS: Final = 3
EVERY: Final = 4
"""Each which layer is restored."""
WINDOWS: Final[dict[Site, int]] = {"resid_post": 1, "mlp_out": 6, "attn_out": 6}
"""Layers restored together; the paper takes 10 of 48, as of 30 these are 6."""
PLACES: Final = (
    "first of the subject", "middle of the subject", "last of the subject", "next token",
    "further tokens", "last token",
)  # fmt: skip
PAIRS: Final = (("France", " Paris", "Italy", " Rome"), ("Japan", " Tokyo", "China", " Beijing"))


def measure(setting: Setting) -> dict[str, Any]:
    """Average indirect effects of facts that the model knows, and a patched fact."""
    known = json.loads(setting.files[KNOWN.name].read_text(encoding="utf-8"))
    layers = range(0, setting.n_layers, EVERY)
    traced: list[dict[str, CausalTrace]] = []
    with (
        setting.server(sites="resid_pre,resid_post,attn_out,mlp_out") as served,
        LensClient(served.url) as client,
    ):
        for row in known:
            if len(traced) < (setting.n or FACTS) and (found := _traces(client, row, layers)):
                traced.append(found)
        if not traced:
            raise SpecError(f"{setting.model} knows none of the {len(known)} facts")
        sweeps = [_patched(client, layers, *pair) for pair in PAIRS]
    effects = {site: np.array([_by_place(found[site]) for found in traced]) for site in WINDOWS}
    facts = [
        {
            "prompt": "".join(t.tokens),
            "answer": t.answer,
            "clean": t.clean,
            "total_effect": t.total_effect,
        }
        for t in (found["resid_post"] for found in traced)
    ]
    return {
        "n": len(facts), "facts": facts, "layers": list(layers), "draws": DRAWS,
        "effects": {site: _mean(found) for site, found in effects.items()},
        "patched": sweeps,
    }  # fmt: skip


def _traces(
    client: LensClient, row: dict[str, str], layers: Sequence[int]
) -> dict[str, CausalTrace] | None:
    """A fact traced at each site; None where the model does not know it."""
    prompt, answer = row["prompt"], f" {row['attribute']}"
    said = client.generate(prompt, max_tokens=1).text
    if not said.strip() or not answer.startswith(said) or prompt.count(row["subject"]) != 1:
        return None
    return {
        site: causal_trace(
            client, prompt, subject=row["subject"], answer=answer, site=site, window=width,
            layers=layers, draws=DRAWS, progress=False,
        )
        for site, width in WINDOWS.items()
    }  # fmt: skip


def _by_place(trace: CausalTrace) -> list[list[float]]:
    """(layers, places) effects; NaN where a prompt has no such token."""
    first, last, end = trace.subject[0], trace.subject[-1], len(trace.tokens) - 1
    places: list[list[int]] = [
        [first] if first < last else [], list(range(first + 1, last)), [last],
        [last + 1] if last + 1 < end else [], list(range(last + 2, end)), [end],
    ]  # fmt: skip
    at = {position: j for j, position in enumerate(trace.positions)}
    return [
        [float(np.mean([row[at[p]] for p in own])) if own else float("nan") for own in places]
        for row in trace.effect
    ]


def _mean(found: NDArray[np.float64]) -> list[list[float | None]]:
    """Mean over the facts that have such a token; None where none has."""
    known = ~np.isnan(found)
    total = np.where(known, found, 0.0).sum(axis=0)
    return [
        [float(t) / int(n) if n else None for t, n in zip(row, counts, strict=True)]
        for row, counts in zip(total, known.sum(axis=0), strict=True)
    ]


def _patched(
    client: LensClient, layers: Sequence[int], country: str, answer: str, other: str, foil: str
) -> dict[str, Any]:
    """Share of the logit difference that comes back, at the country and at the last token."""
    prompts = (f"The capital of {name} is" for name in (country, other))
    found = patch_sweep(
        client, *prompts, answer=answer, foil=foil, layers=layers, floor_runs=1, progress=False
    )
    return {
        "clean": country, "corrupted": other, "floor": found.floor,
        "country": found.recovered[:, 0].tolist(), "last": found.recovered[:, -1].tolist(),
    }  # fmt: skip


def show(numbers: dict[str, Any]) -> Shown:
    """Where restored rows bring the answer back."""
    layers = numbers["layers"]
    effects = {site: np.array(found, dtype=float) for site, found in numbers["effects"].items()}
    subject, end = PLACES.index("last of the subject"), PLACES.index("last token")
    total = float(np.mean([fact["total_effect"] for fact in numbers["facts"]]))
    at = {site: layers[int(np.argmax(found[:, subject]))] for site, found in effects.items()}
    best = {site: float(found[:, subject].max()) for site, found in effects.items()}
    late = layers[int(np.argmax(effects["attn_out"][:, end]))]
    said = f"noise on the subject takes {total:.2f} of the answer's probability away, over "
    said += f"{numbers['n']} facts. At the subject's last token the stream brings back at most "
    said += f"{best['resid_post']:.2f} (layer {at['resid_post']}), MLPs {best['mlp_out']:.2f} "
    said += f"(around layer {at['mlp_out']}) and attention {best['attn_out']:.2f}. "
    early = at["mlp_out"] < layers[-1] * 0.6 and best["mlp_out"] > 2 * best["attn_out"]
    said += (
        "So the early site in the MLPs is there. "
        if early
        else "These facts do not tell MLPs from attention there. "
    )
    said += f"At the last token MLPs bring back {effects['mlp_out'][:, end].max():.2f} and "
    said += f"attention {effects['attn_out'][:, end].max():.2f}, attention most around layer "
    said += f"{late}. "
    told = numbers["patched"][0]
    until = max((n for n, v in zip(layers, told["country"], strict=True) if v > 0.5), default=None)
    since = min((n for n, v in zip(layers, told["last"], strict=True) if v > 0.5), default=None)
    if until is not None and since is not None:
        said += f"Patched, the row of {told['clean']} carries the answer up to layer {until}, and "
        said += f"that of the last token from layer {since} on."
    else:
        said += "No patched row carries the answer."
    rows = [[site, *(_largest(column, layers) for column in found.T)]
            for site, found in effects.items()]  # fmt: skip
    traced = [
        [f["prompt"], f["answer"].strip(), f"{f['clean']:.2f}", f"{f['total_effect']:.2f}"]
        for f in numbers["facts"]
    ]
    patched = [
        [f"{p['clean']} into {p['corrupted']}", place, *(f"{v:.2f}" for v in p[key])]
        for p in numbers["patched"]
        for key, place in (("country", "the country"), ("last", "the last token"))
    ]
    return Shown(
        said,
        [
            Table(
                "The facts: the answer's probability, and how much of it the noise takes away.",
                ["prompt", "answer", "probability", "taken away"], traced,
            ),
            Table(
                f"Largest indirect effect at each place, mean over {numbers['n']} facts, with its "
                f"layer in brackets. {numbers['draws']} draws of the noise for each fact.",
                ["restored", *PLACES], rows,
            ),
            Table(
                "Patching: “The capital of France is” and “… Italy is” (and Japan, China), with "
                "the stream of the one put into the other. Share of the logit difference that "
                "comes back, by layer.",
                ["pair", "patched at", *map(str, layers)], patched,
            ),
        ],
        Heat(
            "Indirect effect of restoring the stream", "layer", "place", [str(n) for n in layers],
            PLACES, np.nan_to_num(effects["resid_post"].T).tolist(),
            high=float(np.nanmax(effects["resid_post"])),
        ),
    )  # fmt: skip


def _largest(column: NDArray[np.float64], layers: Sequence[int]) -> str:
    if np.isnan(column).all():
        return "no such token"
    return f"{np.nanmax(column):.3f} ({layers[int(np.nanargmax(column))]})"


REPLICATION = Replication(
    title="Where a fact is kept",
    paper="Locating and Editing Factual Associations in GPT (ROME)",
    arxiv="2202.05262",
    published="In GPT-2 XL, restoring the stream at the last token of the subject brings a fact "
    "back in early and middle layers (average indirect effect 8.7 % of probability), and MLPs do "
    "more of it than attention. Attention matters late, at the last token.",
    method="`causal_trace` runs on the paper's own facts, the first ones for which the model "
    "gives the first token of the answer. It puts noise on the subject's embeddings and then "
    "restores one row, at every fourth layer and each token: of the stream alone, or of six "
    "layers of MLPs or attention around it. `patch_sweep` then puts the stream of one country's "
    "prompt into another's.",
    limits="Effects are means over few facts, without an interval. Only facts that the model "
    "answers were taken, and a small model answers few.",
    model="smollm2-135m",
    files=[KNOWN],
    measure=measure,
    show=show,
)
