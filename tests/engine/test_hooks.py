"""Custom hooks, and queries and keys, in a compiled engine: the steps they are in run eagerly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import Hook, SteeringVector
from inspect_lens.engine import PersistentHooks
from inspect_lens.errors import HookError, LensError, SpecError
from tests.kit.reference import HuggingFace

from .conftest import HIDDEN, LAYERS, Engine, tokens

pytestmark = pytest.mark.engine

ALL = {"output_residual_stream": True}
PEER = Path(__file__).parents[1] / "data" / "vllm_lens_1.3.0" / "hooks.json"
PROMPT = tokens(150, seed=3)
"""Three steps of prefill."""


def keep(ctx: Any, h: Any) -> None:
    ctx.saved.setdefault(f"layer {ctx.layer_idx}", []).append(h)
    ctx.saved.setdefault("calls", []).append([ctx.layer_idx, ctx.position, ctx.seq_len])


def hooks(function: Any, *layers: int, pre: bool = False) -> dict[str, Any]:
    return {"apply_hooks": [Hook(fn=function, layer_indices=layers, pre=pre)]}


def rows(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.activations["residual_stream"]
    return found


def test_a_hook_sees_what_a_capture_returns(engine: Engine) -> None:
    output = engine.run([PROMPT], {**hooks(keep, 1, 3), **ALL})[0]
    n_fed = len(PROMPT) + 7
    saved = output.hook_results["0"]
    for layer in (1, 3):
        seen = torch.cat(saved[f"layer {layer}"])
        torch.testing.assert_close(seen[:n_fed], rows(output)[layer], rtol=0, atol=0)
    first = [call for call in saved["calls"] if call[0] == 1]
    assert [c[1] for c in first][:4] == [0, 64, 128, 150]
    assert sum(c[2] for c in first) == output.inspect_lens.hooks.n_tokens >= n_fed
    assert output.inspect_lens.paths == ("eager",)
    assert output.inspect_lens.hooks.n_edited == 0


def test_an_edit_is_what_steering_with_the_same_vector_does(engine: Engine) -> None:
    v = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0))

    def add(ctx: Any, h: Any) -> Any:
        return h + 4.0 * v.to(h)

    vector = SteeringVector(activations=v[None], layer_indices=[2], scale=4.0)
    hooked = engine.run([PROMPT], {**hooks(add, 2), **ALL})[0]
    steered = engine.run([PROMPT], {"apply_steering_vectors": [vector], **ALL})[0]
    plain = engine.run([PROMPT], ALL)[0]
    assert hooked.outputs[0].token_ids == steered.outputs[0].token_ids
    # A capture shows the stream as hooks left it, which is how the next layer gets it.
    torch.testing.assert_close(rows(hooked), rows(steered), rtol=1e-4, atol=1e-4)
    assert (rows(hooked) - rows(plain)).abs().max() > 1
    assert hooked.inspect_lens.cache_salted


def test_a_controller_sets_the_strength_from_what_it_saw_in_the_step_before(
    engine: Engine,
) -> None:
    v = torch.nn.functional.normalize(
        torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)), dim=0
    )

    def control(ctx: Any, h: Any) -> Any:
        """Push each sampled token towards 3 along v, by half of what the last one lacked."""
        if ctx.seq_len > 1:
            return None
        gain = 0.5 * (3.0 - ctx.saved["left"][-1]) if "left" in ctx.saved else 0.0
        edited = h + gain * v.to(h)
        ctx.saved.setdefault("came", []).append(float(h[0] @ v.to(h)))
        ctx.saved.setdefault("left", []).append(float(edited[0] @ v.to(h)))
        return edited

    asked = {**hooks(control, 2), **ALL}
    (output,) = engine.run([PROMPT], asked, max_tokens=10)
    saved = output.hook_results["0"]
    came, left = saved["came"], saved["left"]
    assert len(left) >= 9
    gains = [0.0, *[0.5 * (3.0 - at) for at in left]]
    for i, (before, after) in enumerate(zip(came, left, strict=True)):
        assert after == pytest.approx(before + gains[i], abs=1e-4)
    # What the next layer gets, and a capture shows, is what the controller left.
    shown = rows(output)[2, len(PROMPT) :] @ v
    torch.testing.assert_close(shown, torch.tensor(left[: len(shown)]), rtol=1e-4, atol=1e-4)
    assert max(map(abs, gains)) > 0.5


def test_a_pre_hook_edits_what_goes_into_a_layer(engine: Engine, hugging_face: HuggingFace) -> None:
    def ablate(ctx: Any, h: Any) -> Any:
        h[:, 10:50] = 0
        return h

    pre = engine.run([PROMPT], {**hooks(ablate, 2, pre=True), **ALL})[0]
    fed = [*PROMPT, *pre.outputs[0].token_ids[:-1]]

    def edit(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[..., 10:50] = 0
        return h

    # The stream before layer 2 is the stream after layer 1.
    expected = hugging_face.residual_stream(fed, {1: edit})
    torch.testing.assert_close(rows(pre)[2:], expected[2:], rtol=1e-3, atol=1e-3)
    post = engine.run([PROMPT], {**hooks(ablate, 1), **ALL})[0]
    torch.testing.assert_close(rows(post)[1:], expected[1:], rtol=1e-3, atol=1e-3)


def test_neighbours_keep_their_bits_and_other_steps_stay_compiled(engine: Engine) -> None:
    others = [tokens(40 + i, seed=20 + i) for i in range(3)]
    # Its prefill takes all of the first steps, so the others are there when the next is laid out,
    # and both runs have the same steps.
    first = tokens(400, seed=30)

    def look(ctx: Any, h: Any) -> None:
        ctx.saved["n"] = ctx.saved.get("n", 0) + len(h)

    def spoil(ctx: Any, h: Any) -> Any:
        return -1000 * h

    def together(function: Any) -> list[Any]:
        engine.llm.reset_prefix_cache()
        asked = [None, ALL, {**hooks(function, 0, 1), **ALL}, ALL]
        return engine.run([first, *others], asked, max_tokens=12)[1:]

    looked, spoiled = together(look), together(spoil)
    for i in (0, 2):
        assert looked[i].outputs[0].token_ids == spoiled[i].outputs[0].token_ids
        torch.testing.assert_close(rows(looked[i]), rows(spoiled[i]), rtol=0, atol=0)
        assert "eager" in looked[i].inspect_lens.paths
    assert not torch.allclose(rows(looked[1]), rows(spoiled[1]))
    alone = engine.run([others[0]], ALL, max_tokens=12)[0]
    assert alone.inspect_lens.paths == ("compiled",)
    assert alone.outputs[0].token_ids == looked[0].outputs[0].token_ids
    torch.testing.assert_close(rows(alone), rows(looked[0]), rtol=1e-4, atol=1e-4)


def test_a_hook_that_raises_fails_its_request_with_its_traceback(engine: Engine) -> None:
    def late(ctx: Any, h: Any) -> Any:
        if ctx.position > 60:
            raise RuntimeError("too late for this one")
        return None

    before = engine.run([PROMPT], ALL)[0]
    with pytest.raises(HookError, match=r"(?s)late after layer 1.*too late for this one"):
        engine.run([PROMPT, tokens(20)], [hooks(late, 1), ALL])
    after = engine.run([PROMPT], ALL)[0]
    torch.testing.assert_close(rows(after), rows(before), rtol=0, atol=0)
    assert engine.stats()["requests"] == 0


def test_what_cannot_be_sent_back_fails_the_request(engine: Engine) -> None:
    def odd(ctx: Any, h: Any) -> None:
        ctx.saved["set"] = {1, 2}

    with pytest.raises(SpecError, match=r"ctx.saved.*'set'.*builtins.set.*nothing is pickled"):
        engine.run([tokens(10)], hooks(odd, 1))


def test_edited_blocks_are_read_by_nobody_else(engine: Engine) -> None:
    engine.llm.reset_prefix_cache()
    plain = engine.run([PROMPT], ALL)[0]
    engine.llm.reset_prefix_cache()

    def spoil(ctx: Any, h: Any) -> Any:
        return h * 3

    for _ in range(2):
        hooked = engine.run([PROMPT], hooks(spoil, 0))[0]
        assert not hooked.num_cached_tokens
    cached = engine.run([PROMPT])[0]
    assert not cached.num_cached_tokens
    assert cached.outputs[0].token_ids == plain.outputs[0].token_ids
    assert engine.run([PROMPT])[0].num_cached_tokens


def test_parameters_of_the_model(engine: Engine) -> None:
    def lens(ctx: Any, h: Any) -> None:
        norm = ctx.get_parameter("model.norm.weight")
        head = ctx.get_parameter("lm_head.weight")
        x = h[-1] * torch.rsqrt(h[-1].pow(2).mean() + 1e-6) * norm
        ctx.saved[ctx.layer_idx] = int((head @ x).argmax())
        ctx.saved["model"] = type(ctx.model).__name__

    output = engine.run([tokens(30)], hooks(lens, LAYERS - 1), max_tokens=1)[0]
    saved = output.hook_results["0"]
    # The logit lens at the last layer is the model's own prediction.
    assert saved[LAYERS - 1] == output.outputs[0].token_ids[0]
    assert saved["model"] == "LlamaForCausalLM"

    def missing(ctx: Any, h: Any) -> None:
        ctx.get_parameter("model.norm.wait")

    with pytest.raises(HookError, match=r"model\.norm\.wait: no parameter of that name.*weight"):
        engine.run([tokens(5)], hooks(missing, 0))


@pytest.fixture
def persistent(engine: Engine) -> Iterator[Engine]:
    yield engine
    PersistentHooks(engine.llm).clear_hooks()


def test_persistent_hooks_run_on_every_request(persistent: Engine) -> None:
    engine = persistent

    def shift(ctx: Any, h: Any) -> Any:
        ctx.saved["tokens"] = ctx.saved.get("tokens", 0) + ctx.seq_len
        return h + 1

    before = engine.run([PROMPT], ALL)[0]
    PersistentHooks(engine.llm).register_hooks(
        [Hook(fn=shift, layer_indices=[1])], ["model.norm.weight"]
    )
    first = engine.run([PROMPT], ALL)[0]
    n = len(PROMPT)  # behind it other tokens follow
    torch.testing.assert_close(rows(first)[1, :n], rows(before)[1, :n] + 1, rtol=1e-4, atol=1e-4)
    plain, own = engine.run([tokens(20), tokens(30)], [None, hooks(keep, 1)])
    assert not hasattr(plain, "hook_results")
    assert plain.inspect_lens.hooks.persistent == first.inspect_lens.hooks.persistent != ()
    # A request's own hooks see what persistent ones made of the rows.
    alone = torch.cat(own.hook_results["0"]["layer 1"])[:30]
    found = PersistentHooks(engine.llm).collect_hook_results()
    assert len(found) == 3
    assert sorted(r["0"]["tokens"] for r in found.values())[0] >= 27
    assert PersistentHooks(engine.llm).collect_hook_results().keys() == found.keys()
    PersistentHooks(engine.llm).clear_hook_results()
    assert not PersistentHooks(engine.llm).collect_hook_results()
    PersistentHooks(engine.llm).clear_hooks()
    after = engine.run([tokens(30)], hooks(keep, 1))[0]
    torch.testing.assert_close(
        alone, torch.cat(after.hook_results["0"]["layer 1"])[:30] + 1, rtol=1e-4, atol=1e-4
    )
    again = engine.run([PROMPT], ALL)[0]
    assert again.inspect_lens.hooks is None
    torch.testing.assert_close(rows(again), rows(before), rtol=0, atol=0)


def test_persistent_hooks_that_cannot_be_used_are_refused_at_once(persistent: Engine) -> None:
    code = json.loads(PEER.read_text())["register"]["hooks"][0]
    broken = {**code, "fn": {"cloudpickle": "gAQu"}}
    with pytest.raises(LensError, match="cannot be read in the server"):
        PersistentHooks(persistent.llm).register_hooks([broken])
    with pytest.raises(SpecError, match="layers 0 to 3"):
        PersistentHooks(persistent.llm).register_hooks([{**code, "layer_indices": [9]}])
    with pytest.raises(LensError, match="no parameter of that name"):
        PersistentHooks(persistent.llm).prefetch_params(["model.norm.nothing"])
    PersistentHooks(persistent.llm).clear_prefetched()
    assert not PersistentHooks(persistent.llm).collect_hook_results()
    assert persistent.run([tokens(5)])[0].outputs[0].token_ids


def test_bytes_of_vllm_lens_run(engine: Engine) -> None:
    peer = json.loads(PEER.read_text())
    if peer["python"] != f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip("functions of another Python")
    args = {"apply_hooks": peer["apply_hooks"], **ALL}
    output = engine.run([tokens(20)], args, max_tokens=1)[0]
    saved = output.hook_results["0"]
    assert saved["layer"] == 3
    for i, layer in enumerate((1, 3)):
        torch.testing.assert_close(saved["norms"][i], rows(output)[layer].norm(dim=-1))
    assert output.inspect_lens.hooks.n_edited == 1
