"""Tensor-parallel ranks that agree in words before any of them enters a collective.

A collective that one rank does not enter holds the others for ever. A rank may be kept from it by
what no other rank knows: a function of a client that raises there alone, or memory that has run
out. So each rank first says what it is about to do, over the group of the CPUs, and all of them
go on by what all of them said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens.errors import LensError

MOST_BYTES = 512
"""Of what a rank says at once: as fast as one byte, and longer than names of parameters."""


class Ranks:
    """The tensor-parallel group of this worker."""

    def __init__(self, group: Any) -> None:
        self.group = group

    @classmethod
    def here(cls) -> Ranks:
        """Those that this worker belongs to."""
        from vllm.distributed.parallel_state import get_tp_group

        return cls(get_tp_group())

    @property
    def n(self) -> int:
        return int(self.group.world_size)

    def say(self, text: str) -> list[str]:
        """Tell all ranks something, and hear them; each rank has to call it."""
        if self.n == 1:
            return [text]
        mine = torch.zeros(MOST_BYTES, dtype=torch.uint8)
        data = bytearray(text.encode())
        if data:
            mine[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self.n)]
        torch.distributed.all_gather(heard, mine, group=self.group.cpu_group)
        return [bytes(one.tolist()).rstrip(b"\0").decode() for one in heard]

    def gather(self, make: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Gather tensors of all ranks, or of none; each rank has to call it."""
        mine: list[torch.Tensor] = []
        room: list[torch.Tensor] = []
        problem: BaseException | None = None
        try:
            mine = [tensor.unsqueeze(0).contiguous() for tensor in make()]
            # Had and given back, so that the collective does not find the memory gone.
            room = [tensor.new_empty(self.n, *tensor.shape[1:]) for tensor in mine]
            text = " ".join(f"{t.dtype}{tuple(t.shape)}" for t in mine)[:MOST_BYTES]
        except BaseException as error:
            if ends_process(error):
                raise
            problem, text = error, ""
        heard = self.say(text)
        room.clear()
        if problem is not None:
            raise problem
        if "" in heard:
            raise LensError(
                f"rank {heard.index('')} could not take part; see the log of its worker"
            )
        if len(set(heard)) > 1:
            raise LensError(f"the ranks have different tensors: {', '.join(heard)}")
        if self.n == 1:
            return mine
        return [self.group.all_gather(tensor, dim=0) for tensor in mine]
