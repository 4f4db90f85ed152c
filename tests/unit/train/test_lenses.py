"""Fitting lenses against truth: linear models, finite differences, and the organism."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens, LensCard
from inspect_lens.train import evaluate_lens, fit_jacobian_lens, fit_tuned_lens

WIDTH, VOCAB = 16, 60


def tiny(layers: int = 3) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
    return model


def prompts(n: int, length: int = 12, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, (n, length)).tolist()  # type: ignore[no-any-return]


class Linear(nn.Module):
    """A block without curvature: it mixes a token's row with that of the token before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        own, before = (rng.standard_normal((2, WIDTH, WIDTH)) / 8).astype(np.float32)
        self.own = nn.Parameter(torch.from_numpy(own))
        self.before = nn.Parameter(torch.from_numpy(before))
        self.shift = nn.Parameter(torch.from_numpy(rng.standard_normal(WIDTH, np.float32)))

    def forward(self, hidden: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        late = nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return hidden + hidden @ self.own.T + late @ self.before.T + self.shift

    def matrix(self, tokens: int) -> np.ndarray[Any, Any]:
        """What it does to all rows of a prompt, as one matrix, without the shift."""
        own, before = (p.detach().double().numpy() for p in (self.own, self.before))
        eye = np.eye(WIDTH) + own
        return np.kron(np.eye(tokens), eye) + np.kron(np.eye(tokens, k=-1), before)


def linear_model() -> Any:
    model = tiny()
    model.model.layers = nn.ModuleList([Linear(seed) for seed in range(3)])
    return model


@pytest.mark.parametrize(("block", "skips"), [(16, (2, 1)), (5, (0, 0)), (64, (3, 2))])
def test_the_jacobian_of_a_linear_model_is_the_closed_form(
    block: int, skips: tuple[int, int]
) -> None:
    model, texts, first = linear_model(), prompts(1, 9) + prompts(1, 7, seed=5), skips[0]
    lens = fit_jacobian_lens(
        model, texts, held_out=prompts(2, seed=9), skip_first=first, skip_last=skips[1], block=block
    )
    for layer in (0, 1):
        expected = np.zeros((WIDTH, WIDTH))
        for text in texts:
            n = len(text)
            whole = np.eye(n * WIDTH)
            for later in model.model.layers[layer + 1 :]:
                whole = later.matrix(n) @ whole
            parts = whole.reshape(n, WIDTH, n, WIDTH)[first : n - skips[1], :, first : n - skips[1]]
            expected += parts.sum(axis=(0, 2)) / parts.shape[0] / len(texts)
        np.testing.assert_allclose(lens.matrix[layer], expected, atol=2e-5)
    assert lens.layers == (0, 1)
    assert all(p.requires_grad for p in model.parameters()), "the model is as it was"


def test_the_jacobian_of_a_transformer_is_its_finite_difference() -> None:
    model, (text,) = tiny().double(), prompts(1, 10)
    lens = fit_jacobian_lens(
        model, [text], held_out=prompts(2, seed=9), skip_first=3, skip_last=1, block=7
    )
    valid, step = slice(3, 9), 4e-3  # norms compute in float32
    direction = torch.from_numpy(np.random.default_rng(1).standard_normal(WIDTH))

    def last(layer: int, change: torch.Tensor) -> torch.Tensor:
        """Sum of the last layer's rows where that of a layer is changed at all valid tokens."""
        kept: list[torch.Tensor] = []

        def move(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, valid] += change
            return output

        def keep(_module: Any, _args: Any, output: torch.Tensor) -> None:
            kept.append(output[0, valid].sum(dim=0))

        handles = [
            model.model.layers[layer].register_forward_hook(move),
            model.model.layers[2].register_forward_hook(keep),
        ]
        with torch.no_grad():
            model(input_ids=torch.tensor([text]), use_cache=False)
        for handle in handles:
            handle.remove()
        return kept[0]

    for layer in (0, 1):
        rise = (last(layer, step * direction) - last(layer, -step * direction)) / (2 * step * 6)
        found = torch.from_numpy(lens.matrix[layer].copy()).double() @ direction
        torch.testing.assert_close(found, rise, rtol=1e-3, atol=3e-4)


def test_the_mean_is_over_prompts_and_layers_are_chosen() -> None:
    model, texts = tiny(), prompts(3)
    held_out = prompts(2, seed=9)
    options: dict[str, Any] = {"held_out": held_out, "skip_first": 2}
    alone = [fit_jacobian_lens(model, [text], **options).matrix for text in texts]
    together = fit_jacobian_lens(model, texts, layers=[1], **options)
    np.testing.assert_allclose(together.matrix[0], np.mean(alone, axis=0)[1], atol=1e-4)
    half = fit_jacobian_lens(model, texts, layers=[1], dtype="float16", **options)
    assert half.matrix.dtype == np.float16
    np.testing.assert_allclose(half.matrix, together.matrix, rtol=1e-3, atol=1e-3)
    assert together.card.training is not None
    assert (together.card.training.n_prompts, together.card.training.n_tokens) == (3, 27)


def test_a_tuned_lens_recovers_an_affine_block() -> None:
    """The last block is affine, so the row before it tells the prediction exactly."""
    model, rng = tiny(), np.random.default_rng(4)
    block = Linear(7)
    with torch.no_grad():
        block.before.zero_()
        block.shift.copy_(torch.from_numpy(rng.standard_normal(WIDTH, np.float32)))
    model.model.layers[2] = block
    lens = fit_tuned_lens(
        model, prompts(64), held_out=prompts(16, seed=9), layers=[1], steps=400, batch=32, lr=2e-2,
        weight_decay=0.0,
    )  # fmt: skip
    (quality,) = lens.card.quality
    assert quality.logit_kl > 0.2
    assert quality.kl < 0.005 * quality.logit_kl
    assert quality.agreement > 0.97
    # The final norm divides by the length, so the map is known up to a factor.
    assert lens.bias is not None
    found = np.concatenate([np.eye(WIDTH) + lens.matrix[0], lens.bias.T], axis=1)
    own, shift = block.own.detach().numpy(), block.shift.detach().numpy()
    truth = np.concatenate([np.eye(WIDTH) + own, shift[:, None]], axis=1)
    factor = (found * truth).sum() / (truth * truth).sum()
    assert np.linalg.norm(found / factor - truth) < 0.1 * np.linalg.norm(truth)


def test_lenses_of_the_organism_beat_the_logit_lens_on_texts_they_were_not_fitted_on() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("organism/checkpoint", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("organism/checkpoint")
    texts = [ids for ids, _ in itertools.islice(organism_texts(tokenizer, "probe_train"), 96)]
    held_out = [ids for ids, _ in itertools.islice(organism_texts(tokenizer, "demo"), 24)]
    tuned = fit_tuned_lens(
        model, texts, held_out=held_out, layers=[1, 3], steps=40, batch=8, lr=3e-3
    )
    for quality in tuned.card.quality:
        assert quality.kl < 0.8 * quality.logit_kl, quality
        assert quality.agreement > quality.logit_agreement
    for again, once in zip(evaluate_lens(model, tuned, held_out), tuned.card.quality, strict=True):
        assert again.model_dump() == pytest.approx(once.model_dump(), rel=1e-4)


def organism_texts(tokenizer: Any, split: str) -> Any:
    """Token ids and condition of the prompts of a split."""
    for line in Path(f"organism/data/{split}.jsonl").read_text().splitlines():
        row = json.loads(line)
        text = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True
        )
        yield tokenizer(text, add_special_tokens=False)["input_ids"], row["condition"]


@pytest.mark.parametrize("fit", [fit_tuned_lens, fit_jacobian_lens])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": [2]}, "the last layer needs no translation"),
        ({"layers": []}, "names at least one"),
        ({"prompts": []}, "give at least one"),
        ({"prompts": [[1, VOCAB]]}, r"prompts\[0\]: ids 1 to 60; there are 60"),
        ({"held_out": [[]]}, "none empty"),
        ({"held_out": [[1] * 20]}, "1 of 1 are also among the prompts"),
        ({"skip_first": 20}, "skip_first=20"),
    ],
)
def test_what_cannot_be_fitted_is_refused(fit: Any, change: Any, words: str) -> None:
    values = {"prompts": [[1] * 20], "held_out": [[2] * 20]} | change
    with pytest.raises(SpecError, match=words):
        fit(tiny(), values.pop("prompts"), **values)


def test_a_model_that_does_more_behind_its_norm_is_refused() -> None:
    model = tiny()
    plain = model.forward

    def forward(**options: Any) -> Any:
        found = plain(**options)
        found.logits = found.logits * 3
        return found

    model.forward = forward
    with pytest.raises(SpecError, match="makes other logits"):
        fit_tuned_lens(model, [[1, 2]], held_out=[[3, 4]])


def test_a_lens_of_another_model_is_not_judged() -> None:
    card = LensCard(name="m/l", kind="jacobian", n_layers=3, layers=(0,), hidden=4)
    with pytest.raises(SpecError, match="of width 4"):
        evaluate_lens(tiny(), Lens(matrix=np.eye(4)[None], card=card), [[1, 2]])
