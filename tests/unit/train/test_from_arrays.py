"""Activations of other tools, and which layer their index means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens.errors import SpecError
from inspect_lens.train import (
    LogisticProbe,
    extract_vector,
    fit_on,
    from_arrays,
    from_hf,
    from_nnsight,
    from_transformer_lens,
)

CHECKPOINT = "organism/checkpoint"
LABELS = [0, 1, 1]


@pytest.fixture(scope="module")
def run() -> SimpleNamespace:
    """Three texts of unequal length through the organism, and each block's output by a hook."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    blocks: dict[int, torch.Tensor] = {}

    def keep(n: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            blocks[n] = output[0] if isinstance(output, tuple) else output

        return hook

    for n, block in enumerate(model.model.layers):
        block.register_forward_hook(keep(n))
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (3, 7), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0  # padded on the right
    mask[2, :2] = 0  # and on the left
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        states = output.hidden_states
        made = dict(blocks)
        generated = model.generate(
            ids[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False,
            output_hidden_states=True, return_dict_in_generate=True,
        )  # fmt: skip
        model(input_ids=generated.sequences[:, :-1])
    return SimpleNamespace(
        states=states, blocks=made, mask=mask, generated=generated, fed=dict(blocks)
    )


def test_layers_of_hugging_face_are_one_behind_their_index(run: SimpleNamespace) -> None:
    data = from_hf(run.states, LABELS, mask=run.mask)
    assert data.layers == tuple(range(len(run.blocks) - 1))
    for layer in data.layers:
        rows = [a[layer] for a in data.acts]
        block = run.blocks[layer].numpy()
        for i, kept in enumerate((slice(0, 7), slice(0, 4), slice(2, 7))):
            np.testing.assert_array_equal(rows[i], block[i, kept])


def test_the_last_entry_is_no_residual_stream_and_is_refused(run: SimpleNamespace) -> None:
    last = len(run.blocks) - 1
    assert not torch.allclose(run.states[-1], run.blocks[last], atol=1e-2), "behind the final norm"
    for wrong in (last, last + 1, -1):
        with pytest.raises(SpecError, match="final norm"):
            from_hf(run.states, LABELS, mask=run.mask, layers=[wrong])
    with pytest.raises(SpecError, match="whole"):
        from_hf(run.states[:1], LABELS)


def test_steps_of_generate_are_tokens(run: SimpleNamespace) -> None:
    data = from_hf(run.generated.hidden_states, [1], layers=[1, 3])
    for i, layer in enumerate((1, 3)):
        np.testing.assert_allclose(data.acts[0][i], run.fed[layer][0].numpy(), atol=2e-4)


def test_caches_of_other_tools_name_the_same_layers(run: SimpleNamespace) -> None:
    expected = from_hf(run.states, LABELS, mask=run.mask, layers=[1, 4])
    saved = {4: SimpleNamespace(value=run.blocks[4]), 1: (run.blocks[1], None)}
    cache = {
        "blocks.1.hook_resid_post": run.blocks[1], "blocks.5.hook_resid_pre": run.blocks[4],
        "blocks.0.hook_resid_pre": run.states[0], "blocks.1.mlp.hook_post": run.blocks[0],
        "hook_embed": run.states[0],
    }  # fmt: skip
    for made in (
        from_nnsight(saved, LABELS, mask=run.mask),
        from_transformer_lens(cache, LABELS, mask=run.mask),
        from_transformer_lens(SimpleNamespace(cache_dict=cache), LABELS, mask=run.mask),
    ):
        assert made.layers == (1, 4)
        for ours, theirs in zip(made.acts, expected.acts, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(SpecError, match=r"output of blocks \[1, 4\]"):
        from_transformer_lens(cache, LABELS, layers=[2])


@pytest.mark.parametrize("kind", ["numpy", "bfloat16", "list", "needs grad"])
def test_pooled_rows_of_any_kind(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(6, 2, 8)).astype(np.float32)
    tensor = torch.from_numpy(x.copy())
    given: Any = {
        "numpy": x, "bfloat16": tensor.bfloat16(), "list": list(x.astype(np.float64)),
        "needs grad": tensor.requires_grad_(),
    }[kind]  # fmt: skip
    data = from_arrays(given, [0, 1] * 3, layers=[3, 9], model="m", ids=list("abcdef"))
    expected = tensor.detach().bfloat16().float().numpy() if kind == "bfloat16" else x
    np.testing.assert_array_equal(np.stack([a[:, 0] for a in data.acts]), expected)
    assert data.ids == tuple("abcdef")
    assert data.subset(data.labels).ids == data.subset([1, 3, -1]).ids == ("b", "d", "f")
    with pytest.raises(SpecError, match=r"index: \[6\]; allowed are -6 to 5"):
        data.subset([6])
    assert fit_on(LogisticProbe(), data, 9)


def test_holes_of_a_mask_stay_and_padding_goes() -> None:
    x = np.arange(2 * 1 * 5 * 3, dtype=np.float32).reshape(2, 1, 5, 3)
    data = from_arrays(x, [0, 1], layers=[0], mask=[[0, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
    assert [a.shape[1] for a in data.acts] == [3, 5]
    np.testing.assert_array_equal(data.sequences(0)[0], x[0, 0, [1, 3]])


def test_sets_without_ids_share_what_they_share() -> None:
    x = np.random.default_rng(0).normal(size=(160, 1, 8)) + np.arange(160)[:, None, None] % 2
    made = [from_arrays(part, [0, 1] * 40, layers=[3], name=name, model="m")
            for part, name in ((x[:80], "one"), (x[80:], "two"), (x[78:158], "three"))]  # fmt: skip
    assert extract_vector(made[0], name="m/v", selection=made[1]).card.separation
    with pytest.raises(SpecError, match=r"activations: 2 of 80 samples of 'three' are also in 'on"):
        extract_vector(made[0], name="m/v", selection=made[2])


def test_wrong_shapes_are_refused() -> None:
    x = np.zeros((4, 2, 8), dtype=np.float32)
    for acts, more, match in (
        (x[0], {}, "add the axis"),
        (x, {"layers": [1]}, "put the layers on the first axis"),
        (x, {"mask": np.ones((3, 1))}, "mask: shape"),
        (x, {"mask": np.ones((4, 2))}, "one value for each"),
        (x, {"mask": np.zeros((4, 1))}, "one of them 1"),
        (x * np.nan, {}, "NaN"),
    ):
        with pytest.raises(SpecError, match=match):
            from_arrays(acts, [0, 1, 0, 1], **{"layers": [1, 2], **more})
    with pytest.raises(SpecError, match="one shape"):
        from_nnsight({0: x, 1: x[:2]}, [0, 1])
