"""Every site of a block against a Hugging Face hook on the same module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens.attention import QueriesKeys
from inspect_lens.spec import BLOCK_SITES, EditBase, Scale, Zero, in_site_order, result_name
from tests.engine.conftest import HIDDEN, LAYERS, Engine, start, tokens
from tests.engine.test_cached_rows import captured
from tests.engine.test_capture import TOLERANCE, fed
from tests.kit.inner_edits import Case, edited_stream, head_cases
from tests.kit.reference import HuggingFace, max_relative_error

pytestmark = pytest.mark.engine


INNER = ("q", "k", "v", "z", "resid_mid", "mlp_hidden")
"""Sites of a model without experts that are not served by `all`."""
SERVED = in_site_order([*BLOCK_SITES, *INNER])


@pytest.fixture(scope="module")
def sited(tiny_folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_SITES", ",".join(SERVED))
        # Compiled, all sites are served by the server of the suite.
        made = start(tiny_folder, enforce_eager=True)
    yield made
    made.close()


def capture(*sites: str, **more: Any) -> dict[str, Any]:
    return {"inspect_lens": {"capture": {"site": list(sites), **more.pop("capture", {})}, **more}}


def check(output: Any, expected: dict[str, torch.Tensor], layers: list[int] | None = None) -> None:
    for site, rows in output.activations.items():
        name = "resid_post" if site == "residual_stream" else site
        wanted = expected[name] if layers is None else expected[name][layers]
        assert rows.shape == wanted.shape
        assert max_relative_error(rows, wanted) <= TOLERANCE, site


def test_all_sites_at_once_equal_hugging_face(sited: Engine, hugging_face: HuggingFace) -> None:
    outputs = sited.run([tokens(n, seed=n) for n in (5, 100)], capture(*BLOCK_SITES))
    for output in outputs:
        assert list(output.activations) == [result_name(site) for site in BLOCK_SITES]
        check(output, hugging_face.sites(fed(output)))
    receipt = outputs[1].inspect_lens.capture
    assert receipt.site == BLOCK_SITES
    # The stream before a block is the stream after the one below: one tap serves both.
    assert receipt.rows == (3 * LAYERS + 1) * (100 + 8 - 1)


def test_taps_stay_where_weights_are_loaded_again(sited: Engine, hugging_face: HuggingFace) -> None:
    for _ in range(2):
        sited.llm.collective_rpc("reload_weights")
        sited.llm.reset_prefix_cache()
        output = sited.run([tokens(70)], capture(*BLOCK_SITES))[0]
        check(output, hugging_face.sites(fed(output)))


@pytest.mark.parametrize("site", BLOCK_SITES)
def test_one_site_of_chosen_layers(sited: Engine, hugging_face: HuggingFace, site: str) -> None:
    request = capture(site, capture={"layers": [0, 2], "positions": "last_prompt"})
    output = sited.run([tokens(70)], request)[0]
    assert list(output.activations) == [result_name(site)]  # type: ignore[arg-type]
    expected = {k: v[:, 69:70] for k, v in hugging_face.sites(fed(output)).items()}
    check(output, expected, [0, 2])
    assert output.inspect_lens.capture.site == site
    assert output.inspect_lens.capture.layers == (0, 2)


@pytest.mark.parametrize("norm_match", [False, True])
@pytest.mark.parametrize(
    ("site", "layer"), [("resid_pre", 0), ("resid_pre", 2), ("attn_out", 1), ("mlp_out", 1)]
)
def test_steering_at_a_site_is_what_hugging_face_would_do(
    sited: Engine, hugging_face: HuggingFace, site: Any, layer: int, norm_match: bool
) -> None:
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(layer))
    scale = 0.8 if norm_match else 2.0
    vector = SteeringVector(
        activations=v, layer_indices=[layer], scale=scale, norm_match=norm_match, site=site
    )
    request = capture(*BLOCK_SITES, edits=[vector.model_dump(mode="json")])
    output = sited.run([tokens(90)], request, max_tokens=12)[0]

    def edit(h: torch.Tensor) -> torch.Tensor:
        unit = v[0] / v[0].norm() * h.norm(dim=-1, keepdim=True) if norm_match else v[0]
        return h + scale * unit

    expected = hugging_face.sites(fed(output), {(site, layer): edit})
    if site == "resid_pre" and layer > 0:
        # One tap serves the stream between two blocks, so both its names show the edit.
        expected["resid_post"][layer - 1] = expected["resid_pre"][layer]
    check(output, expected)
    assert output.inspect_lens.steer.sites == (site,)
    assert output.inspect_lens.steer.layers == (layer,)
    assert output.inspect_lens.steer.n_tokens == 90 + 12 - 1


def test_the_site_is_part_of_the_cache_salt(sited: Engine) -> None:
    prompt = tokens(128, seed=33)
    v = torch.ones(1, HIDDEN)

    def run(site: Any, layer: int) -> int:
        vector = SteeringVector(activations=v, layer_indices=[layer], site=site)
        request = {"inspect_lens": {"edits": [vector.model_dump(mode="json")]}}
        return int(sited.run([prompt], request)[0].num_cached_tokens)

    assert run("attn_out", 1) == 0
    assert run("mlp_out", 1) == 0
    assert run("attn_out", 1) > 0
    # The same place by its other name.
    assert run("resid_post", 1) == 0
    assert run("resid_pre", 2) > 0


def test_a_site_without_taps_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"attn_out.*resid_pre, resid_post \(INSPECT_LENS_SITES"):
        engine.run([tokens(5)], capture("attn_out"))
    vector = SteeringVector(activations=torch.ones(1, HIDDEN), layer_indices=[0], site="mlp_out")
    with pytest.raises(ValueError, match=r"mlp_out.*INSPECT_LENS_SITES"):
        engine.run([tokens(5)], {"inspect_lens": {"edits": [vector.model_dump(mode="json")]}})
    assert engine.run([tokens(5)])[0].outputs[0].token_ids


def test_the_stream_before_the_blocks_is_served_by_default(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    output = engine.run([tokens(40)], capture("resid_pre", "resid_post"))[0]
    check(output, hugging_face.sites(fed(output)))


def test_sites_inside_of_the_modules_equal_hugging_face(
    sited: Engine, hugging_face: HuggingFace
) -> None:
    # A batch; the longest prompt is fed in chunks, and of its twin the head comes out of the cache.
    prompts = [tokens(n, seed=n) for n in (5, 100, 150)]
    sited.run(prompts[2:])
    outputs = sited.run([*prompts, prompts[2][:140]], capture(*INNER))
    for output in outputs:
        assert list(output.activations) == list(in_site_order(INNER))
        expected = hugging_face.inner_sites(fed(output))
        assert expected["mlp_hidden"].shape[-1] == 2 * HIDDEN
        assert expected["k"].shape[-1] == HIDDEN // 2
        check(output, expected)
    assert outputs[1].inspect_lens.capture.rows == len(INNER) * LAYERS * (100 + 8 - 1)


@pytest.mark.parametrize("site", INNER)
def test_chosen_rows_of_a_site_inside(sited: Engine, hugging_face: HuggingFace, site: str) -> None:
    request = capture(site, capture={"layers": [0, 2], "positions": [3, 69, 71]})
    output = sited.run([tokens(70)], request)[0]
    expected = {k: v[:, [3, 69, 71]] for k, v in hugging_face.inner_sites(fed(output)).items()}
    assert list(output.activations) == [site]
    check(output, expected, [0, 2])
    assert output.inspect_lens.capture.site == site


@pytest.mark.parametrize("reduce", ["mean", "max", "last", "norm"])
def test_reductions_of_wide_and_of_narrow_rows(
    sited: Engine, hugging_face: HuggingFace, reduce: str
) -> None:
    request = capture("k", "mlp_hidden", "resid_post", capture={"reduce": reduce})
    output = sited.run([tokens(100)], request, max_tokens=12)[0]
    whole = hugging_face.inner_sites(fed(output))
    whole["resid_post"] = hugging_face.residual_stream(fed(output))
    reduced = {
        "mean": lambda rows: rows.mean(dim=1, keepdim=True),
        "max": lambda rows: rows.amax(dim=1, keepdim=True),
        "last": lambda rows: rows[:, -1:],
        "norm": lambda rows: rows.norm(dim=-1, keepdim=True),
    }[reduce]
    check(output, {site: reduced(rows) for site, rows in whole.items()})


def test_the_stream_between_the_modules_can_be_steered(
    sited: Engine, hugging_face: HuggingFace
) -> None:
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5))
    vector = SteeringVector(activations=v, layer_indices=[1], scale=2.0, site="resid_mid")
    request = capture("resid_mid", "resid_post", edits=[vector.model_dump(mode="json")])
    output = sited.run([tokens(90)], request, max_tokens=6)[0]
    # At one layer the stream is steered behind the attention; so is it if that returns more.
    edit = {("attn_out", 1): lambda h: h + 2.0 * v[0]}
    check(output, {
        "resid_post": hugging_face.sites(fed(output), edit)["resid_post"],
        "resid_mid": output.activations["resid_mid"],
    })  # fmt: skip
    plain = hugging_face.inner_sites(fed(output))["resid_mid"]
    moved = output.activations["resid_mid"][:2] - plain[:2]
    torch.testing.assert_close(moved[0], torch.zeros_like(moved[0]), rtol=0, atol=1e-4)
    torch.testing.assert_close(moved[1], (2.0 * v).expand_as(moved[1]), rtol=0, atol=1e-4)


def check_edits(
    engine: Engine, hugging_face: HuggingFace, cases: list[Case], prompt: list[int]
) -> None:
    """Run all cases in one batch, beside a request without edits, and compare the streams.

    The plain one is equal, to the bit, to what it is between requests that edit nothing.
    """
    plain = capture("resid_post", skip_reading_prefix_cache=True)
    asks = []
    for case in cases:
        edits = [case.edit.model_dump(mode="json")]
        asks.append(capture("resid_post", edits=edits, skip_reading_prefix_cache=True))
    prompts = [prompt, *[prompt] * len(cases)]
    outputs = engine.run(prompts, [plain, *asks])
    for case, output in zip(cases, outputs[1:], strict=True):
        expected = edited_stream(hugging_face, fed(output), case)
        check(output, {"resid_post": expected})
        unedited = hugging_face.residual_stream(fed(output))
        assert max_relative_error(unedited, expected) > 10 * TOLERANCE, "it is to change something"
    alone = engine.run(prompts, [plain, *[None] * len(cases)])[0]
    assert torch.equal(
        outputs[0].activations["residual_stream"], alone.activations["residual_stream"]
    )


def test_edits_of_heads_and_neurons_equal_hugging_face(
    sited: Engine, hugging_face: HuggingFace
) -> None:
    # Fed in chunks.
    check_edits(sited, hugging_face, head_cases(hugging_face.model), tokens(150, seed=8))


def test_edits_of_keys_and_values_fork_the_prefix_cache_by_their_heads(sited: Engine) -> None:
    prompt = tokens(128, seed=34)

    def cached(*edits: EditBase) -> int:
        asked = [edit.model_dump(mode="json") for edit in edits]
        return int(sited.run([prompt], {"inspect_lens": {"edits": asked}})[0].num_cached_tokens)

    sited.run([prompt])
    key = Scale(factor=2.0, layers=[1], site="k", heads=[0])
    for edit in (key, key.model_copy(update={"site": "v"}), Zero(layers=[1], site="z", heads=[0])):
        assert cached(edit) == 0
        assert cached(edit) >= 96
    assert cached(Zero(layers=[1], site="z", heads=[1])) == 0


def test_queries_and_keys_make_the_pattern_of_the_model(
    sited: Engine, hugging_face: HuggingFace
) -> None:
    asked = {"output_qk": True, "output_residual_stream": [1]}
    outputs = sited.run([tokens(100, seed=5), tokens(9)], asked, max_tokens=6)
    for output in outputs:
        found, n = output.activations, len(fed(output))
        assert found["qk_layers"] == list(range(LAYERS))
        assert found["attn_q"].shape == (LAYERS, n, HIDDEN // 64, 64)
        assert found["attn_k"].shape == (LAYERS, n, HIDDEN // 128, 64)
        assert output.inspect_lens.qk.n_positions == n
        rows = hugging_face.residual_stream(fed(output))[[1]]
        assert max_relative_error(found["residual_stream"], rows) <= TOLERANCE
        expected = hugging_face.attentions(fed(output))
        captured = QueriesKeys.of(found)
        for layer in captured.layers:
            pattern = torch.from_numpy(captured.patterns(layer))
            torch.testing.assert_close(pattern, expected[layer], rtol=0, atol=1e-4)
    # The same numbers as those of a capture of the sites.
    rows = sited.run([tokens(100, seed=5)], capture("q", "k"), max_tokens=6)[0].activations
    for name, site in (("attn_q", "q"), ("attn_k", "k")):
        again = outputs[0].activations[name].flatten(2)
        torch.testing.assert_close(rows[site], again, rtol=0, atol=1e-6)


@pytest.mark.parametrize("site", ["q", "k", "v", "z"])
@pytest.mark.parametrize("reduce", ["none", "mean"])
def test_chosen_heads_equal_hugging_face(
    sited: Engine, hugging_face: HuggingFace, site: str, reduce: str
) -> None:
    heads = [0] if site in ("k", "v") else [1, 0]
    asked = capture(site, capture={"layers": [0, 3], "heads": heads, "reduce": reduce})
    # Chunks; a block is kept when it comes the second time, and of one mean no rows are.
    for i, n in enumerate((150, 150, 140)):
        output = captured(sited, tokens(n, seed=9), asked)
        rows = hugging_face.inner_sites(fed(output))[site]
        rows = rows.reshape(*rows.shape[:2], -1, 64)[:, :, heads].flatten(2)
        check(output, {site: rows if reduce == "none" else rows.mean(1, keepdim=True)}, [0, 3])
        assert output.inspect_lens.capture.heads == tuple(heads)
        is_cached = output.inspect_lens.capture.cached_positions > 0
        assert is_cached == (i == 2 and reduce == "none")


def test_rows_that_are_kept_of_some_heads_are_no_other_heads(
    sited: Engine, hugging_face: HuggingFace
) -> None:
    prompt, known = tokens(140, seed=77), []
    for heads in [None, [0], [1], [1, 0], [0, 1]] * 3:
        output = captured(sited, prompt, capture("q", capture={"layers": [0, 3], "heads": heads}))
        rows = hugging_face.inner_sites(fed(output))["q"]
        by_head = rows.reshape(*rows.shape[:2], -1, 64)[:, :, heads or [0, 1]]
        check(output, {"q": by_head.flatten(2)}, [0, 3])
        known.append(output.inspect_lens.capture.cached_positions > 0)
    assert known == [False] * 10 + [True] * 5


def test_chosen_queries_and_keys_make_the_pattern_of_the_model(
    sited: Engine, hugging_face: HuggingFace
) -> None:
    pairs = [(3, 1), (1, 0), (1, 1)]
    for n_tokens in (9, 100):
        asked = {"inspect_lens": {"qk": {"heads": pairs}}}
        output = sited.run([tokens(n_tokens, seed=5)], asked, max_tokens=6)[0]
        found, n = output.activations, len(fed(output))
        assert found["attn_q"].shape == (3, n, 64)
        # Heads 0 and 1 of layer 1 read one key head, which comes once.
        assert found["attn_k"].shape == (2, n, 64)
        assert found["qk_key_heads"] == [[1, 0], [3, 0]]
        assert output.inspect_lens.qk.heads == tuple(sorted(pairs))
        expected = hugging_face.attentions(fed(output))
        captured = QueriesKeys.of(found)
        assert captured.all_heads() == tuple(sorted(pairs))
        for layer, head in pairs:
            pattern = torch.from_numpy(captured.patterns(layer, heads=[head]))
            torch.testing.assert_close(pattern[0], expected[layer][head], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"capture": {"site": "k", "heads": [1]}}, "capture.heads.*numbered 0 to 0"),
        ({"qk": {"heads": [[1, 2]]}}, "qk.heads.*numbered 0 to 1"),
        ({"qk": {"heads": [[9, 0]]}}, "qk.heads.*layers 0 to"),
    ],
)
def test_heads_that_the_model_has_not_are_refused(
    sited: Engine, asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        sited.run([tokens(5)], {"inspect_lens": asked})


def test_queries_and_keys_need_their_sites(engine: Engine) -> None:
    with pytest.raises(ValueError, match="INSPECT_LENS_SITES=q,k"):
        engine.run([tokens(5)], {"output_qk": True})
