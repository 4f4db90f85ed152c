"""Whole autoencoders in the place of the stream: hooks of Hugging Face, and neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens.engine import register, registered, unregister
from inspect_lens.errors import LensError, SpecError
from inspect_lens.sae import SparseAutoencoder, read_autoencoder
from inspect_lens.spec import Ablate, Add, EditBase, EngineEdits, Gate, Splice
from tests.engine.conftest import HIDDEN, Engine, tokens
from tests.kit.autoencoders import Definition, write_saelens
from tests.kit.edit_cases import random_rows
from tests.kit.reference import HuggingFace, max_relative_error, rows_of

pytestmark = pytest.mark.engine

N_LATENTS = 320
KINDS = {"standard": "relu", "jumprelu": "jumprelu", "topk": "topk"}
Hook = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def definitions() -> dict[str, Definition]:
    made = {}
    for kind, name in KINDS.items():
        sae = Definition(kind, subtract=True, k=20, width=HIDDEN, latents=N_LATENTS)
        # What it writes is about as long as a row of the stream.
        sae.w_dec, sae.b_dec = sae.w_dec / 40, sae.b_dec / 4
        made[name] = sae
    return made


@pytest.fixture(scope="module")
def saes(
    engine: Engine, definitions: dict[str, Definition], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SparseAutoencoder]]:
    read = {}
    for name, sae in definitions.items():
        folder: Path = tmp_path_factory.mktemp(name)
        meta = {"hook_name": "blocks.1.hook_resid_post", "model_name": "tiny"}
        read[name] = read_autoencoder(write_saelens(folder, sae, metadata=meta))
        register(engine.llm, name, read[name].for_engine())
    yield read
    for name in read:
        unregister(engine.llm, name)


def ask(*edits: EditBase, **more: Any) -> dict[str, Any]:
    return {"inspect_lens": LensRequest(capture={"layers": "all"}, edits=edits, **more)}


def fed(prompt: list[int], output: Any) -> list[int]:
    return [*prompt, *output.outputs[0].token_ids[:-1]]


def hook(sae: Definition, change: Hook = lambda a: a, *, error_term: bool = False) -> Hook:
    """What `SAE.forward` of SAELens does at its hook point."""

    def run(x: torch.Tensor) -> torch.Tensor:
        latents = sae(x)
        error = x - sae.decode(latents) if error_term else 0.0
        return sae.decode(change(latents.clone())) + error

    return run


def scaled(latent: int, factor: float) -> Hook:
    def change(latents: torch.Tensor) -> torch.Tensor:
        latents[:, latent] *= factor
        return latents

    return change


def most_active(sae: Definition, rows: torch.Tensor) -> int:
    return int(sae(rows).mean(dim=0).argmax())


def test_a_run_is_that_of_hugging_face_with_the_autoencoder_at_the_layer(
    engine: Engine,
    hugging_face: HuggingFace,
    definitions: dict[str, Definition],
    saes: dict[str, SparseAutoencoder],
) -> None:
    # In chunks of 64 tokens, beside plain requests, and prompt and answer alike.
    prompts = [tokens(n, seed=n) for n in (100, 40, 70, 33)]
    plain = engine.run(prompts, ask(), max_tokens=9)
    edits = [saes[name].splice(name) for name in KINDS.values()]
    asked = [*[ask(edit) for edit in edits], ask()]
    outputs = engine.run(prompts, asked, max_tokens=9)
    named = set()
    for name, prompt, output in zip(KINDS.values(), prompts, outputs, strict=False):
        there = {1: hook(definitions[name])}
        wanted = hugging_face.residual_stream(fed(prompt, output), there)
        assert max_relative_error(rows_of(output), wanted) < 1e-4
        receipt = output.inspect_lens.steer
        named.add(receipt.vectors)
        assert (receipt.layers, receipt.n_tokens) == ((1,), len(prompt) + 8)
        assert output.inspect_lens.cache_salted
    assert len(named) == len(KINDS)
    assert outputs[3].outputs[0].token_ids == plain[3].outputs[0].token_ids
    again = engine.run([prompts[0]], [asked[0]], max_tokens=9)[0]
    assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids, "out of its own blocks"
    after = engine.run(prompts, ask(), max_tokens=9)
    for one, other in zip(after, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_with_its_error_term_it_changes_no_bit_and_one_latent_what_that_writes(
    engine: Engine,
    hugging_face: HuggingFace,
    definitions: dict[str, Definition],
    saes: dict[str, SparseAutoencoder],
) -> None:
    prompt = tokens(80, seed=5)
    plain = engine.run([prompt], ask(), max_tokens=6, logprobs=5)[0]
    for name, sae in saes.items():
        latent = most_active(definitions[name], rows_of(plain)[1])
        same, changed, whole = engine.run(
            [prompt] * 3,
            [
                ask(sae.splice(name, error_term=True)),
                ask(sae.splice(name, {latent: 3.0}, mode="scale", error_term=True)),
                ask(sae.splice(name, {latent: 3.0}, mode="scale")),
            ],
            max_tokens=6,
            logprobs=5,
        )
        assert same.outputs[0].token_ids == plain.outputs[0].token_ids
        assert max_relative_error(rows_of(same), rows_of(plain)) < 1e-4
        for output, error_term in ((changed, True), (whole, False)):
            there = {1: hook(definitions[name], scaled(latent, 3.0), error_term=error_term)}
            wanted = hugging_face.residual_stream(fed(prompt, output), there)
            assert max_relative_error(rows_of(output), wanted) < 1e-4
        assert not torch.allclose(rows_of(changed)[1, :80], rows_of(plain)[1, :80], atol=1e-3)
    alone = engine.run([prompt], ask(saes["relu"].splice("relu", error_term=True)), max_tokens=6)
    assert torch.equal(rows_of(alone[0]), rows_of(plain))


def test_edits_in_front_act_before_it_and_those_behind_on_what_it_wrote(
    engine: Engine,
    hugging_face: HuggingFace,
    definitions: dict[str, Definition],
    saes: dict[str, SparseAutoencoder],
) -> None:
    prompt = tokens(90, seed=6)
    first, second = random_rows(7, 2, HIDDEN)
    unit = torch.from_numpy(second / np.linalg.norm(second))
    edits = [
        Add(vector=first, layers=[1]),
        saes["jumprelu"].splice("jumprelu", {3: 2.0}),
        Ablate(direction=second, layers=[1]),
    ]

    def changed(latents: torch.Tensor) -> torch.Tensor:
        latents[:, 3] = 2.0
        return latents

    replaced = hook(definitions["jumprelu"], changed)

    def there(x: torch.Tensor) -> torch.Tensor:
        x = replaced(x + torch.from_numpy(first))
        return x - (x @ unit)[:, None] * unit

    output = engine.run([prompt], ask(*edits), max_tokens=6)[0]
    wanted = hugging_face.residual_stream(fed(prompt, output), {1: there})
    assert max_relative_error(rows_of(output), wanted) < 1e-4


def test_positions_and_gates_choose_tokens_as_for_any_edit(
    engine: Engine, definitions: dict[str, Definition], saes: dict[str, SparseAutoencoder]
) -> None:
    prompt = tokens(70, seed=8)
    plain = rows_of(engine.run([prompt], ask(), max_tokens=6)[0])
    sae = saes["relu"]
    listed, answer = engine.run(
        [prompt] * 2,
        [
            ask(sae.splice("relu", positions=(3, -1))),
            ask(sae.splice("relu", positions="completion")),
        ],
        max_tokens=6,
    )
    made = hook(definitions["relu"])
    torch.testing.assert_close(
        rows_of(listed)[1, [3, 69]], made(plain[1, [3, 69]]), rtol=1e-3, atol=1e-3
    )
    assert max_relative_error(rows_of(listed)[1, :3], plain[1, :3]) < 1e-5
    assert listed.inspect_lens.steer.n_tokens == 2
    assert max_relative_error(rows_of(answer)[:, :70], plain[:, :70]) < 1e-5
    assert (rows_of(answer)[1, 70] - plain[1, 70]).norm() > 0.1
    probe = random_rows(9, 1, HIDDEN)[0]
    scores = plain[1, :70] @ torch.from_numpy(probe)
    middle = float(scores.sort().values[34:36].mean())
    gate = Gate(direction=probe, layer=1, threshold=middle)
    gated = Splice(sae="relu", layers=[1], when=gate)
    found = rows_of(engine.run([prompt], ask(gated), max_tokens=1)[0])
    is_open = scores > middle
    wanted = torch.where(is_open[:, None], made(plain[1, :70]), plain[1, :70])
    assert max_relative_error(found[1], wanted) < 1e-3
    # A gate that lasts, which is read behind the edit, and a strength over time.
    never = Gate(direction=probe, layer=3, threshold=1e6, scope="rest")
    shut = Splice(sae="relu", layers=[1], when=never, positions="completion")
    rows = rows_of(engine.run([prompt], ask(shut), max_tokens=6)[0])
    assert max_relative_error(rows, plain) < 1e-5
    fading = {"points": [[0, 0.5], [1, 0.0]], "between": "step"}
    half = Splice(sae="relu", layers=[1], positions="completion", schedule=fading)
    rows = rows_of(engine.run([prompt], ask(half), max_tokens=6)[0])
    before = plain[1, 70]
    wanted = before + 0.5 * (made(before[None])[0] - before)
    torch.testing.assert_close(rows[1, 70], wanted, rtol=1e-3, atol=1e-3)


def test_a_name_is_looked_up_in_registered_edits_and_what_does_not_fit_is_refused(
    engine: Engine, saes: dict[str, SparseAutoencoder]
) -> None:
    prompt = tokens(40, seed=2)
    edit = saes["relu"].splice("relu", {5: 0.0})
    register(engine.llm, "spliced", EngineEdits(edits=[edit]))
    try:
        outputs = engine.run([prompt] * 2, [ask(edit), ask(edits_named=["spliced"])], max_tokens=4)
        assert max_relative_error(*map(rows_of, outputs)) < 1e-4
        shown = registered()["relu"]
        assert (shown["kind"], shown["latents"], shown["layers"]) == ("relu", N_LATENTS, [1])
    finally:
        unregister(engine.llm, "spliced")
    two = Splice(sae="topk", layers=[2])
    for edits, words in (
        ([Splice(sae="nobody", layers=[1])], "no sae is registered as 'nobody'"),
        ([Splice(sae="relu", layers=[1], latents={N_LATENTS: 1.0})], "has 0 to 319"),
        ([Splice(sae="relu", layers=[2]), two], r"edits\[1\]: a second autoencoder"),
        ([Splice(sae="relu", layers=[9])], "layer 9"),
    ):
        with pytest.raises(SpecError, match=words):
            engine.run([prompt], ask(*edits))
    eye = np.eye(HIDDEN + 1, dtype=np.float32)
    other = SparseAutoencoder(weight=eye, bias=eye[0], decoder=eye, decoder_bias=eye[0])
    with pytest.raises(LensError, match=f"rows of width {HIDDEN + 1}"):
        register(engine.llm, "wide", other.for_engine())
    with pytest.raises(SpecError, match="no lens is registered as 'relu'"):
        engine.run([prompt], {"inspect_lens": {"lens": {"name": "relu"}}})
    # A row that no later layer could read is left, and its request fails.
    huge = SparseAutoencoder(
        weight=np.eye(HIDDEN, dtype=np.float32) * 1e15,
        bias=np.ones(HIDDEN, dtype=np.float32),
        decoder=np.eye(HIDDEN, dtype=np.float32) * 1e15,
        decoder_bias=np.zeros(HIDDEN, dtype=np.float32),
    )
    register(engine.llm, "huge", huge.for_engine())
    try:
        with pytest.raises(LensError, match=r"too large|finite"):
            engine.run([prompt], ask(huge.splice("huge", layers=[1])))
    finally:
        unregister(engine.llm, "huge")
    plain = engine.run([prompt], ask(), max_tokens=2)[0]
    assert torch.isfinite(rows_of(plain)).all()
