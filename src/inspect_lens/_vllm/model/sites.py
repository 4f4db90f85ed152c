"""Where each site of a decoder block is: which module, and what of it is read.

A site has a locator: given a block, it names a module and how to read the site's rows from one call
of it. Locators look at structure; where a block has not what they look for, it is refused by name.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import Site

from .find_layers import (
    BlockInput,
    as_rows,
    block_module,
    decoder_attention,
    describe,
    input_of,
    is_linear,
    layout_here,
    module_output,
    projections,
    split_output,
    written_argument,
)
from .residual_layout import forward_of, terms_of

Rows = tuple[torch.Tensor, torch.Tensor | None]
"""What a tap gets: rows, and the other half of the stream where it has two."""

_HINT = "leave the site out of INSPECT_LENS_SITES, or name layers that have it"


@dataclass(frozen=True)
class Place:
    """Where a site is in one block."""

    module: nn.Module
    read: Callable[[tuple[Any, ...], Mapping[str, Any], Any], Rows]
    """The rows of one call, from its arguments and what it returned."""
    is_input: bool
    """Whether they are there before the call; nothing has been returned then."""


def _resid_pre(block: nn.Module, width: int) -> Place:
    reader = BlockInput(block)
    return Place(block, lambda args, kwargs, _: reader.read(args, kwargs), True)


def _resid_post(block: nn.Module, width: int) -> Place:
    layout = layout_here(block)
    return Place(block, lambda _args, _kwargs, output: split_output(block, output, layout), False)


def _output(site: Site, block: nn.Module, width: int) -> Place:
    module = block_module(block, site)
    index = written_argument(module)

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Rows:
        written = kwargs.get("output")
        if index is not None and index < len(args):
            written = args[index]
        return module_output(module, written, output, site), None

    return Place(module, read, False)


def _resid_mid(block: nn.Module, width: int) -> Place:
    feed_forward = block_module(block, "mlp_out")
    name = next(n for n, child in block.named_children() if child is feed_forward)
    forward = forward_of(type(block))
    found = None if forward is None else middle_of_forward(forward, name)
    if found is None:
        raise UnsupportedError(
            f"INSPECT_LENS_SITES: resid_mid: {type(block).__name__} has no one place where the "
            "stream lies between attention and feed-forward module, or its source does not show "
            f"it; {_HINT}"
        )
    module = block.get_submodule(found)

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> Rows:
        given = [*args, *kwargs.values()]
        rows = as_rows(given[0]) if given else None
        added = as_rows(given[1]) if len(given) > 1 else None
        is_pair = added is not None and rows is not None and added.shape == rows.shape
        if rows is None or not (is_pair or len(given) == 1 or given[1] is None):
            raise UnsupportedError(
                f"INSPECT_LENS_SITES: resid_mid: {type(module).__name__} is called with "
                f"{describe(tuple(given))}; known are one or two (tokens, hidden) tensors; {_HINT}"
            )
        return rows, added

    return Place(module, read, True)


_ARGUMENTS: Mapping[Site, tuple[int, str]] = {"q": (0, "query"), "k": (1, "key"), "v": (2, "value")}
"""Arguments of vLLM's attention layer."""


def _attention_input(site: Site, block: nn.Module, width: int) -> Place:
    module = decoder_attention(block)
    if module is None:
        raise _missing(block, site, "softmax attention with keys of its own")
    index, name = _ARGUMENTS[site]

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> Rows:
        given = kwargs.get(name, args[index] if index < len(args) else None)
        return _flat(given, width, module, site), None

    return Place(module, read, True)


def _projected(site: Site, block: nn.Module, width: int) -> Place:
    if site == "z" and decoder_attention(block, or_latent=True) is None:
        raise _missing(block, site, "softmax attention")
    part = block_module(block, "attn_out" if site == "z" else "mlp_out")
    found = projections(part)
    if len(found) != 1:
        what = "output projection" if site == "z" else "down projection of its own"
        raise _missing(block, site, f"one {what}")
    module = found[0]

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> Rows:
        return _flat(input_of(args, kwargs), width, module, site), None

    return Place(module, read, True)


def _router_logits(block: nn.Module, width: int) -> Place:
    part = block_module(block, "mlp_out")
    # Names of experts' own layers have the experts in them, and these may be as wide.
    found = [
        module
        for name, module in part.named_modules()
        if is_linear(module) and getattr(module, "output_size", 0) == width
        if "expert" not in name
    ]
    if len(found) != 1:
        raise _missing(block, "router_logits", f"one router of {width} experts")
    module = found[0]

    def read(_args: tuple[Any, ...], _kwargs: Mapping[str, Any], output: Any) -> Rows:
        return _flat(output, width, module, "router_logits"), None

    return Place(module, read, False)


Locator = Callable[[nn.Module, int], Place]
"""From a block, and the width of the site's rows on one rank, to the place."""

LOCATORS: Mapping[Site, Locator] = MappingProxyType(
    {
        "resid_pre": _resid_pre,
        "q": partial(_attention_input, "q"),
        "k": partial(_attention_input, "k"),
        "v": partial(_attention_input, "v"),
        "z": partial(_projected, "z"),
        "attn_out": partial(_output, "attn_out"),
        "resid_mid": _resid_mid,
        "router_logits": _router_logits,
        "mlp_hidden": partial(_projected, "mlp_hidden"),
        "mlp_out": partial(_output, "mlp_out"),
        "resid_post": _resid_post,
    }
)
"""By site; each raises `UnsupportedError` where a block has not what it looks for."""


def ctl_name(site: Site) -> str:
    """Name of the buffer that a tapped module has for a site."""
    return f"_inspect_lens_{site}"


