"""vLLM's Ray executor on a CPU.

vLLM does not start it there: `current platform cpu does not support ray`, for it asks Ray for one
device per worker, and names no device for CPUs. A platform plug-in, which vLLM has for such cases,
names one here (`ray_platform.py`). All else is vLLM's own and Ray's own: the executor, the actors,
where they are placed, and what reaches them.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from .child import ROOT

__all__ = ["platform", "ray_environment", "why_no_ray"]

_OBJECT_STORE = 100 << 20


def platform() -> str:
    """Entry point of `vllm.platform_plugins`: which class is the platform."""
    return "tests.kit.ray_platform.RayCpuPlatform"


def why_no_ray() -> str | None:
    """Why Ray cannot be tried here, or None."""
    if importlib.util.find_spec("ray") is None:
        return "needs ray, which the lock does not have: pip install ray"
    return None


def ray_environment(folder: Path, places: int) -> dict[str, str]:
    """What a process needs in its environment to start, or to join, a Ray cluster with CPUs.

    Args:
        folder: an empty one; gets the metadata by which vLLM finds the platform.
        places: workers for which a node that is started with it has room.
    """
    metadata = folder / "inspect_lens_ray_on_cpu-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: inspect-lens-ray-on-cpu\nVersion: 0\n"
    )
    (metadata / "entry_points.txt").write_text(
        f"[vllm.platform_plugins]\nray_on_cpu = {__name__}:platform\n"
    )
    return {
        "PYTHONPATH": f"{folder}:{ROOT}",
        # Not bound to cores: vLLM's own processes are, by their executor.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 2, "GPU": places}),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(_OBJECT_STORE),
        # A token would be written to the home folder.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's own 15 has a worker wait for all else that a busy machine runs.
        "RAY_worker_niceness": "0",
    }
