"""A probe trained on rows of a real model scores in the engine as it does offline; patching too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inspect_lens._patching.runs import Run
from inspect_lens.engine import register, unregister
from inspect_lens.patch import patch_sweep
from inspect_lens.probe import auroc, pool_scores
from inspect_lens.spec import Replace
from inspect_lens.train import ActivationSet, LogisticProbe, train_probe
from tests.kit.patched import SlowRuns
from tests.kit.reference import max_relative_error

from .conftest import Served
from .test_rows import LOGPROB, TOLERANCE, fed

pytestmark = pytest.mark.real

Measured = Callable[[str, float, float], None]

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Cuba": "Havana",
    "Norway": "Oslo", "Poland": "Warsaw", "Austria": "Vienna", "Ireland": "Dublin", "Peru": "Lima",
    "Portugal": "Lisbon", "Sweden": "Stockholm", "Finland": "Helsinki", "Hungary": "Budapest",
    "Iraq": "Baghdad", "Kenya": "Nairobi", "Chile": "Santiago", "Iran": "Tehran",
    "Cyprus": "Nicosia",
}  # fmt: skip


def statements() -> list[tuple[str, str, int]]:
    """Country, statement, and 1 where it is false."""
    countries = list(CAPITALS)
    wrong = [CAPITALS[c] for c in (*countries[5:], *countries[:5])]
    made = []
    for country, other in zip(countries, wrong, strict=True):
        made.append((country, f"The capital of {country} is {CAPITALS[country]}.", 0))
        made.append((country, f"The capital of {country} is {other}.", 1))
    return made


def rows_of(served: Served, texts: list[str], layers: list[int]) -> list[Any]:
    prompts = [list(served.tokenizer(text)["input_ids"]) for text in texts]
    request = {"inspect_lens": {"capture": {"layers": layers, "positions": "prompt"}}}
    outputs = served.engine.run(prompts, request, max_tokens=1)
    return [output.activations["residual_stream"].float().numpy() for output in outputs]


# So few samples cannot show a rate, which the card says.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_probe_of_false_statements(served: Served, measured: Measured) -> None:
    third = served.layers // 3
    layers = [third, 2 * third]
    cases = statements()
    acts = rows_of(served, [text for _, text, _ in cases], layers)

    def part(name: str, first: int, last: int) -> ActivationSet:
        chosen = range(2 * first, 2 * last)
        return ActivationSet(
            name=name,
            model=served.name,
            layers=tuple(layers),
            acts=tuple(acts[i] for i in chosen),
            labels=[cases[i][2] for i in chosen],
            groups=[cases[i][0] for i in chosen],
            mask=tuple(np.arange(acts[i].shape[1]) >= acts[i].shape[1] - 2 for i in chosen),
            ids=[cases[i][1] for i in chosen],
            contents=[cases[i][1] for i in chosen],
        )

    train, control = part("train", 0, 12), part("control", 12, 18)
    heldout = part("heldout", 18, 24)
    probe = train_probe(
        LogisticProbe(), train, name=f"{served.name}/false", control=control, pool="mean",
        held_out=[heldout], rows="last", allow_few=True, fpr=0.2,
    )  # fmt: skip
    register(served.engine.llm, "false", probe.for_engine())
    try:
        ask = {"name": "false", "positions": "prompt", "tokens": True}
        request = {"inspect_lens": {"probes": [ask]}}
        prompts = [list(served.tokenizer(text)["input_ids"]) for _, text, _ in cases[36:]]
        outputs = served.engine.run(prompts, request, max_tokens=1)
    finally:
        unregister(served.engine.llm, "false")
    errors, of_engine, offline = [], [], []
    for output, rows in zip(outputs, acts[36:], strict=True):
        (receipt,) = output.inspect_lens.probes
        scores = probe.score_tokens(rows, layers)
        spread = max(1.0, float(np.abs(scores).max()))
        errors.append(float(np.abs(np.array(receipt.tokens) - scores).max()) / spread)
        of_engine.append(pool_scores(np.array(receipt.tokens)[-2:], "mean"))
        offline.append(pool_scores(scores[-2:], "mean"))
    measured("scores of a probe: engine and offline", max(errors), 1e-3)
    labels = [label for _, _, label in cases[36:]]
    assert auroc(labels, of_engine) == auroc(labels, offline)


def test_patching_a_fact(served: Served, measured: Measured) -> None:
    """Each cell of a sweep equals a forward pass of Hugging Face with the row put in."""
    clean, corrupted = "The capital of France is", "The capital of Italy is"
    layers = [1, served.layers // 2, served.layers - 1]
    asked: dict[str, Any] = {
        "answer": " Paris", "foil": " Rome", "layers": layers, "floor_runs": 1, "progress": False,
    }  # fmt: skip
    found = patch_sweep(served.engine.llm, clean, corrupted, **asked)
    slow = SlowRuns(served.folder, served.reference)
    ids = slow.tokens(corrupted)
    rows = served.reference.residual_stream(slow.tokens(clean))
    answer, foil = (slow.tokens(clean + text)[len(ids)] for text in (" Paris", " Rome"))
    worst = 0.0
    for i, layer in enumerate(found.layers):
        for j, position in enumerate(found.positions):
            row = rows[layer : layer + 1, position : position + 1].numpy()
            put = Replace(rows=row, layers=[layer], positions=[position])
            logprobs = slow.after(Run(tuple(ids), (put,)))
            metric = float(logprobs[answer] - logprobs[foil])
            worst = max(worst, abs(metric - float(found.metric[i, j])))
    measured("patching: logit difference of each layer and position", worst, LOGPROB)
    # What the last layer holds at the last token is the whole of the next one.
    assert found.recovered[-1, -1] == pytest.approx(1.0, abs=1e-2)


def test_rows_of_a_chat(served: Served, measured: Measured) -> None:
    """vLLM renders the template itself; rows are of what transformers would have fed."""
    from vllm import SamplingParams

    messages = [{"role": "user", "content": "What is 東京? 🗼"}]
    request = {"inspect_lens": {"capture": {"layers": "all", "positions": "all"}}}
    params = SamplingParams(max_tokens=8, temperature=0, extra_args=request)
    (output,) = served.engine.llm.chat(messages, params, use_tqdm=False)
    assert list(output.prompt_token_ids) == served.chat(messages)
    rows = output.activations["residual_stream"]
    expected = served.reference.residual_stream(fed(output))
    measured("rows of a chat", max_relative_error(rows.float(), expected), TOLERANCE)
