"""Engines with quantised weights: rows, steering and probes are those of what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens import Hook, SteeringVector
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat.engine_facts import facts_of
from inspect_lens._vllm.model.parameters import Parameters
from inspect_lens.errors import UnsupportedError
from tests.engine.conftest import BLOCK, Engine, start, tokens
from tests.engine.test_architectures import Judge, Note
from tests.engine.test_capture import fed
from tests.kit.engine_probes import check_probes
from tests.kit.model_results import CHECK, COMPILED, HOOKED, SERVED, STEERED
from tests.kit.quantised_models import HIDDEN, LAYERS, METHODS, Method, case_of, write
from tests.kit.reference import relative_errors

SITES = {"mlp_out": "mlp_out", "resid_post": "residual_stream"}
CAPTURE = {"capture": {"site": list(SITES)}}
PROMPT = tokens(60, seed=3)
"""Of one step; its first block is cached."""
NEAR = 0.1
"""Of the norm, how far the mean compiled row may be from the eager one."""
FAR = 0.3
"""The same where activations are quantised, as rounding errors then choose among few numbers; also
how far the mean row may be from that of a model whose activations are not quantised."""


def check_method(
    method: Method, folder: Path, note: Note = lambda *_: None, **options: Any
) -> None:
    """Start an engine, and compare what the lens serves with what it computes.

    Args:
        method: how weights are quantised.
        folder: where models go.
        note: gets what was checked.
        **options: of the engine.
    """
    served, plain = write(method, folder)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_SITES", ",".join(SITES))
        environment.setenv("INSPECT_LENS_ALLOW_CODE", "1")
        # In this process, so that hooks of torch can be put on the model's modules.
        engine = start(served, in_process=True, dtype="bfloat16", **(options | {**method.options}))
    try:
        numerics = facts_of(engine.llm.llm_engine.vllm_config, Settings.load()).numerics
        # On a CPU, AWQ goes by its older name.
        names = (
            (of or "").removeprefix("auto_") for of in (numerics.quantization, method.recorded)
        )
        assert len(set(names)) == 1
        assert numerics.kv_cache_dtype == (method.kv_cache or "bfloat16")
        rows = check_rows(method, engine, note, is_eager=bool(options.get("enforce_eager")))
        check_truth(method, engine, plain, rows, note)
        check_prefix(engine, rows)
        check_steering(engine, note)
        check_probes(
            engine.llm, engine.run, [tokens(20 + i, seed=i) for i in range(4)], HIDDEN, LAYERS
        )
        check_lens(engine)
        note(SERVED, 0.0, 0.0)
        if method.quantise is not None:
            with pytest.raises(
                UnsupportedError, match=r"qkv_proj.weight: the weights .* quantised"
            ):
                engine.llm.apply_model(
                    lambda model: Parameters(model).get("model.layers.0.self_attn.qkv_proj.weight")
                )
    finally:
        engine.close()


def captured(output: Any) -> dict[str, torch.Tensor]:
    """Rows by site; all of them are numbers."""
    found = {site: output.activations[name] for site, name in SITES.items()}
    assert all(rows.isfinite().all() for rows in found.values())
    return found


class TorchHooks:
    """Hooks of torch on the modules that the sites are of, put there by the test."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._handles: list[Any] = []

    def attach(self, model: Any) -> None:
        """Put them on the model of an engine."""
        for i, layer in enumerate(model.model.layers):
            for site, module in (("resid_post", layer), ("mlp_out", layer.mlp)):
                self._handles.append(module.register_forward_hook(self._hook(site, i)))

    def remove(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()

    def rows(self, site: str, counts: list[int]) -> torch.Tensor:
        """(layers, tokens, hidden) of one request, that had so many tokens in each step."""
        found = [self._rows[site, i][: len(counts)] for i in range(LAYERS)]
        # Steps may be padded, and others may follow the last one.
        return torch.stack(
            [torch.cat([r[:n] for r, n in zip(of, counts, strict=True)]) for of in found]
        ).cpu()

    def _hook(self, site: str, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            # Hidden state and residual; their sum is the stream.
            is_pair = isinstance(output, tuple) and site == "resid_post"
            rows = output[0] + output[1] if is_pair else output
            self._rows.setdefault((site, layer), []).append(rows.detach().clone())

        return hook


def nothing(_ctx: Any, _h: Any) -> None:
    """A hook of a request, for which its steps run eagerly."""


def check_rows(method: Method, engine: Engine, note: Note, *, is_eager: bool) -> Any:
    """Eager rows are those of a hook, and compiled ones are near to them; returns the output."""
    hooks = TorchHooks()
    engine.llm.apply_model(hooks.attach)
    request = {"inspect_lens": CAPTURE | {"hooks": [Hook(fn=nothing, layer_indices=(0,))]}}
    try:
        (eager,) = engine.run([PROMPT], request, max_tokens=4)
    finally:
        hooks.remove()
    assert set(eager.inspect_lens.paths) == {"eager"}
    for site, rows in captured(eager).items():
        assert torch.equal(rows, hooks.rows(site, [len(PROMPT), 1, 1, 1])), site
        assert rows.float().norm(dim=-1).min() > 0.1
    note(HOOKED, 0.0, 0.0)
    engine.llm.reset_prefix_cache()
    (plain,) = engine.run([PROMPT], {"inspect_lens": CAPTURE}, max_tokens=4)
    assert (set(plain.inspect_lens.paths) == {"eager"}) == is_eager
    limit = NEAR if method.is_weight_only else FAR
    for site, rows in captured(plain).items():
        # Sampled tokens may differ.
        first, second = (of[:, : len(PROMPT)] for of in (captured(eager)[site], rows))
        errors = relative_errors(second, first.float())
        # Rounding sends some tokens to other experts.
        error = errors.median() if method.is_routed else errors.mean(-1).max()
        assert error <= limit, (site, error, errors.max())
        assert relative_errors(second.roll(1, 1), first.float()).median() > 2 * limit
        if not is_eager:
            note(COMPILED, float(error), limit)
    return plain


def check_truth(method: Method, engine: Engine, plain: Path, output: Any, note: Note) -> None:
    """What transformers computes with the plain numbers that the weights mean."""
    judge = Judge(case_of(method), plain, torch.bfloat16, note)
    truths = judge.sites(fed(output), list(SITES))
    for site, rows in captured(output).items():
        if method.is_weight_only:
            judge.check(site, rows, truths[site])
            continue
        error = float(relative_errors(rows, truths[site].exact).mean(-1).max())
        assert error <= FAR, site
        assert relative_errors(rows.roll(1, 1), truths[site].exact).mean() > 2 * FAR
        note(site, error, FAR)


def check_prefix(engine: Engine, before: Any) -> None:
    """What is computed behind cached keys and values is what was computed behind fresh ones."""
    asked = {"capture": {"site": list(SITES), "positions": "last_prompt"}}
    (again,) = engine.run([PROMPT], {"inspect_lens": asked}, max_tokens=1)
    assert again.num_cached_tokens == BLOCK
    for site, rows in captured(again).items():
        expected = captured(before)[site][:, [len(PROMPT) - 1]].float()
        assert relative_errors(rows, expected).median() <= FAR


def check_steering(engine: Engine, note: Note) -> None:
    """A vector moves the rows that it is for by itself, and no other row of its layer."""
    where, layer = [0, 31, 59], 2
    v = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    vector = SteeringVector(activations=v, layer_indices=[layer], scale=4.0, position_indices=where)
    request = {"inspect_lens": CAPTURE | {"edits": [vector]}}
    outputs = []
    for asked in ({"inspect_lens": CAPTURE}, request):
        engine.llm.reset_prefix_cache()
        outputs += engine.run([PROMPT], asked, max_tokens=1)
    plain, steered = (captured(output)["resid_post"][layer] for output in outputs)
    changed = (plain != steered).any(dim=-1).nonzero().flatten().tolist()
    assert changed == where
    expected = plain[where].float() + 4.0 * v
    # The edit is rounded in one half of the stream, and the sum of the halves again.
    step = torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
    torch.testing.assert_close(steered[where].float(), expected, rtol=0, atol=2 * step)
    assert outputs[1].inspect_lens.steer.n_tokens == len(where)
    note(STEERED, float(relative_errors(steered[where], expected).max()), 2**-6)


def check_lens(engine: Engine) -> None:
    """The logit lens at the last layer says what greedy sampling took, also of packed weights."""
    request = {"inspect_lens": {"lens": {"layers": [LAYERS - 1]}}}
    (output,) = engine.run([PROMPT], request, max_tokens=4)
    found = output.inspect_lens.lens.result(output.activations)
    for i, token in enumerate(output.outputs[0].token_ids, len(PROMPT) - 1):
        at = found.token_ids[i, 0].tolist().index(token)
        # Two may be equal in bfloat16.
        assert found.logprobs[i, 0, 0] - found.logprobs[i, 0, at] <= 0.05


@pytest.mark.engine
@pytest.mark.parametrize(
    "method", [m for m in METHODS if not m.not_on_cpu], ids=lambda method: method.name
)
def test_a_quantised_engine_serves_what_it_computes(
    method: Method, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_method(
        method,
        tmp_path,
        lambda *found: record_property(CHECK, list(found)),
        enforce_eager=True,
    )
