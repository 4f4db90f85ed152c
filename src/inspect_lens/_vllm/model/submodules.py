"""The inside of a decoder block: its attention and feed-forward modules, and what they return.

They are told by structure, not by name: the attention module is the one child that holds an
attention or state-space layer, the feed-forward module the one other child that holds linear
or expert layers. A block where that is not one module is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import Site

from .find_layers import as_rows, describe, has_mixer

__all__ = [
    "BlockInput",
    "block_module",
    "check_reduced",
    "decoder_attention",
    "input_of",
    "is_linear",
    "module_output",
    "projections",
    "written_argument",
]

_HINT = "leave the site out of INSPECT_LENS_SITES to run this model without it"


def block_module(block: nn.Module, site: Site) -> nn.Module:
    """Find the module of a block whose output is a site.

    Args:
        block: a decoder layer.
        site: `attn_out` or `mlp_out`.

    Returns:
        The module.

    Raises:
        UnsupportedError: none fits, or more than one does.
    """
    children = dict(block.named_children())
    if site == "attn_out":
        found = {name: child for name, child in children.items() if has_mixer(child)}
        if len(found) == 1:
            mixer = next(iter(found.values()))
            # Where the kernel and its projections lie in the block itself, the last projection
            # ends the attention part.
            ends = [child for child in children.values() if _is_row_parallel(child)]
            if not _is_kernel(mixer):
                return mixer
            if len(ends) == 1:
                return ends[0]
        raise _unclear(block, site, "a module with its attention or state-space layer", found)
    found = {
        name: child
        for name, child in children.items()
        if not has_mixer(child) and _has_weights(child)
    }
    modules = [child for child in found.values() if not is_linear(child)]
    if len(modules) == 1:
        return modules[0]
    # A feed-forward part without a module of its own, as in OPT: two projections, of which
    # the last one ends it.
    ends = [child for child in found.values() if _is_row_parallel(child)]
    if not modules and len(ends) == 1:
        return ends[0]
    raise _unclear(block, site, "a feed-forward or mixture-of-experts module", found)


def decoder_attention(block: nn.Module) -> Any:
    """The one softmax attention layer of a block, vLLM's own; None where there is none, or more."""
    from vllm.model_executor.layers.attention import Attention

    found = [
        module
        for module in block.modules()
        if isinstance(module, Attention) and getattr(module, "attn_type", "decoder") == "decoder"
    ]
    return found[0] if len(found) == 1 else None


def projections(part: nn.Module) -> list[nn.Module]:
    """Linear layers of a block's part that end it: their inputs are split over ranks.

    Of one under LoRA it is the wrapper, which is what is called.
    """
    found = [m for m in part.modules() if _is_row_parallel(m)]
    wrapped = {id(_base(m)) for m in found if _base(m) is not m}
    return [m for m in found if id(m) not in wrapped]


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """First argument of a call, whatever its name."""
    return next(iter((*args, *kwargs.values())), None)


def check_reduced(block: nn.Module, module: nn.Module, site: Site) -> None:
    """Refuse an attention module that leaves its sum over tensor-parallel ranks to others.

    What a feed-forward module leaves open shows in its values; see the start-up check.

    Raises:
        UnsupportedError: the module returns one rank's share.
    """
    for name, part in module.named_modules():
        if _is_row_parallel(part) and not getattr(_base(part), "reduce_results", True):
            raise UnsupportedError(
                f"INSPECT_LENS_SITES: {site} of {type(block).__name__} with tensor parallelism: "
                f"{type(module).__name__}.{name} returns one rank's share of a sum that the block "
                f"completes later; {_HINT}, or use one GPU per stage"
            )


