"""The hook that captures in any task unchanged, when INSPECT_LENS_CAPTURE says so.

The entry point registers it only where the variable is set: Inspect prints a line about hooks
as soon as one is registered, enabled or not. The provider registers it in any case.
"""

from __future__ import annotations

import sys

from inspect_ai.hooks import BeforeModelGenerate, Hooks, hooks

from inspect_lens._settings import is_set
from inspect_lens.errors import LensError

from ._body import environment_capture

__all__ = ["LensCapture"]


@hooks(
    name="lens_capture",
    description="Captures activations in every call of a vllm-lens/ model (INSPECT_LENS_CAPTURE).",
)
class LensCapture(Hooks):
    """Adds what INSPECT_LENS_CAPTURE asks for to calls that do not capture by themselves.

    The rest of `extra_body` stays. `output_residual_stream: false` in a call says no; the scopes
    around the call and `-M capture` go first.
    """

    def enabled(self) -> bool:
        """Whether the variable is set."""
        return is_set("capture")

    async def on_before_model_generate(self, data: BeforeModelGenerate) -> None:
        """Edit the config, which is a copy that belongs to this call."""
        # Where the provider was never loaded, no model of ours can be calling.
        provider = sys.modules.get("inspect_lens.model.provider._provider")
        api = None if provider is None else provider.CALLER.get()
        if api is None or api.qualified_model_name != data.model_name:
            return
        try:
            # With all that goes first: what is written here would look like the call's own.
            data.config.extra_body = api.typed_body(data.config, environment_capture())
        except LensError:
            # Inspect only warns about errors in hooks; the provider raises this one again.
            return
