"""Autoencoders: their latents and reconstructions against torch, and edits of latents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.reading import LatentReader
from inspect_lens.sae import SparseAutoencoder, SparseEncoder, read_autoencoder, read_sae
from inspect_lens.spec import Add, run_program
from inspect_lens.train import SAEFeatureProbe
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
    if "finetuned" in kind:
        facts["finetuning_scaling_factor"] = True
        sae.factor = torch.linspace(0.5, 2.0, N)
    return sae, write_saelens(folder, sae, **facts), None if scale == 1.0 else scale


KINDS = ("standard b_dec", "standard scaled b_dec", "standard finetuned", "jumprelu",
         "topk b_dec", "topk rescaled", "gemma 1", "gemma 2")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_reconstructions_are_those_of_the_definition(kind: str, tmp_path: Path) -> None:
    sae, path, scale = saved(kind, tmp_path)
    made = read_autoencoder(path, norm_scale=scale)
    rows = torch.from_numpy(ROWS)
    latents = sae(rows)
    np.testing.assert_allclose(made.activations(ROWS), latents.numpy(), atol=2e-4)
    np.testing.assert_allclose(made.reconstruct(ROWS), sae.decode(latents).numpy(), atol=3e-3)
    some = made.activations(ROWS, [17, 3], smallest=made.top_k_limit(ROWS))
    np.testing.assert_allclose(some, latents[:, [17, 3]].numpy(), atol=2e-4)
    encoder = read_sae(path, norm_scale=scale)
    assert not isinstance(encoder, SparseAutoencoder)
    assert encoder.sha256 == made.sha256


@pytest.mark.parametrize(
    "kind", ["jumprelu", "standard scaled b_dec", "standard finetuned", "gemma 2"]
)
@pytest.mark.parametrize("only_if_active", [False, True])
def test_an_edit_moves_the_stream_by_the_latents_own_row(
    kind: str, only_if_active: bool, tmp_path: Path
) -> None:
    """What the autoencoder says afterwards with the latent at the value, and the same error."""
    sae, path, scale = saved(kind, tmp_path)
    made = read_autoencoder(path, norm_scale=scale)
    edit = made.latents({17: 8.0}, only_if_active=only_if_active, layers=[4], site="resid_post")
    assert edit.layers == (4,)
    latents = sae(torch.from_numpy(ROWS))
    clamped = latents.clone()
    touched = (latents[:, 17] > 0) if only_if_active else torch.ones(len(ROWS), dtype=torch.bool)
    assert 0 < (latents[:, 17] > 0).sum() < len(ROWS)
    clamped[touched, 17] = 8.0
    moved = (sae.decode(clamped) - sae.decode(latents)).numpy()
    for row, step in zip(ROWS, moved, strict=True):
        np.testing.assert_allclose(run_program(row, edit.program(0)) - row, step, atol=2e-3)


@pytest.mark.parametrize("kind", ["jumprelu", "gemma 2"])
def test_a_gate_opens_where_the_latent_is_active_enough(kind: str, tmp_path: Path) -> None:
    sae, path, scale = saved(kind, tmp_path)
    found = sae(torch.from_numpy(ROWS))[:, 17].numpy()
    least = float(np.median(found[found > 0]))
    gate = read_autoencoder(path, norm_scale=scale).gate(
        17, threshold=least, layer=4, site="resid_post"
    )
    write = np.eye(ROWS.shape[1], dtype=np.float32)[0]
    edit = Add(vector=write, layers=[4], when=gate)
    gated = [replace(one, gate=0) for one in edit.program(0)]
    moved = [run_program(row, [gate.instruction(0), *gated])[0] - row[0] for row in ROWS]
    assert 0 < sum(found > least) < sum(found > 0)
    np.testing.assert_allclose(moved, found > least, atol=1e-5)


def test_several_latents_are_set_and_some_are_a_reconstruction(tmp_path: Path) -> None:
    sae, path, scale = saved("jumprelu", tmp_path)
    made = read_autoencoder(path, norm_scale=scale)
    kept = [17, 3, 5]
    latents = sae(torch.from_numpy(ROWS))
    clamped, only = latents.clone(), torch.zeros_like(latents)
    clamped[:, 17], clamped[:, 3] = 8.0, 0.0
    only[:, kept] = latents[:, kept]
    moved = (sae.decode(clamped) - sae.decode(latents)).numpy()
    several, whole = (
        made.latents({17: 8.0, 3: 0.0}, layers=[4], site="resid_post"),
        made.reconstruction(kept),
    )
    assert (several.layers, whole.layers, whole.site) == ((4,), (9,), "resid_post")
    for row, step, decoded in zip(ROWS, moved, sae.decode(only).numpy(), strict=True):
        np.testing.assert_allclose(run_program(row, several.program(0)) - row, step, atol=2e-3)
        np.testing.assert_allclose(run_program(row, whole.program(0)), decoded, atol=2e-3)
    with pytest.raises(SpecError, match="allowed are 0 to"):
        made.reconstruction([10**6])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda sae: sae.latents([3]), r"values=\[3\]; allowed is a number for each latent"),
        (lambda sae: sae.latents({3: "high"}), r"values\[3\]='high'; allowed is a number"),
        (lambda sae: sae.latents({}), "latents: none; name at least one"),
        (lambda sae: sae.latents({3: 1.0}, layers=[]), r"layers=\[\]; allowed is a list"),
        (lambda sae: sae.reconstruction([]), "latents: none; name at least one"),
        (lambda sae: sae.splice("s", [3]), r"latents=\[3\]; allowed is a number for each latent"),
        (lambda sae: LatentReader.of(sae, 1.5), "latents=1.5; allowed is an integer"),
    ],
)
def test_what_is_asked_of_latents_is_judged(ask: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"^{said}"):
        ask(read_autoencoder(saved("jumprelu", tmp_path)[1]))


def test_a_layer_may_stand_alone(tmp_path: Path) -> None:
    made = read_autoencoder(saved("jumprelu", tmp_path)[1])
    assert made.latents({3: 1.0}, layers=4, site="resid_post").layers == (4,)


def test_a_top_k_edit_needs_a_threshold(tmp_path: Path) -> None:
    made = read_autoencoder(saved("topk b_dec", tmp_path)[1])
    with pytest.raises(SpecError, match=r"^threshold: .* among the 5 largest"):
        made.latents({3: 1.0})
    with pytest.raises(SpecError, match=r"^active_above: .* among the 5 largest"):
        made.gate(3, threshold=1.0)
    edit = made.latents({3: 1.0}, mode="add", threshold=2.5)
    assert edit.threshold is not None
    assert edit.threshold.to_float32() == [2.5]
    assert (edit.layers, edit.site) == ((9,), "resid_post")


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("blocks.9.hook_resid_post", (9, "resid_post")),
        ("blocks.9.hook_resid_pre", (8, "resid_post")),
        ("blocks.0.hook_resid_pre", (0, "resid_pre")),
        ("blocks.9.hook_resid_mid", (9, "resid_mid")),
        ("model.layers.12.output", (12, "resid_post")),
        ("blocks.9.hook_mlp_out", (9, "mlp_out")),
        ("blocks.9.hook_attn_out", (9, "attn_out")),
        ("blocks.9.attn.hook_z", (9, "z")),
        ("blocks.9.mlp.hook_post", (9, "mlp_hidden")),
        ("model.layers.4.mlp", (4, "mlp_out")),
        ("model.layers.4", (4, "resid_post")),
        ("model.layers.4.input", (3, "resid_post")),
        ("transformer.h.4.attn", None),
        ("blocks.9.ln2.hook_normalized", None),
        ("blocks.9.hook_mlp_out behind its norm in gemma-2-2b", None),
        ("", None),
    ],
)
def test_a_hook_names_our_layer(hook: str, place: tuple[int, str] | None) -> None:
    weight = np.eye(3, dtype=np.float32)
    encoder = SparseEncoder(weight=weight, bias=np.zeros(3, np.float32), hook=hook)
    assert encoder.place == place
    assert encoder.settle(5, "mlp_out") == (5, "mlp_out")
    if place is None and not hook:
        assert encoder.settle(5) == (5, "resid_post")
    elif place is None:
        with pytest.raises(SpecError, match="pass site= and layer="):
            encoder.settle(5)
    else:
        own = int(hook.split(".layers." if "layers" in hook else "blocks.")[1].split(".")[0])
        assert encoder.settle() == encoder.settle(place[0]) == encoder.settle(own) == place
        with pytest.raises(SpecError, match="leave layer= out"):
            encoder.settle(5)
    if place is None:
        with pytest.raises(SpecError, match="pass "):
            encoder.settle()


@pytest.mark.parametrize(
    ("hook", "layer", "site"),
    [("blocks.9.hook_resid_pre", 8, "resid_post"), ("blocks.9.hook_mlp_out", 9, "mlp_out"),
     ("model.layers.9.self_attn", 9, "attn_out")],
)  # fmt: skip
def test_layer_and_site_of_a_file_hold_in_readers_and_edits(
    hook: str, layer: int, site: str, tmp_path: Path
) -> None:
    sae = Definition("jumprelu", subtract=False)
    path = write_saelens(tmp_path, sae, metadata={"hook_name": hook})
    reader = LatentReader.of(path, [3], layer=9, source="captured")
    assert (reader.layer, reader.site) == (layer, site)
    made = read_autoencoder(path)
    for edit in (
        made.latents({3: 1.0}, layers=[9]),
        made.latents({3: 1.0}),
        made.reconstruction([3]),
    ):
        assert (edit.layers, edit.site) == ((layer,), site)
    over = LatentReader.of(path, [3], layer=4, site="resid_mid", source="captured")
    assert (over.layer, over.site) == (4, "resid_mid")
    if "resid" not in hook:
        with pytest.raises(ArtifactError, match="of the residual stream"):
            SAEFeatureProbe.from_sae(path)


def test_what_is_not_served_is_refused_and_not_read_elsewhere(tmp_path: Path) -> None:
    sae = Definition("jumprelu", subtract=False)
    for facts in (
        {"metadata": {"hook_name": "blocks.4.ln2.hook_normalized"}},
        {"metadata": {"hook_name": "blocks.4.hook_mlp_out", "model_name": "gemma-2-2b"}},
    ):
        path = write_saelens(tmp_path, sae, **facts)
        with pytest.raises(SpecError, match="is not served"):
            LatentReader.of(path, [3], layer=4)
        with pytest.raises(SpecError, match="is not served"):
            read_autoencoder(path).latents({3: 1.0}, layers=[4])
    folder = tmp_path / "models--google--gemma-scope-2b-pt-mlp" / "layer_4"
    folder.mkdir(parents=True)
    with pytest.raises(SpecError, match="gemma-scope-2b-pt-mlp"):
        LatentReader.of(write_gemma_1(folder, sae), [3], layer=4)
    facts = {"architecture": "jump_relu", "hf_hook_point_in": "model.layers.4.mlp.input",
             "hf_hook_point_out": "model.layers.4.mlp.output"}  # fmt: skip
    transcoder = write_gemma_2(folder, sae)
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "params.npz").unlink()
    with pytest.raises(ArtifactError, match="write where they read"):
        read_autoencoder(transcoder)


@pytest.mark.parametrize("asked", [True, False])
def test_finetuning_factors_are_applied_or_refused(asked: bool, tmp_path: Path) -> None:
    sae = Definition("standard", subtract=False)
    if not asked:
        sae.factor = torch.linspace(0.5, 2.0, N)
    path = write_saelens(tmp_path, sae, finetuning_scaling_factor=asked)
    with pytest.raises(ArtifactError, match="finetuning_scaling_factor"):
        read_autoencoder(path)
    read_sae(path)  # the encoder does without
    sae.factor = torch.ones(N)
    assert read_autoencoder(write_saelens(tmp_path, sae)).decoder.shape == (N, H)


def test_wrong_rows_latents_and_files_are_refused(tmp_path: Path) -> None:
    path = saved("jumprelu", tmp_path)[1]
    made = read_sae(path)
    with pytest.raises(SpecError, match=rf"allowed is \(rows, {H}\)"):
        made.activations(ROWS[:, :-1])
    with pytest.raises(SpecError, match="NaN"):
        made.activations(np.full((1, H), np.nan))
    with pytest.raises(SpecError, match=f"0 to {N - 1}"):
        made.activations(ROWS, [N])
    with pytest.raises(SpecError, match=r"latents=\[0.5\]; allowed are whole numbers, or a mask"):
        made.activations(ROWS, [0.5])
    with pytest.raises(SpecError, match=f"a mask of 2; allowed is one of {N}"):
        made.activations(ROWS, [True, False])
    mask = np.isin(np.arange(N), [1, 4])
    np.testing.assert_array_equal(made.activations(ROWS, mask), made.activations(ROWS, [1, 4]))
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