def written_argument(module: nn.Module) -> int | None:
    """Index of the argument `output` that some modules write into instead of returning it."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index("output") if "output" in names else None


def module_output(module: nn.Module, written: Any, output: Any, site: Site) -> torch.Tensor:
    """Read what a block's module returned.

    Args:
        module: the module, for the message.
        written: its argument `output`, if it has one.
        output: what it returned.
        site: for the message.

    Returns:
        (tokens, hidden).

    Raises:
        UnsupportedError: another layout. This happens while the engine starts.
    """
    found = written if output is None else output
    if isinstance(found, tuple) and found and all(item is None for item in found[1:]):
        found = found[0]
    rows = as_rows(found)
    if rows is not None:
        return rows
    raise UnsupportedError(
        f"INSPECT_LENS_SITES: {site}: inspect_lens does not know the output of "
        f"{type(module).__name__}: {describe(output)}; known are a (tokens, hidden) tensor, a "
        f"tuple of it and None, and an argument 'output'; {_HINT}"
    )


class BlockInput:
    """Reads the residual stream from the arguments of a block's forward, by their names."""

    def __init__(self, block: nn.Module) -> None:
        """Look the arguments up.

        Raises:
            UnsupportedError: the forward names no `hidden_states`.
        """
        self._block = type(block).__name__
        self._names = list(inspect.signature(block.forward).parameters)
        if "hidden_states" not in self._names:
            raise UnsupportedError(
                f"INSPECT_LENS_SITES: resid_pre: {self._block}.forward takes "
                f"{', '.join(self._names)}, and inspect_lens reads hidden_states and residual; "
                f"{_HINT}"
            )

    def read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read one call.

        Returns:
            `(hidden, residual)`: the stream is their sum, or `hidden` alone.

        Raises:
            UnsupportedError: the arguments are something else.
        """
        hidden = self._argument("hidden_states", args, kwargs)
        residual = self._argument("residual", args, kwargs)
        rows, added = as_rows(hidden), as_rows(residual)
        if rows is not None and residual is None:
            return rows, None
        if rows is not None and added is not None and added.shape == rows.shape:
            return rows, added
        raise UnsupportedError(
            f"INSPECT_LENS_SITES: resid_pre: {self._block} is called with hidden_states="
            f"{describe(hidden)} and residual={describe(residual)}; known are (tokens, hidden) "
            f"tensors, and None for residual; {_HINT}"
        )

    def replace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One call with other values for some arguments.

        Args:
            args: of the call.
            kwargs: of the call.
            changed: values by name, for arguments that the call has.

        Returns:
            The arguments.
        """
        listed, named = list(args), dict(kwargs)
        for name, value in changed.items():
            if name in named:
                named[name] = value
            else:
                listed[self._names.index(name)] = value
        return tuple(listed), named

    def argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One argument of a call as it is; None where the call has none of the name."""
        return self._argument(name, args, kwargs)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        index = self._names.index(name) if name in self._names else len(args)
        return args[index] if index < len(args) else None


def _is_kernel(module: nn.Module) -> bool:
    """Whether a module is the bare attention kernel, whose projections lie elsewhere."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return isinstance(module, AttentionLayerBase) and not isinstance(module, MambaBase)


def _has_weights(module: nn.Module) -> bool:
    """Whether a module is or holds linear or expert layers.

    Their parameters may have been packed away, but each has its way to multiply by them.
    """
    return any(getattr(m, "quant_method", None) is not None for m in module.modules())


def _base(module: nn.Module) -> nn.Module:
    """The linear layer inside a LoRA wrapper, or the module itself."""
    base = getattr(module, "base_layer", module)
    return base if isinstance(base, nn.Module) else module


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of vLLM."""
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(_base(module), LinearBase)


def _is_row_parallel(module: nn.Module) -> bool:
    from vllm.model_executor.layers.linear import RowParallelLinear

    return isinstance(_base(module), RowParallelLinear)


def _unclear(
    block: nn.Module, site: Site, wanted: str, found: Mapping[str, nn.Module]
) -> UnsupportedError:
    names = ", ".join(f"{name}: {type(child).__name__}" for name, child in found.items())
    return UnsupportedError(
        f"INSPECT_LENS_SITES: {site}: {type(block).__name__} has to have one child that is "
        f"{wanted}; found: {names or 'none'}; {_HINT}"
    )
