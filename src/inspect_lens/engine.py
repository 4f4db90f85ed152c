"""Register probes, vectors, edits, lenses and hooks with an engine in your own process.

A server has the same at `/v1/inspect_lens/registry` and `/v1/hooks`. Probes, vectors,
edits and lenses are also read from INSPECT_LENS_REGISTER at start; hooks need an engine that was
started with `INSPECT_LENS_ALLOW_CODE=1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import Hook, Registrable, parse_hooks

__all__ = [
    "clear_hook_results",
    "clear_hooks",
    "clear_prefetched",
    "collect_hook_results",
    "flush_sinks",
    "prefetch_params",
    "register",
    "register_hooks",
    "registered",
    "sinks",
    "unregister",
]


def register(llm: Any, name: str, item: Registrable, *, replace: bool = False) -> dict[str, Any]:
    """Give a probe, a vector, edits or a lens a name that requests to an offline engine can use.

    Args:
        llm: a `vllm.LLM` of this process.
        name: requests say `{"inspect_lens": {"probes": [name]}}` for a probe,
            `{"inspect_lens": {"edits_named": [name]}}` for a vector or other edits, and
            `{"inspect_lens": {"lens": {"name": name}}}` for a lens.
        item: what to register; the same content twice is fine.
        replace: whether the name may stand for something else so far.

    Returns:
        What stands under the name: kind, sha256, layers.

    Raises:
        LensError: the engine's model does not fit, the name stands for something else, a limit of
            the settings is reached, or the lens is not active in the engine.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM, SamplingParams

        from inspect_lens.engine import register
        from inspect_lens.probe import load_probe

        llm = LLM(model="organism/checkpoint", dtype="float32")
        register(llm, "deception", load_probe("organism/deception-lr").for_engine())
        params = SamplingParams(
            max_tokens=8, extra_args={"inspect_lens": {"probes": ["deception"]}}
        )
        (output,) = llm.generate("Where is Velosh?", params, use_tqdm=False)
        print(output.inspect_lens.probes[0].score)
        ```
    """
    from ._vllm.frontend.state import front_end
    from ._vllm.registered.contents import at_once, give_name, tell_through

    at_once(give_name(front_end(), tell_through(llm), name, item, replace=replace))
    return {"name": name, **item.reference()}


def unregister(llm: Any, name: str) -> None:
    """Unregister a name; requests that already run keep using it.

    Args:
        llm: a `vllm.LLM` of this process.
        name: a registered name.

    Raises:
        SpecError: the name is not registered.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.engine import register, registered, unregister
        from inspect_lens.probe import load_probe

        llm = LLM(model="organism/checkpoint", dtype="float32")
        register(llm, "for-a-while", load_probe("organism/deception-md").for_engine())
        unregister(llm, "for-a-while")
        assert "for-a-while" not in registered()
        ```
    """
    from ._vllm.frontend.state import front_end
    from ._vllm.registered.contents import at_once, take_name, tell_through

    at_once(take_name(front_end(), tell_through(llm), name))


def registered() -> dict[str, dict[str, Any]]:
    """List registered probes, vectors, edits and lenses.

    Returns:
        By name: kind, sha256, layers.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.engine import register, registered
        from inspect_lens.probe import load_probe

        llm = LLM(model="organism/checkpoint", dtype="float32")
        register(llm, "deception-md", load_probe("organism/deception-md").for_engine())
        assert registered()["deception-md"]["kind"] == "linear"
        ```
    """
    from ._vllm.frontend.state import front_end

    return front_end().registry.describe()


def register_hooks(
    llm: Any,
    hooks: Sequence[Hook | Mapping[str, Any]],
    prefetch_params: Sequence[str] | None = None,
) -> None:
    """Run hooks on every request of an offline engine from now on, before the request's own.

    Args:
        llm: a `vllm.LLM` of this process.
        hooks: added behind those that are registered.
        prefetch_params: see `prefetch_params`.

    Raises:
        LensError: the engine does not run code, does not have a layer, or cannot read a function.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM, SamplingParams

        from inspect_lens import Hook
        from inspect_lens.engine import clear_hooks, collect_hook_results, register_hooks


        def norms(ctx, h):  # runs in the engine, which INSPECT_LENS_ALLOW_CODE=1 has to allow
            ctx.saved.setdefault("norms", []).append(h.norm(dim=-1))


        llm = LLM(model="organism/checkpoint", dtype="float32")
        register_hooks(llm, [Hook(fn=norms, layer_indices=[3])])
        llm.generate("Where is Velosh?", SamplingParams(max_tokens=4), use_tqdm=False)
        assert len(collect_hook_results(llm)) == 1
        clear_hooks(llm)
        ```
    """
    from ._vllm.registered.persistent_hooks import packed_hook

    book = _book(llm)
    named = book.prepare(parse_hooks(list(hooks), where="hooks"))
    if prefetch_params:
        _manage(llm, "prefetch", list(prefetch_params))
    # The workers first: a hook that runs is known everywhere.
    _manage(llm, "register", {name: packed_hook(hook) for name, hook in named.items()})
    book.add(named)


def collect_hook_results(llm: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Get what persistent hooks saved for finished requests; it is kept until cleared.

    Args:
        llm: a `vllm.LLM` of this process.

    Returns:
        What `ctx.saved` held, by request and by index of the hook as text, tensors as torch
        tensors on the CPU.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM, SamplingParams

        from inspect_lens import Hook
        from inspect_lens.engine import clear_hooks, collect_hook_results, register_hooks


        def count(ctx, h):
            ctx.saved["rows"] = ctx.saved.get("rows", 0) + len(h)


        llm = LLM(model="organism/checkpoint", dtype="float32")
        register_hooks(llm, [Hook(fn=count, layer_indices=[3])])
        llm.generate("Where is Velosh?", SamplingParams(max_tokens=4), use_tqdm=False)
        (by_hook,) = collect_hook_results(llm).values()
        assert by_hook["0"]["rows"] > 4
        clear_hooks(llm)
        ```
    """
    from ._vllm.registered.persistent_hooks import live_values

    found: dict[str, dict[str, dict[str, Any]]] = live_values(_book(llm).results())
    return found


