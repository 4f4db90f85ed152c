"""The logit lens against Hugging Face: hidden states through its final norm and its head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens.engine import register, registered, unregister
from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens, LensCard
from inspect_lens.spec import LensTable
from tests.engine.test_capture import fed
from tests.kit.reference import HuggingFace

from .conftest import HIDDEN, LAYERS, Engine, tokens

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
CHOSEN = [7, 300, 0]


def ask(capture: Any = None, **lens: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"lens": lens}
    if capture is not None:
        request["capture"] = capture
    return {"inspect_lens": request}


def table(output: Any) -> LensTable:
    found: LensTable = output.inspect_lens.lens.result(output.activations)
    return found


def logprobs(
    reference: HuggingFace, fed_tokens: list[int], lens: Lens | None = None
) -> np.ndarray[Any, Any]:
    """(tokens, layers, vocabulary) float64, of the reference's hidden states."""
    rows = reference.residual_stream(fed_tokens)
    if lens is not None:
        for layer in lens.layers:
            rows[layer] = torch.from_numpy(lens.translate(rows[layer].numpy(), layer))
    with torch.no_grad():
        logits = reference.model.lm_head(reference.model.model.norm(rows))
    found: np.ndarray[Any, Any] = logits.double().log_softmax(dim=-1).transpose(0, 1).numpy()
    return found


def check(
    output: Any,
    reference: HuggingFace,
    top_k: int = 5,
    chosen: Any = CHOSEN,
    lens: Lens | None = None,
) -> LensTable:
    found = table(output)
    truth = logprobs(reference, fed(output), lens)[list(found.positions)][:, list(found.layers)]
    assert found.token_ids.shape == (*truth.shape[:2], top_k)
    best = -np.sort(-truth, axis=-1)[..., :top_k]
    np.testing.assert_allclose(found.logprobs, best, atol=TOLERANCE)
    own = np.take_along_axis(truth, found.token_ids, axis=-1)
    np.testing.assert_allclose(found.logprobs, own, atol=TOLERANCE)
    assert found.targets == tuple(chosen)
    for i, token in enumerate(chosen):
        np.testing.assert_allclose(found.target_logprobs[..., i], truth[..., token], atol=TOLERANCE)
        # Neighbours that lie closer than the tolerance may change places.
        least = (truth > truth[..., token, None] + TOLERANCE).sum(axis=-1)
        most = (truth > truth[..., token, None] - TOLERANCE).sum(axis=-1) - 1
        rank = found.target_ranks[..., i]
        assert ((least <= rank) & (rank <= most)).all()
    return found


def test_all_layers_and_tokens_equal_hugging_face(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    # One token, a prompt of one step, and one of three chunks.
    prompts = [tokens(n, seed=n) for n in (1, 40, 150)]
    for output in engine.run(prompts, ask(layers="all", tokens=CHOSEN), max_tokens=9):
        found = check(output, hugging_face)
        n_prompt, sampled = len(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert found.positions == tuple(range(n_prompt + len(sampled) - 1))
        # The last layer predicts what greedy sampling took.
        assert found.token_ids[n_prompt - 1 :, -1, 0].tolist() == sampled
        # Another layer could not pass.
        assert (found.token_ids[:, 0] != found.token_ids[:, -1]).any()


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("prompt", list(range(70))),
        ("completion", list(range(70, 77))),
        ("last_prompt", [69]),
        ([-1, 3, 72], [3, 69, 72]),
    ],
)
def test_positions_and_layers_that_are_named(
    engine: Engine, hugging_face: HuggingFace, positions: Any, expected: list[int]
) -> None:
    request = ask(layers=[2, 0], top_k=3, tokens=CHOSEN, positions=positions)
    output = engine.run([tokens(70)], request)[0]
    found = check(output, hugging_face, top_k=3)
    assert (found.layers, list(found.positions)) == ((0, 2), expected)


def test_beside_a_capture_of_other_tokens(engine: Engine, hugging_face: HuggingFace) -> None:
    capture = {"layers": [1], "positions": "all"}
    mixed = [
        ask(capture, layers=[0, 3], tokens=CHOSEN, positions="completion"),
        ask({"layers": [2], "positions": "completion"}, layers=[3], top_k=0, tokens=CHOSEN),
    ]
    outputs = engine.run([tokens(30), tokens(90, seed=2)], mixed, max_tokens=20)
    check(outputs[0], hugging_face)
    check(outputs[1], hugging_face, top_k=0)
    for output, layer, first in zip(outputs, (1, 2), (0, 90), strict=True):
        rows = output.activations["residual_stream"]
        truth = hugging_face.residual_stream(fed(output))[[layer], first:]
        torch.testing.assert_close(rows, truth, rtol=1e-3, atol=1e-3)


