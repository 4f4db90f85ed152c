"""What is gathered over ranks: parameters for hooks, and logits of rows of any layer."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from inspect_lens._engine.protocol.processes import contained, ends_process
from inspect_lens._vllm.compat.quantisation import packed_by
from inspect_lens.errors import LensError, UnsupportedError

logger = logging.getLogger("vllm.inspect_lens")

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


class Parameters:
    """Finds parameters of a model by name, and keeps those that were prefetched."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, torch.Tensor] = {}
        self._thread = 0
        """The thread that ranks may gather in now, all of them; 0 when they may not."""

    def get(self, name: str, *, may_gather: bool = True) -> torch.Tensor:
        """One parameter, whole. With tensor parallelism ranks gather it, inside `together`.

        Other ranks serve it there, whether they ask for it or not.
        """
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        module, value = self._find(name)
        ranks = Ranks.here()
        if ranks.n == 1:
            return value
        if not may_gather or self._thread != threading.get_ident():
            raise LensError(
                f"{name}: ranks gather a parameter while a hook runs whose own code says "
                "get_parameter; call it there and in the hook's thread, or prefetch the parameter"
            )
        if len(name.encode()) > MOST_BYTES:
            raise AttributeError(f"{name[:60]}…: a name has at most {MOST_BYTES} bytes")
        while True:
            wish = next(filter(None, ranks.say(name)))
            if wish == name:
                return _whole(name, module, self._shares(name, ranks), ranks.n)
            self._serve(wish, ranks)

    @contextlib.contextmanager
    def together(self, is_needed: bool = True) -> Iterator[None]:
        """Let `get` gather parameters over ranks, all of which have to come here.

        Behind it a rank serves what others still ask for, whatever became of its own work.
        """
        ranks = Ranks.here() if is_needed else None
        if ranks is None or ranks.n == 1:
            yield
            return
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = 0
            while wish := next(filter(None, ranks.say("")), ""):
                self._serve(wish, ranks)

    def prefetch(self, names: list[str]) -> None:
        """Keep parameters, gathered over tensor-parallel ranks and sent to all pipeline stages.

        All workers have to be told to at the same time.
        """
        problems: list[Exception] = []
        for name in names:
            found, problem = None, None
            try:
                with self.together():
                    found = self.get(name)
            except Exception as error:  # noqa: BLE001 - the other workers wait for what this one says
                problem = error
            whole = _over_stages(found)
            if whole is not None:
                self._kept[name] = whole
            else:
                problems.append(
                    problem or AttributeError(f"no pipeline stage has a parameter {name!r}")
                )
        # Not before: the others go through all names.
        if problems:
            raise problems[0]

    def clear(self) -> None:
        """Undo `prefetch_params`, and free the parameters."""
        self._kept.clear()

    def _shares(self, name: str, ranks: Ranks) -> list[torch.Tensor]:
        (stacked,) = ranks.gather(lambda: [self._find(name)[1]])
        return list(stacked)

    def _serve(self, name: str, ranks: Ranks) -> None:
        # A fault is of whoever asked, and who could not take part says why.
        with contained(partial(logger.warning, "inspect_lens: %s was not gathered: %s", name)):
            self._shares(name, ranks)

    def _find(self, name: str) -> tuple[nn.Module, torch.Tensor]:
        from vllm.model_executor.models.utils import PPMissingLayer

        module: Any = self._model
        *parents, last = name.split(".")
        for part in parents:
            module = getattr(module, part, None)
            if isinstance(module, PPMissingLayer):
                raise AttributeError(
                    f"{name}: this pipeline stage does not have it; prefetch it, with "
                    "prefetch_params of register_hooks or with prefetch_params alone"
                )
            if module is None:
                raise AttributeError(f"{name}: {type(self._model).__name__} has no {part!r}")
        if (packed := packed_by(module)) is not None:
            raise UnsupportedError(
                f"{name}: the weights of this module are quantised ({packed}), "
                "packed as a kernel of this device takes them; read the checkpoint, or capture "
                "what the module returns"
            )
        value = getattr(module, last, None)
        if not isinstance(value, torch.Tensor):
            near = ", ".join(n for n, _ in module.named_parameters(recurse=False)) or "none"
            raise AttributeError(f"{name}: no parameter of that name; there are: {near}")
        if not value.numel():
            raise UnsupportedError(
                f"{name}: vLLM has packed it away for the kernel of this device and keeps no copy"
            )
        return module, value.detach()