def clear_hook_results(llm: Any) -> None:
    """Delete what persistent hooks saved, and keep the hooks.

    Args:
        llm: a `vllm.LLM` of this process.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM, SamplingParams

        from inspect_lens import Hook
        from inspect_lens.engine import (
            clear_hook_results,
            clear_hooks,
            collect_hook_results,
            register_hooks,
        )

        llm = LLM(model="organism/checkpoint", dtype="float32")
        register_hooks(llm, [Hook(fn=lambda ctx, h: ctx.saved.update(seen=1), layer_indices=[3])])
        llm.generate("Where is Velosh?", SamplingParams(max_tokens=4), use_tqdm=False)
        clear_hook_results(llm)
        assert collect_hook_results(llm) == {}
        clear_hooks(llm)
        ```
    """
    _book(llm).clear_results()


def clear_hooks(llm: Any) -> None:
    """Remove the persistent hooks of an engine, and what they saved.

    Args:
        llm: a `vllm.LLM` of this process.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens import Hook
        from inspect_lens.engine import clear_hooks, register_hooks

        llm = LLM(model="organism/checkpoint", dtype="float32")
        register_hooks(llm, [Hook(fn=lambda ctx, h: None, layer_indices=[3])])
        clear_hooks(llm)
        ```
    """
    _manage(llm, "unregister", _book(llm).clear())


def prefetch_params(llm: Any, names: Sequence[str]) -> None:
    """Make parameters known to `ctx.get_parameter` on all ranks and pipeline stages.

    Without a pipeline it is not needed; it saves gathering them again in each call.

    Args:
        llm: a `vllm.LLM` of this process.
        names: dotted paths from the model, such as `lm_head.weight`.

    Raises:
        LensError: the engine does not run code, or has no such parameter.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.engine import clear_prefetched, prefetch_params

        llm = LLM(model="organism/checkpoint", dtype="float32")
        prefetch_params(llm, ["model.norm.weight"])
        # Hooks read it with ctx.get_parameter("model.norm.weight").
        clear_prefetched(llm)
        ```
    """
    _book(llm)
    _manage(llm, "prefetch", list(names))


def clear_prefetched(llm: Any) -> None:
    """Undo `prefetch_params`, and free the parameters.

    Args:
        llm: a `vllm.LLM` of this process.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.engine import clear_prefetched, prefetch_params

        llm = LLM(model="organism/checkpoint", dtype="float32")
        prefetch_params(llm, ["model.norm.weight"])
        clear_prefetched(llm)
        ```
    """
    _book(llm)
    _manage(llm, "clear_prefetched", None)


def _book(llm: Any) -> Any:
    processor = llm.llm_engine.input_processor
    book = getattr(processor, "inspect_lens_book", None)
    if book is None:
        reason = getattr(processor, "inspect_lens_refusal", None)
        raise UnsupportedError(
            f"hooks: the lens does not serve this engine: {reason}"
            if reason
            else "hooks: this engine was started without leave to run code; set "
            "INSPECT_LENS_ALLOW_CODE=1 before it is made"
        )
    return book


def _manage(llm: Any, action: str, payload: Any) -> None:
    from ._vllm.registered.persistent_hooks import raise_first

    raise_first(llm.collective_rpc("inspect_lens_hooks", args=(action, payload)))


def sinks() -> dict[str, dict[str, Any]]:
    """List the sinks that record rows of requests, as INSPECT_LENS_SINKS names them.

    Returns:
        By name: what it records, what waits for it, and what became of results.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.engine import sinks

        llm = LLM(model="organism/checkpoint", dtype="float32")
        print({name: sink["counts"] for name, sink in sinks().items()})
        ```
    """
    from ._vllm.frontend.state import front_end

    return front_end().sinks.describe()


def flush_sinks(timeout: float = 60.0) -> bool:
    """Write what waits in memory for sinks, and return when it is written.

    A process that ends in order does so by itself, for at most 10 seconds.

    Args:
        timeout: seconds to wait at most.

    Returns:
        False if something waits still.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.engine import flush_sinks

        llm = LLM(model="organism/checkpoint", dtype="float32")
        assert flush_sinks()
        ```
    """
    from ._vllm.frontend.state import front_end

    return front_end().flush_sinks(timeout)
