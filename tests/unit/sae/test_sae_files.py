"""Autoencoders: their latents and reconstructions against torch, and edits of latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.sae import SparseAutoencoder, SparseEncoder, read_autoencoder, read_sae
from inspect_lens.spec import run_program
from tests.kit.autoencoders import Definition, H, N, write_gemma_1, write_gemma_2, write_saelens

ROWS = np.random.default_rng(0).normal(size=(50, H)).astype(np.float32) * 3


def saved(kind: str, folder: Path) -> tuple[Definition, Path, float | None]:
    if kind.startswith("gemma"):
        sae = Definition("jumprelu", subtract=False)
        write = write_gemma_1 if kind == "gemma 1" else write_gemma_2
        return sae, write(folder, sae), None
    scale = 0.3 if "scaled" in kind else 1.0
    sae = Definition(kind.split()[0], subtract="b_dec" in kind, scale=scale)
    facts: dict[str, Any] = {}
    if scale != 1.0:
        facts["normalize_activations"] = "expected_average_only_in"
    if "rescaled" in kind:
        sae.rescaled = facts["rescale_acts_by_decoder_norm"] = True
    return sae, write_saelens(folder, sae, **facts), None if scale == 1.0 else scale


KINDS = ("standard b_dec", "standard scaled b_dec", "jumprelu", "topk b_dec", "topk rescaled",
         "gemma 1", "gemma 2")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_reconstructions_are_those_of_the_definition(kind: str, tmp_path: Path) -> None:
    sae, path, scale = saved(kind, tmp_path)
    made = read_autoencoder(path, norm_scale=scale)
    rows = torch.from_numpy(ROWS)
    latents = sae(rows)
    np.testing.assert_allclose(made.activations(ROWS), latents.numpy(), atol=2e-4)
    np.testing.assert_allclose(made.reconstruct(ROWS), sae.decode(latents).numpy(), atol=3e-3)
    some = made.activations(ROWS, [17, 3], cut=made.cut(ROWS))
    np.testing.assert_allclose(some, latents[:, [17, 3]].numpy(), atol=2e-4)
    encoder = read_sae(path, norm_scale=scale)
    assert not isinstance(encoder, SparseAutoencoder)
    assert encoder.sha256 == made.sha256


@pytest.mark.parametrize("kind", ["jumprelu", "standard scaled b_dec", "gemma 2"])
@pytest.mark.parametrize("only_if_active", [False, True])
def test_an_edit_moves_the_stream_by_the_latents_own_row(
    kind: str, only_if_active: bool, tmp_path: Path
) -> None:
    """What the autoencoder says afterwards with the latent at the value, and the same error."""
    sae, path, scale = saved(kind, tmp_path)
    made = read_autoencoder(path, norm_scale=scale)
    edit = made.latent(17, 8.0, only_if_active=only_if_active, layers=[4])
    assert edit.layers == (4,)
    latents = sae(torch.from_numpy(ROWS))
    clamped = latents.clone()
    touched = (latents[:, 17] > 0) if only_if_active else torch.ones(len(ROWS), dtype=torch.bool)
    assert 0 < (latents[:, 17] > 0).sum() < len(ROWS)
    clamped[touched, 17] = 8.0
    moved = (sae.decode(clamped) - sae.decode(latents)).numpy()
    for row, step in zip(ROWS, moved, strict=True):
        np.testing.assert_allclose(run_program(row, edit.program(0)) - row, step, atol=2e-3)


def test_several_latents_are_set_and_some_are_a_reconstruction(tmp_path: Path) -> None:
    sae, path, scale = saved("jumprelu", tmp_path)
    made = read_autoencoder(path, norm_scale=scale)
    kept = [17, 3, 5]
    latents = sae(torch.from_numpy(ROWS))
    clamped, only = latents.clone(), torch.zeros_like(latents)
    clamped[:, 17], clamped[:, 3] = 8.0, 0.0
    only[:, kept] = latents[:, kept]
    moved = (sae.decode(clamped) - sae.decode(latents)).numpy()
    several, whole = made.latents({17: 8.0, 3: 0.0}, layers=[4]), made.reconstruction(kept)
    assert (several.layers, whole.layers, whole.site) == ((4,), (9,), "resid_post")
    for row, step, decoded in zip(ROWS, moved, sae.decode(only).numpy(), strict=True):
        np.testing.assert_allclose(run_program(row, several.program(0)) - row, step, atol=2e-3)
        np.testing.assert_allclose(run_program(row, whole.program(0)), decoded, atol=2e-3)
    with pytest.raises(SpecError, match="this sparse autoencoder has 0 to"):
        made.reconstruction([10**6])


def test_a_top_k_edit_needs_a_threshold(tmp_path: Path) -> None:
    made = read_autoencoder(saved("topk b_dec", tmp_path)[1])
    with pytest.raises(SpecError, match="among the 5 largest"):
        made.latent(3, 1.0)
    edit = made.latent(3, 1.0, mode="add", threshold=2.5)
    assert (edit.threshold, edit.layers, edit.site) == (2.5, (9,), "resid_post")


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("blocks.9.hook_resid_post", (9, "resid_post")),
        ("blocks.9.hook_resid_pre", (8, "resid_post")),
        ("blocks.0.hook_resid_pre", (0, "resid_pre")),
        ("blocks.9.hook_resid_mid", (9, "resid_mid")),
        ("model.layers.12.output", (12, "resid_post")),
        ("blocks.9.hook_mlp_out", None),
        ("", None),
    ],
)
def test_a_hook_names_our_layer(hook: str, place: tuple[int, str] | None) -> None:
    weight = np.eye(3, dtype=np.float32)
    encoder = SparseEncoder(weight=weight, bias=np.zeros(3, np.float32), hook=hook)
    assert encoder.place == place
    if place is None:
        with pytest.raises(SpecError, match="pass layer="):
            encoder.settle()
        assert encoder.settle(5) == (5, "resid_post")
    else:
        assert encoder.settle() == place
        assert encoder.settle(5, "mlp_out") == (5, "mlp_out")


def test_wrong_rows_latents_and_files_are_refused(tmp_path: Path) -> None:
    path = saved("jumprelu", tmp_path)[1]
    made = read_sae(path)
    with pytest.raises(SpecError, match=rf"allowed is \(rows, {H}\)"):
        made.activations(ROWS[:, :-1])
    with pytest.raises(SpecError, match="NaN"):
        made.activations(np.full((1, H), np.nan))
    with pytest.raises(SpecError, match=f"0 to {N - 1}"):
        made.activations(ROWS, [N])
    file = tmp_path / "sae_weights.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "W_dec"}, file)
    assert read_sae(path).sha256 == made.sha256
    with pytest.raises(ArtifactError, match="W_dec"):
        read_autoencoder(path)
    save_file(tensors | {"W_dec": tensors["W_dec"][:-1].contiguous()}, file)
    with pytest.raises(ArtifactError, match="decoder"):
        read_autoencoder(path)
    (tmp_path / "two").mkdir()
    topk = Definition("topk", subtract=False)
    other = read_sae(write_saelens(tmp_path / "two", topk, k=7))
    assert other.sha256 != read_sae(write_saelens(tmp_path / "two", topk, k=8)).sha256