def middle_of_forward(forward: ast.FunctionDef, feed_forward: str) -> str | None:
    """The child of a block that is called with the stream between attention and feed-forward.

    It is the norm in front of the feed-forward module, or that module itself. What it is called
    with has to be a sum, on every path, of something that came in and of something that was made.
    """
    body = forward.body
    calls = [_call_of(node) for node in body]
    at = next((i for i, (name, _) in enumerate(calls) if name == feed_forward), None)
    if at is None:
        return None
    name, given = calls[at]
    if not given or not isinstance(given[0], ast.Name):
        return None
    for i in reversed(range(at)):
        if given[0].id in _assigned(body[i]):
            if calls[i][0]:
                at, (name, given) = i, calls[i]
            break
    terms = terms_of(forward, body[:at], given[:2])
    if not terms:
        return None
    is_sum = all(
        any(t[0] == "<" for t in found) and any(t[0] != "<" for t in found) for found in terms
    )
    return name if is_sum else None


def _call_of(node: ast.stmt) -> tuple[str, list[ast.expr]]:
    """Child that a statement calls, as in `x = self.child(…)`, and what with; else no name."""
    value = getattr(node, "value", None)
    if (
        isinstance(node, ast.Assign | ast.Return)
        and isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Name)
        and value.func.value.id == "self"
    ):
        return value.func.attr, [*value.args, *(k.value for k in value.keywords)]
    return "", []


def _assigned(node: ast.stmt) -> set[str]:
    """Names that a statement gives a value, in its branches, too."""
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in stored if isinstance(n.ctx, ast.Store)}


def _flat(value: Any, width: int, module: nn.Module, site: Site) -> torch.Tensor:
    """(tokens, width), sharing memory, of what has another axis for heads, or one of one."""
    if isinstance(value, tuple) and value and all(item is None for item in value[1:]):
        value = value[0]
    if isinstance(value, torch.Tensor):
        is_by_head = value.dim() == 3 and value.shape[1] * value.shape[2] == width
        if not is_by_head and value.dim() == 3 and value.shape[0] == 1:
            value = value[0]
        if is_by_head or (value.dim() == 2 and value.shape[1] == width):
            _check_in_a_row(value, module, site)
            rows: torch.Tensor = value.flatten(1)
            return rows
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else describe(value)
    raise UnsupportedError(
        f"INSPECT_LENS_SITES: {site}: {type(module).__name__} has {shape} in the place of rows "
        f"of {width} numbers, which the model's configuration says; {_HINT}"
    )


def _check_in_a_row(value: torch.Tensor, module: nn.Module, site: Site) -> None:
    """Refuse rows whose numbers do not lie behind one another: an edit would reach a copy alone."""
    wanted = 1
    for size, stride in reversed([*zip(value.shape[1:], value.stride()[1:], strict=True)]):
        if size != 1 and stride != wanted:
            raise UnsupportedError(
                f"INSPECT_LENS_SITES: {site}: {type(module).__name__} has {tuple(value.shape[1:])} "
                f"numbers of a token, which lie {value.stride()[1:]} apart in memory and not "
                f"behind one another, so that an edit would reach a copy of them; {_HINT}"
            )
        wanted *= size


def _missing(block: nn.Module, site: Site, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"INSPECT_LENS_SITES: {site}: {type(block).__name__} has not {what}; {_HINT}"
    )


logger = logging.getLogger("vllm.inspect_lens")


def attention_facts(
    blocks: Sequence[nn.Module | None], n_kv_heads: int
) -> dict[int, dict[str, Any]]:
    """Read the attention layers of a worker; all tensor-parallel ranks have to, together."""
    found = {}
    for layer, block in enumerate(blocks):
        module = None if block is None else decoder_attention(block)
        if module is not None:
            try:
                found[layer] = _facts(module, n_kv_heads)
            except Exception as error:  # noqa: BLE001 - an engine starts without it, too
                logger.warning("inspect_lens: no output_qk at layer %d: %s", layer, error)
    return found


def _facts(module: Any, n_kv_heads: int) -> dict[str, Any]:
    impl, group = module.impl, _tp()
    return {
        "layer_name": str(getattr(module, "layer_name", "")),
        "scale": float(getattr(impl, "scale", None) or module.head_size**-0.5),
        "logits_soft_cap": float(getattr(impl, "logits_soft_cap", None) or 0.0),
        "sliding_window": _window(getattr(module, "sliding_window", None)),
        "alibi_slopes": _over_heads(getattr(impl, "alibi_slopes", None), group),
        "sinks": _over_heads(getattr(impl, "sinks", None), group),
        # Llama 4 and its like: keys of the query's own chunk only.
        "attention_chunk_size": getattr(module, "attention_chunk_size", None),
        "use_alibi_sqrt": bool(getattr(module, "use_alibi_sqrt", False)),
        "num_heads": int(module.num_heads) * group.world_size,
        "num_kv_heads": n_kv_heads or int(module.num_kv_heads),
        "head_size": int(module.head_size),
    }


def _tp() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def _window(size: int | None) -> list[int]:
    """A sliding window of so many tokens as (left, right), -1 for no limit."""
    return [-1, -1] if size is None or size < 0 else [int(size) - 1, 0]


def _over_heads(value: Any, group: Any) -> list[float] | None:
    """One number per query head, over all tensor-parallel ranks."""
    if value is None:
        return None
    numbers = torch.as_tensor(value, dtype=torch.float32)
    if group.world_size > 1:
        numbers = group.all_gather(numbers.to(group.device).contiguous(), dim=0)
    found: list[float] = numbers.cpu().tolist()
    return found
