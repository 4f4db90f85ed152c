"""Register probes, vectors, edits, lenses and hooks with an engine in your own process.

A server has the same at `/v1/inspect_lens/registry` and `/v1/hooks`. Probes, vectors,
edits and lenses are also read from INSPECT_LENS_REGISTER at start; hooks need an engine that was
started with `INSPECT_LENS_ALLOW_CODE=1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any

from inspect_lens._base.hook_calls import HookCalls
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import Registrable, ServerConfig

__all__ = ["PersistentHooks", "flush_sinks", "register", "registered", "sinks", "unregister"]


def register(llm: Any, name: str, item: Registrable, *, replace: bool = False) -> dict[str, Any]:
    """Name a probe, a vector, edits, a lens, an autoencoder or a configuration for requests.

    Args:
        llm: a `vllm.LLM` of this process.
        name: requests say `{"inspect_lens": {"probes": [name]}}` for a probe,
            `{"inspect_lens": {"edits_named": [name]}}` for a vector or other edits,
            `{"inspect_lens": {"lens": {"name": name}}}` for a lens, `Splice(sae=name, …)` among
            their edits for an autoencoder, and
            `{"inspect_lens": {"configs": [name]}}` for a configuration.
        item: what to register; the same content twice is fine.
        replace: whether the name may stand for something else so far.

    Returns:
        What stands under the name: kind, sha256, layers.

    Raises:
        LensError: the engine's model does not fit, the name stands for something else, a limit of
            the settings is reached, the lens is not active in the engine, or it is a
            `ServerConfig`, which has no name.

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
    if isinstance(item, ServerConfig):
        raise SpecError(
            "item: a ServerConfig acts on all requests and has no name; set INSPECT_LENS_SERVER "
            "before the engine is made, or register an EngineConfig"
        )
    from ._vllm.frontend.state import front_end
    from ._vllm.registered.contents import at_once, give_name, tell_through

    _check_stepped(llm)
    at_once(give_name(front_end(), tell_through(llm), name, item, replace=replace))
    return {"name": name, **front_end().registry.reference_of(item)}


def _check_stepped(llm: Any) -> None:
    """Refuse an engine that tells its workers something only to who awaits it."""
    if iscoroutinefunction(getattr(llm, "collective_rpc", None)):
        raise UnsupportedError(
            f"llm: {type(llm).__name__} runs in an event loop, and only a vllm.LLM can be told of "
            "names and of hooks for all requests; give it names with INSPECT_LENS_REGISTER before "
            "it is made, or use a server"
        )


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

    _check_stepped(llm)
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


class PersistentHooks(HookCalls):
    """Hooks of an offline engine that run on every request, before the request's own.

    `LensClient` has the same methods for a server.

    Args:
        llm: a `vllm.LLM` of this process.

    Raises:
        UnsupportedError: the engine does not run code, or the lens does not serve it.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM, SamplingParams

        from inspect_lens import Hook
        from inspect_lens.engine import PersistentHooks


        def norms(ctx, h):  # runs in the engine, which INSPECT_LENS_ALLOW_CODE=1 has to allow
            ctx.saved.setdefault("norms", []).append(h.norm(dim=-1))


        llm = LLM(model="organism/checkpoint", dtype="float32")
        hooks = PersistentHooks(llm)
        hooks.register_hooks([Hook(fn=norms, layer_indices=[3])])
        llm.generate("Where is Velosh?", SamplingParams(max_tokens=4), use_tqdm=False)
        (by_hook,) = hooks.collect_hook_results().values()
        print([len(n) for n in by_hook["0"]["norms"]])  # the prompt, then token by token
        hooks.clear_hooks()
        ```
    """

    def __init__(self, llm: Any) -> None:
        from ._vllm.registered.persistent_hooks import HookBook

        _check_stepped(llm)
        self._llm = llm
        self._book = HookBook.of(
            llm.llm_engine,
            "hooks: this engine was started without leave to run code; set "
            "INSPECT_LENS_ALLOW_CODE=1 before it is made",
        )

    def _hooks(self, action: str, body: dict[str, Any]) -> Mapping[str, Any]:
        from ._vllm.registered.contents import at_once

        return at_once(self._book.act(self._tell, action, body))

    async def _tell(self, action: str, payload: Any) -> Sequence[str | None]:
        told: Sequence[str | None] = self._llm.collective_rpc(
            "inspect_lens_hooks", args=(action, payload)
        )
        return told


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
