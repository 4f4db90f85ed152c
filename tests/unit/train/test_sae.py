"""SAE probes, and the files of encoders against their definition in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inspect_lens.errors import ArtifactError
from inspect_lens.probe import ProbeCard, load_probe
from inspect_lens.train import (
    SAEFeatureProbe,
    SparseEncoder,
    make_estimator,
    read_sae,
)
from inspect_lens.train.families._sae import l1_settings
from tests.kit.autoencoders import Definition, H, N, write_gemma_1, write_gemma_2, write_saelens

CARD = ProbeCard(name="m/sae", layers=(9,), hidden=H)


def rows(sae: Definition, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose positives have more of feature 17."""
    y = np.arange(n) % 2
    feature = sae.w_enc[:, 17].numpy()
    x = np.random.default_rng(0).normal(size=(n, H)).astype(np.float32)
    return x + np.outer(y, feature / np.linalg.norm(feature) * 3).astype(np.float32), y


def saved(kind: str, folder: Path) -> tuple[Definition, SparseEncoder]:
    if kind.startswith("gemma"):
        sae = Definition("jumprelu", subtract=False)
        write = write_gemma_1 if kind == "gemma 1" else write_gemma_2
        return sae, read_sae(write(folder, sae))
    sae = Definition(kind.split()[0], subtract="b_dec" in kind)
    return sae, read_sae(write_saelens(folder, sae))