def test_neighbours_get_the_answers_of_a_solo_run(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    prompts = [tokens(20 + 9 * i, seed=i) for i in range(6)]
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[1], scale=0.5)
    asked: list[dict[str, Any] | None] = [
        ask(layers=[1, 3], tokens=CHOSEN),
        None,
        {"output_residual_stream": [2]},
        ask(layers="all", tokens=CHOSEN, positions="completion"),
        {"apply_steering_vectors": [vector]},
        None,
    ]
    solo = [engine.run([p], [a], max_tokens=12)[0] for p, a in zip(prompts, asked, strict=True)]
    together = engine.run(prompts, asked, max_tokens=12)
    for alone, beside in zip(solo, together, strict=True):
        assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
    for i in (0, 3):
        check(together[i], hugging_face)
    assert set(engine.stats().values()) == {0}


def test_a_lens_reads_what_steering_made(engine: Engine, hugging_face: HuggingFace) -> None:
    direction = np.linspace(-3, 3, HIDDEN, dtype=np.float32)
    steer = {"op": "add", "vector": direction[None], "layers": [1]}
    request = {"inspect_lens": {"edits": [steer], "lens": {"layers": [1]}, "capture": [1]}}
    request["inspect_lens"]["capture"] = {"layers": [1]}
    output = engine.run([tokens(25)], request, max_tokens=4)[0]
    rows = output.activations["residual_stream"].float()
    with torch.no_grad():
        logits = hugging_face.model.lm_head(hugging_face.model.model.norm(rows))
    best = logits.double().log_softmax(dim=-1).topk(5, dim=-1).values.transpose(0, 1)
    np.testing.assert_allclose(table(output).logprobs, best.numpy(), atol=TOLERANCE)


def random_lens(kind: Any, seed: int, layers: tuple[int, ...] = (0, 2)) -> Lens:
    """A lens whose rows are about as long as those of the stream."""
    rng = np.random.default_rng(seed)
    shape = len(layers), HIDDEN, HIDDEN
    matrix = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(HIDDEN))
    bias = rng.standard_normal(shape[:2], dtype=np.float32) if kind == "tuned" else None
    card = LensCard(name="tiny/l", kind=kind, n_layers=LAYERS, layers=layers, hidden=HIDDEN)
    return Lens(matrix=matrix, bias=bias, card=card)


def test_registered_lenses_equal_hugging_face_and_their_formula(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    lenses = {"tuned-0": random_lens("tuned", 1), "jacobian-0": random_lens("jacobian", 2)}
    for name, lens in lenses.items():
        register(engine.llm, name, lens.for_engine())
    try:
        asked = [
            ask(name="tuned-0", tokens=CHOSEN),
            ask(name="jacobian-0", layers=[2, 0], top_k=3, tokens=CHOSEN, positions="completion"),
            ask(layers="all", tokens=CHOSEN),
            ask({"layers": [2]}, name="jacobian-0", layers=[2], top_k=1, tokens=CHOSEN),
        ]
        prompts = [tokens(n, seed=n) for n in (150, 40, 7, 33)]
        outputs = engine.run(prompts, asked, max_tokens=9)
        found = check(outputs[0], hugging_face, lens=lenses["tuned-0"])
        assert found.layers == (0, 2, 3), "those of the lens, and the last"
        receipt = outputs[0].inspect_lens.lens
        sha256 = lenses["tuned-0"].for_engine().sha256
        assert (receipt.kind, receipt.name, receipt.sha256) == ("tuned", "tuned-0", sha256)
        check(outputs[1], hugging_face, top_k=3, lens=lenses["jacobian-0"])
        assert outputs[1].inspect_lens.lens.kind == "jacobian"
        check(outputs[2], hugging_face)
        plain = outputs[2].inspect_lens.lens
        assert (plain.kind, plain.name, plain.sha256) == ("logit", None, None)
        check(outputs[3], hugging_face, top_k=1, lens=lenses["jacobian-0"])
        for request, words in (
            (ask(name="tuned-0", layers=[1]), r"\[1\]; the lens 'tuned-0' reads the layers"),
            (ask(name="tuned-1"), "no lens is registered as 'tuned-1'"),
            ({"inspect_lens": {"probes": ["tuned-0"]}}, "no probe is registered as 'tuned-0'"),
        ):
            with pytest.raises(SpecError, match=words):
                engine.run([tokens(5)], request)
    finally:
        for name in lenses:
            unregister(engine.llm, name)
    assert not set(lenses) & set(registered())
    assert set(engine.stats().values()) == {0}