def _whole(name: str, module: Any, shares: list[torch.Tensor], ranks: int) -> torch.Tensor:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    module = getattr(module, "base_layer", module)
    first = shares[0]
    if getattr(module, "tp_size", ranks) == 1:
        return first
    if isinstance(module, VocabParallelEmbedding):
        return _vocabulary(module, shares)
    if isinstance(module, RowParallelLinear) and first.dim() == 2:
        return torch.cat(shares, dim=1)
    if isinstance(module, QKVParallelLinear):
        value_size = getattr(module, "v_head_size", module.head_size)
        sizes = [
            module.num_heads * module.head_size,
            module.num_kv_heads * module.head_size,
            module.num_kv_heads * value_size,
        ]
        every = [1, module.num_kv_head_replicas, module.num_kv_head_replicas]
        return _merged(name, shares, sizes, every)
    if isinstance(module, ColumnParallelLinear):
        outputs = getattr(module, "output_sizes", None)
        sizes = [size // ranks for size in outputs] if outputs else [first.shape[0]]
        return _merged(name, shares, sizes, [1] * len(sizes))
    if all(torch.equal(first, share) for share in shares[1:]):
        return first
    raise UnsupportedError(
        f"{name}: each rank has its own share of it, and how shares of {type(module).__name__} "
        "make up the whole is not known"
    )


def _merged(
    name: str, shares: list[torch.Tensor], sizes: list[int], every: list[int]
) -> torch.Tensor:
    """Parts that lie one behind the other on each rank, each put together over the ranks."""
    if sum(sizes) != shares[0].shape[0]:
        raise UnsupportedError(f"{name}: its shares are not laid out as vLLM's layer says")
    split = [torch.split(share, sizes, dim=0) for share in shares]
    return torch.cat(
        [torch.cat([s[i] for s in split[:: every[i]]], dim=0) for i in range(len(sizes))], dim=0
    )


def _vocabulary(module: Any, shares: list[torch.Tensor]) -> torch.Tensor:
    """Rows of the vocabulary and then of added tokens, without each rank's padding."""
    padded = module.shard_indices.num_org_elements_padded
    original = torch.cat([share[:padded] for share in shares])[: module.org_vocab_size]
    added = torch.cat([share[padded:] for share in shares])[: module.num_added_embeddings]
    return torch.cat([original, added]) if len(added) else original


def _over_stages(value: torch.Tensor | None) -> torch.Tensor | None:
    """What a pipeline stage has, on all of them; None where none has it."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return value
    have: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(have, value is not None, group=group.cpu_group)
    if not any(have):
        return None
    owner = have.index(True)
    sent = {"value": value} if value is not None and group.rank_in_group == owner else None
    received = group.broadcast_tensor_dict(sent, src=owner)
    return value if value is not None else received["value"]


_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
"""Names of the norm behind the last layer, in the module that has the layers."""

_BEHIND = ("project_out", "proj_out", "output_projection")
"""Of what some models have between that norm and the unembedding."""


class VocabHead:
    """Applies final norm and unembedding to rows, with soft cap and scale as the model does."""

    def __init__(self, model: Any, layers: list[nn.Module | None]) -> None:
        self._norm = final_norm(model, layers)
        self._processor = logits_processor(model)
        # With LoRA another module stands around it, which adds what adapters make of a step's rows.
        around = [m for m in model.modules() if getattr(m, "base_layer", None) is self._processor]
        self._wrapper: Any = around[0] if around else None
        self._compute = model.compute_logits
        self._ranks = Ranks.here()
        self.vocab = int(self._processor.org_vocab_size)
        self.n_ranks = self._ranks.n

    def say(self, text: str) -> list[str]:
        return self._ranks.say(text)

    def logits(self, rows: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            with self._own_part():
                if self.n_ranks == 1:
                    whole: torch.Tensor = self._compute(self._norm(rows()))
                    return whole[:, : self.vocab]
                parts = self._ranks.gather(lambda: [self._compute(self._norm(rows()))])[0]
            # (ranks, rows, part): padding of the vocabulary is at its end.
            return parts.transpose(0, 1).flatten(1)[:, : self.vocab]

    @contextmanager
    def _own_part(self) -> Iterator[None]:
        """Have the model compute this rank's part, without adapters."""
        # What may fail comes before the ranks meet.
        self._processor._gather_logits = lambda logits: logits
        if self._wrapper is not None:
            self._wrapper._get_logits = self._without_adapter
        try:
            yield
        finally:
            del self._processor._gather_logits
            if self._wrapper is not None:
                del self._wrapper._get_logits

    def _without_adapter(self, hidden: torch.Tensor, head: Any, *rest: Any) -> Any:
        """What the wrapped module makes of rows."""
        return self._processor._get_logits(hidden, getattr(head, "base_layer", head), *rest)


def final_norm(model: nn.Module, layers: list[nn.Module | None]) -> nn.Module:
    """The norm between the last decoder layer and the unembedding.

    It is the one child with a known name of the module that has the list of layers.
    """
    for parent in model.modules():
        lists = [c for c in parent.children() if isinstance(c, nn.ModuleList) and len(c)]
        if not any(layers[-1] is one[-1] for one in lists):
            continue
        found = {n: c for n, c in parent.named_children() if n in _NORMS}
        behind = [n for n in _BEHIND if isinstance(getattr(parent, n, None), nn.Module)]
        if len(found) == 1 and not behind:
            return next(iter(found.values()))
        raise UnsupportedError(
            f"the final norm of {type(model).__name__} is not known: {type(parent).__name__} has "
            f"{', '.join([*found, *behind]) or 'none'} behind its layers, and known is one of "
            f"{', '.join(_NORMS)}; capture the rows instead"
        )
    raise UnsupportedError(
        f"the final norm of {type(model).__name__} is not known: no module has its decoder layers "
        "as a list; capture the rows instead"
    )


def logits_processor(model: nn.Module) -> Any:
    """What makes logits of the unembedding's results: soft cap, scale, and the ranks' parts."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(found) != 1 or not hasattr(model, "compute_logits"):
        raise UnsupportedError(
            f"the unembedding of {type(model).__name__} is not known: {len(found)} logits "
            "processors, and one is needed; capture the rows instead"
        )
    return found[0]
