"""Ids of the tokens that the running step feeds, for gates that look at them.

Asynchronous scheduling plans a step before the host knows what the step before it has sampled, so
ids are compared on the device. They are copied for steps of requests with such gates alone, into a
buffer whose address graphs know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inspect_lens.errors import UnsupportedError

__all__ = ["Fed"]


@dataclass
class Fed:
    """The buffer, and where ids come from.

    Attributes:
        ids: (tokens,) int32, on the device.
        source: gives the ids of the step that is about to run, on the device, in the order of its
            tokens; None where nobody can.
    """

    ids: torch.Tensor
    source: Callable[[], torch.Tensor] | None = None

    def check(self) -> None:
        """Refuse gates that look at ids where nobody can give them.

        Raises:
            UnsupportedError: there is no source.
        """
        if self.source is None:
            raise UnsupportedError(
                "edits: positions among='completion' need the ids of tokens that are fed, which "
                "this worker cannot read; use positions='completion', or a gate"
            )

    def note(self) -> None:
        """Copy the ids of the step that is about to run, behind what computes them."""
        if self.source is not None:
            ids = self.source()
            n = min(len(ids), len(self.ids))
            self.ids[:n].copy_(ids[:n], non_blocking=True)
