"""Judging what needs Python in the forward pass, which is hooks, and queries and keys."""

from __future__ import annotations

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec.asks._hook import Hook, code_python
from inspect_lens.spec.asks._qk import QKSpec
from inspect_lens.spec.engine._facts import EngineFacts

__all__ = ["check_eager", "check_hooks", "check_qk"]


def check_eager(hooks: tuple[Hook, ...], skip_cache: bool | None, facts: EngineFacts) -> None:
    """Judge the part of a request that makes its steps run eagerly.

    Args:
        hooks: of the request.
        skip_cache: its `skip_reading_prefix_cache`.
        facts: of the engine.

    Raises:
        SpecError: a layer that the model does not have, or a contradiction.
        UnsupportedError: this engine cannot, or may not.
    """
    if not hooks:
        return
    check_hooks(hooks, facts, "apply_hooks")
    if facts.is_speculative:
        raise UnsupportedError(
            "apply_hooks beside speculative decoding, whose rejected drafts would be seen as "
            "tokens; use an engine without speculative decoding"
        )
    if skip_cache is False:
        raise SpecError(
            "skip_reading_prefix_cache=false beside apply_hooks: cached tokens are not computed, "
            "so nothing could be seen of them; leave it out"
        )


def check_qk(qk: QKSpec, facts: EngineFacts) -> None:
    """Check a capture of queries and keys against the engine that will run it.

    Args:
        qk: what was asked for.
        facts: of the engine.

    Raises:
        SpecError: a layer that the model does not have.
        UnsupportedError: attention without keys per head, or without taps.

    Example:
        ```python
        from inspect_lens.spec import EngineFacts, QKSpec, check_qk, tap_points

        places = {"layers": (0, 1), "sites": ("q", "k")}
        taps = tap_points(["q", "k"], (0, 1))
        sizes = {"hidden": 256, "max_step_tokens": 64, "ring_rows": 256, "bank_rows": 8}
        engine = {"model": "m", "n_layers": 2, "dtype": "float32", "vllm_version": "0"}
        check_qk(QKSpec(layers=[1]), EngineFacts(**engine, **places, taps=taps, **sizes))
        ```
    """
    if facts.has_latent_attention:
        raise UnsupportedError(
            f"output_qk: {facts.model} has multi-head latent attention (MLA), which keeps no keys "
            "per head; capture the residual stream instead"
        )
    if not {"q", "k"} <= set(facts.sites):
        raise UnsupportedError(
            f"output_qk: this engine has no taps for q and k; it serves {', '.join(facts.sites)}. "
            "Start it with INSPECT_LENS_SITES=q,k and what else you need"
        )
    if qk.layers != "all":
        _check_layers(qk.layers, facts, "output_qk")


def check_hooks(hooks: tuple[Hook, ...], facts: EngineFacts, field: str) -> None:
    """Check hooks against the engine that will run them.

    Args:
        hooks: of a request, or to be registered.
        facts: of the engine.
        field: name of the argument, for error messages.

    Raises:
        SpecError: a layer that the model does not have.
        UnsupportedError: the engine does not run code, or not that of another Python.

    Example:
        ```python
        from inspect_lens import Hook
        from inspect_lens.errors import SpecError
        from inspect_lens.spec import EngineFacts, check_hooks, tap_points

        places = {"layers": (0, 1), "sites": ("resid_post",)}
        taps = tap_points(["resid_post"], (0, 1))
        sizes = {"hidden": 256, "max_step_tokens": 64, "ring_rows": 128, "bank_rows": 8}
        engine = {"model": "m", "n_layers": 2, "dtype": "float32", "vllm_version": "0"}
        facts = EngineFacts(**engine, **places, taps=taps, **sizes, allows_code=True)
        check_hooks((Hook(fn=lambda ctx, h: None, layer_indices=[1]),), facts, "apply_hooks")
        ```
    """
    if hooks and not facts.allows_code:
        raise UnsupportedError(
            f"{field}: hooks are functions of the client that run inside the server, and this "
            "engine was started without leave for it; start it with INSPECT_LENS_ALLOW_CODE=1, "
            "which lets everybody who can send it requests run any code there"
        )
    for i, hook in enumerate(hooks):
        _check_layers(hook.layer_indices, facts, f"{field}[{i}].layer_indices")
        made = hook.fn.python
        if made is not None and made != code_python():
            raise UnsupportedError(
                f"{field}[{i}]: was made by Python {made}, and this engine runs {code_python()}, "
                "which cannot read its functions"
            )


def _check_layers(layers: tuple[int, ...], facts: EngineFacts, field: str) -> None:
    for layer in layers:
        if not 0 <= layer < facts.n_layers:
            raise SpecError(
                f"{field}: layer {layer}; {facts.model} has layers 0 to {facts.n_layers - 1}"
            )
        if layer not in facts.layers:
            raise UnsupportedError(
                f"{field}: layer {layer} is not served by this engine, which serves "
                f"{list(facts.layers)} (INSPECT_LENS_LAYERS)"
            )
