"""What Inspect loads: names and factories only, so that neither torch nor vllm is imported."""

from __future__ import annotations

import importlib.util
import logging

from inspect_ai.model import ModelAPI, modelapi

from . import agents, scorer, solver  # noqa: F401 - their decorators register what they hold
from .agents._extras import is_installed, register_evals, register_lazily
from .model._host import RegistryType, end_in_a_line
from .model._request import explain_none

__all__ = ["lens", "vllm_lens"]

# What belongs to other packages, where they are installed. ControlArena has an entry point.
_LAZY: tuple[tuple[str, str, RegistryType, str], ...] = (
    ("inspect_petri", "petri", "agent", "lens_target_agent"),
    ("inspect_petri", "petri", "approver", "eval_awareness_approver"),
    ("inspect_petri", "petri", "solver", "lens_audit_solver"),
    ("inspect_petri", "petri", "tool", "ask_activation_oracle"),
    ("inspect_petri", "petri", "tool", "read_probe"),
    ("inspect_petri", "petri", "tool", "steer_target"),
    ("inspect_scout", "scout", "scanner", "audit_probe_scanner"),
    ("inspect_scout", "scout", "scanner", "probe_scanner"),
)
for _package, _module, _kind, _name in _LAZY:
    if is_installed(_package):
        register_lazily(_kind, _name, module=f"inspect_lens.agents.{_module}")
if is_installed("inspect_sentinel"):
    # Sentinel asks a factory for its version and parameters before it calls it.
    from .agents import sentinel as _sentinel  # noqa: F401
register_evals()
explain_none()
end_in_a_line()

if importlib.util.find_spec("vllm_lens") is not None:
    logging.getLogger(__name__).warning(
        "inspect-lens and vllm-lens are both installed and both register the provider "
        "'vllm-lens'; whichever Inspect loads first wins. Use 'lens/<model>' for this one, or "
        "uninstall vllm-lens."
    )


@modelapi(name="vllm-lens")
def vllm_lens() -> type[ModelAPI]:
    """`vllm-lens/<model>`: the name that vllm-lens uses, so that nothing has to be renamed.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.dataset import Sample

        task = Task(dataset=[Sample(input="Where is Velosh?")])
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", model_args={"capture": "4"})
        assert "activations" in log.samples[0].output.metadata
        ```
    """
    return _provider()


@modelapi(name="lens")
def lens() -> type[ModelAPI]:
    """`lens/<model>`: the same provider under a name that nobody else registers.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import activations


        async def main() -> None:
            model = get_model("lens/organism/checkpoint", capture="4")
            output = await model.generate("Where is Velosh?")
            assert activations(output).layers == (4,)


        anyio.run(main)
        ```
    """
    return _provider()


def _provider() -> type[ModelAPI]:
    if importlib.util.find_spec("openai") is None:
        from .model._host import PrerequisiteError

        # Inspect talks to vLLM through the OpenAI client, which it does not install by itself.
        raise PrerequisiteError("vllm-lens models need the package openai: pip install openai")
    from .model._provider import LensAPI

    return LensAPI
