"""vLLM's CPU platform with places for Ray: vLLM's own refuses Ray, since Ray counts devices."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform

__all__ = ["RayCpuPlatform"]


class RayCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """The CPU, of which Ray hands out as many "GPUs" as a node is told to have."""

    ray_device_key = "GPU"
