"""Workers of one engine on several hosts have the lens, and the same settings, or none starts.

Each host has an environment of its own. A rank without the lens would leave a steered stream as it
is, and the others would add their shares to it: nobody could tell from the outside.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from inspect_lens._vllm.compat.hosts import may_have_remote_ranks
from inspect_lens.errors import CompatError

__all__ = ["agree"]

_WAIT_S = 300.0
"""Seconds between the first and the last worker that have loaded the model."""
_REFUSED = "refused: "


def agree(vllm_config: Any, mark: str, refusal: str | None = None) -> None:
    """Compare notes with all other workers, if some are, or may be, on other hosts.

    Args:
        vllm_config: of the engine.
        mark: see `facts_mark`; of a worker without the lens, anything.
        refusal: why the lens does not serve the engine, as this worker sees it.

    Raises:
        CompatError: another worker has other settings, or no lens.
    """
    if not may_have_remote_ranks(vllm_config):
        return
    import torch

    # What `init_process_group` made: all ranks can reach it, and it answers without a collective,
    # which would hang where a rank takes no part.
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    rank, n_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store.set(f"inspect_lens/{rank}", mark if refusal is None else _REFUSED + refusal)
    if refusal is not None:
        return
    for other in range(n_ranks):
        try:
            store.wait([f"inspect_lens/{other}"], timedelta(seconds=_WAIT_S))
            theirs = store.get(f"inspect_lens/{other}").decode()
        except RuntimeError as error:
            raise CompatError(
                f"the worker of rank {other} has not said within {_WAIT_S:g} s that it has "
                "inspect-lens; install it on all hosts, or set INSPECT_LENS_DISABLE=1 on all"
            ) from error
        if theirs.startswith(_REFUSED):
            raise CompatError(
                f"the lens serves this engine here, but not the worker of rank {other}: "
                f"{theirs.removeprefix(_REFUSED)}; give all hosts the same settings"
            )
        if theirs != mark:
            raise CompatError(
                f"the worker of rank {other} has other INSPECT_LENS_* settings, or another "
                "version; give all hosts the same ones"
            )
