"""The hook that makes a call's config typed before Inspect hashes, caches and logs it.

Registered when the provider is first used, so that other evals pay nothing and Inspect's
start-up message does not count it.
"""

from __future__ import annotations

from inspect_ai.hooks import BeforeModelGenerate, Hooks, hooks

from inspect_lens.errors import LensError
from inspect_lens.model.request._capture_hook import LensCapture

from ._provider import CALLER, LensAPI

__all__ = ["LensAPI", "LensCapture", "LensRequests"]


@hooks(
    name="lens_requests",
    description="Spells lens requests in one way before Inspect computes cache keys.",
)
class LensRequests(Hooks):
    """Replaces the call's `extra_body` by its typed form.

    Without it a raw tensor would be hashed by its abbreviated `repr`, a base64 vector from the
    command line would be logged with every call, and `-M capture` would not be in cache keys.
    """

    async def on_before_model_generate(self, data: BeforeModelGenerate) -> None:
        """Edit the config, which is a copy that belongs to this call."""
        api = CALLER.get()
        if api is None or api.qualified_model_name != data.model_name:
            return
        try:
            data.config.extra_body = api.typed_body(data.config)
        except LensError:
            # Inspect only warns about errors in hooks; the provider raises this one again.
            return