KINDS = ("standard", "standard b_dec", "jumprelu", "jumprelu b_dec", "topk b_dec", "gemma 1",
         "gemma 2")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_the_definition(kind: str, tmp_path: Path) -> None:
    sae, encoder = saved(kind, tmp_path)
    x, y = rows(sae)
    features = sae(torch.from_numpy(x)).numpy()
    assert 0 < (features > 0).mean() < 0.9
    fitted = SAEFeatureProbe(encoder=encoder, k=8).fit(x, y)
    # A probe on the definition's own features, which are columns then.
    expected = SAEFeatureProbe(k=8).fit(features, y)
    assert fitted.features_[0] == 17
    assert fitted.features_.tolist() == expected.features_.tolist()
    np.testing.assert_allclose(
        fitted.decision_function(x), expected.decision_function(features), atol=2e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_scores_as_the_estimator_also_from_disk(kind: str, tmp_path: Path) -> None:
    sae, encoder = saved(kind, tmp_path)
    x, y = rows(sae)
    for raw in (False, True):
        fitted = SAEFeatureProbe(encoder=encoder, k=8, raw=raw).fit(x, y)
        probe = load_probe(fitted.to_probe(CARD).save(tmp_path / f"probe-{raw}"))
        np.testing.assert_allclose(
            probe.score_tokens(x), fitted.decision_function(x), rtol=1e-3, atol=1e-3
        )


def test_hooks_and_older_configurations(tmp_path: Path) -> None:
    sae = Definition("topk", subtract=True, k=3)
    made = read_sae(write_saelens(tmp_path, sae))
    assert (made.top_k, made.hook) == (3, "blocks.9.hook_resid_post")
    old = {
        "architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 4},
        "hook_name": "blocks.2.hook_resid_pre", "metadata": None, "k": None,
    }  # fmt: skip
    made = read_sae(write_saelens(tmp_path, sae, **old))
    assert (made.top_k, made.hook) == (4, "blocks.2.hook_resid_pre")
    assert made.threshold is None
    (tmp_path / "two").mkdir()
    second = read_sae(write_gemma_2(tmp_path / "two", Definition("jumprelu", subtract=False)))
    assert second.hook == "model.layers.9.output"


def test_features_are_multiplied_by_the_norm_of_their_decoder_row(tmp_path: Path) -> None:
    sae = Definition("topk", subtract=False)
    made = read_sae(write_saelens(tmp_path, sae, rescale_acts_by_decoder_norm=True))
    norms = sae.w_dec.norm(dim=1).numpy()
    np.testing.assert_allclose(made.weight, sae.w_enc.T.numpy() * norms[:, None], rtol=1e-5)
    np.testing.assert_allclose(made.bias, sae.b_enc.numpy() * norms, rtol=1e-5)


def test_bfloat16_weights_are_widened(tmp_path: Path) -> None:
    sae = Definition("jumprelu", subtract=False)
    write_saelens(tmp_path, sae)
    save_file(sae.tensors(torch.bfloat16), tmp_path / "sae_weights.safetensors")
    made = read_sae(tmp_path)
    np.testing.assert_array_equal(made.weight, sae.w_enc.bfloat16().float().T.numpy())


def test_a_normalisation_is_folded_or_refused_and_never_passed_over(tmp_path: Path) -> None:
    sae = Definition("jumprelu", subtract=True, scale=0.2)
    average = {"normalize_activations": "expected_average_only_in"}
    write_saelens(tmp_path, sae, **average)
    with pytest.raises(ArtifactError, match="pass norm_scale="):
        read_sae(tmp_path)
    x, y = rows(sae)
    x *= 5.0
    made = make_estimator("sae", folder=str(tmp_path), norm_scale=0.2, k=6)
    features = sae(torch.from_numpy(x)).numpy()
    expected = SAEFeatureProbe(k=6).fit(features, y)
    fitted: Any = made.fit(x, y)
    np.testing.assert_allclose(
        fitted.decision_function(x), expected.decision_function(features), atol=2e-3
    )
    for norm in ("layer_norm", "constant_norm_rescale"):
        write_saelens(tmp_path, sae, normalize_activations=norm)
        with pytest.raises(ArtifactError, match="its own norm"):
            read_sae(tmp_path, norm_scale=0.2)
    write_saelens(tmp_path, sae)
    with pytest.raises(ArtifactError, match="normalises nothing"):
        read_sae(tmp_path, norm_scale=0.2)


def test_what_is_no_encoder_is_refused(tmp_path: Path) -> None:
    sae = Definition("jumprelu", subtract=False)
    with pytest.raises(ArtifactError, match="needed are cfg"):
        read_sae(tmp_path)
    for facts, match in (
        ({"architecture": "gated"}, "architecture 'gated'"),
        ({"architecture": "standard", "activation_fn_str": "tanh-relu"}, "tanh-relu"),
        ({"architecture": "topk"}, "without k"),
        ({"architecture": "topk", "k": N + 1}, "no larger k"),
        ({"hook_head_index": 3}, "one attention head"),
    ):
        with pytest.raises(ArtifactError, match=match):
            read_sae(write_saelens(tmp_path, sae, **facts))
    (tmp_path / "one").mkdir()
    np.savez(tmp_path / "one/params.npz", W_enc=np.zeros((3, 4)), b_enc=np.zeros(4))
    with pytest.raises(ArtifactError, match="threshold"):
        read_sae(tmp_path / "one")
    np.savez(
        tmp_path / "one/params.npz", W_enc=np.zeros((3, 4)), b_enc=np.zeros(3),
        threshold=np.zeros(4),
    )  # fmt: skip
    with pytest.raises(ArtifactError, match="one bias and one threshold"):
        read_sae(tmp_path / "one")
    with pytest.raises(ArtifactError, match="reads activations as they are"):
        read_sae(write_gemma_1(tmp_path / "one", sae), norm_scale=2.0)


def test_the_sae_probe_has_the_l1_penalty() -> None:
    """Its solution is where the gradient of the losses is within the penalty's subgradient."""
    y = np.repeat([0, 1], 300)
    x = np.random.default_rng(0).normal(size=(600, H)) + 5.0
    x[:, :4] += 0.8 * y[:, None]
    fitted = SAEFeatureProbe(k=H, C=0.02).fit(x, y)
    weight = fitted.coef_ * fitted.scale_
    z = np.maximum(x[:, fitted.features_], 0.0) / fitted.scale_
    pull = 0.02 * z.T @ (y - 1 / (1 + np.exp(-fitted.decision_function(x))))
    none = weight == 0
    assert 3 < none.sum() < H
    assert np.abs(pull[none]).max() <= 1.0 + 1e-2
    np.testing.assert_allclose(pull[~none], np.sign(weight[~none]), atol=1e-2)


def test_each_scikit_learn_is_asked_for_l1_in_its_own_words() -> None:
    old, new = {"penalty": "l1"}, {"l1_ratio": 1.0}
    for version, expected in {
        "1.6.1": old, "1.7.2": old, "1.8.0": new, "1.10.dev0": new, "2.0": new,
    }.items():  # fmt: skip
        assert l1_settings(version) == expected
