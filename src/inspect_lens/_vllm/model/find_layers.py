"""Where a model's decoder layers are, and each site of them: which module, and what of it is read.

A site has a locator: given a block, it names a module and how to read the site's rows from one call
of it. Locators look at structure; where a block has not what they look for, it is refused by name.
"""

from __future__ import annotations

import ast
import inspect
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

from .residual_layout import Layout, forward_of, layout_of, terms_of

_HINT = (
    "name the layers by hand with INSPECT_LENS_LAYER_PATH, or set INSPECT_LENS_DISABLE=1 to run "
    "this model without the lens"
)
_NO_LAYER = (
    "a stage of the pipeline has no decoder layer; start with fewer stages, or give each one layer "
    "or more in VLLM_PP_LAYER_PARTITION"
)
_SITE_HINT = (
    "leave the site out of INSPECT_LENS_SITES, or name layers that have it in INSPECT_LENS_LAYERS"
)
_INDEX = "{i}"
_NAMED = "_inspect_lens_named"
"""Attribute of a layer that was named by hand."""


def decoder_layers(model: nn.Module, n_layers: int, path: str = "") -> list[nn.Module | None]:
    """Find the decoder layers of a loaded model, or take those of a path with `{i}` in it.

    Without a path they are the one list of modules with `n_layers` entries in which the entries of
    this pipeline stage hold attention or state-space layers. In some hybrids a part of the entries
    has a feed-forward module only; a list where all have one is preferred. Lists of the same
    layers, as Gemma 4 has them, are one list.
    """
    if path:
        named = _named_layers(model, n_layers, path)
        if all(layer is None for layer in named):
            raise UnsupportedError(_NO_LAYER)
        return named
    found: dict[str, list[nn.Module | None]] = {}
    mixed: dict[str, list[nn.Module | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            layers = [None if _is_elsewhere(layer) else layer for layer in module]
            mixers = [_has_mixer(layer) for layer in layers if layer is not None]
            kind = found if all(mixers) else mixed
            # Modules are equal only to themselves.
            if any(mixers) and layers not in kind.values():
                kind[name] = layers
    found = found or mixed
    if not found and any(
        isinstance(module, nn.ModuleList)
        and len(module) == n_layers
        and all(_is_elsewhere(layer) for layer in module)
        for module in model.modules()
    ):
        raise UnsupportedError(_NO_LAYER)
    if len(found) != 1:
        raise UnsupportedError(
            f"inspect_lens cannot tell the decoder layers of {type(model).__name__}: "
            f"{len(found)} lists of {n_layers} layers with attention ({sorted(found)}); {_HINT}"
        )
    return next(iter(found.values()))


def _named_layers(model: nn.Module, n_layers: int, path: str) -> list[nn.Module | None]:
    """The layers of a path; whether the stream runs through them is for the start-up check."""
    what = f"INSPECT_LENS_LAYER_PATH={path!r}"
    if _INDEX not in path:
        raise UnsupportedError(
            f"{what}: write {_INDEX} where the index of the layer is, as in 'model.layers.{_INDEX}'"
        )
    layers: list[nn.Module | None] = []
    for index in range(n_layers):
        try:
            layer = model.get_submodule(path.replace(_INDEX, str(index)))
        except AttributeError:
            lists = [
                f"{name}.{_INDEX}"
                for name, module in model.named_modules()
                if isinstance(module, nn.ModuleList) and len(module) == n_layers
            ]
            raise UnsupportedError(
                f"{what}: {type(model).__name__} has {n_layers} layers, and nothing under the path "
                f"of layer {index}; lists of {n_layers} modules: {', '.join(lists) or 'none'}"
            ) from None
        layers.append(None if _is_elsewhere(layer) else layer)
    here = [layer for layer in layers if layer is not None]
    # Modules are equal only to themselves.
    if len(set(here)) != len(here):
        raise UnsupportedError(f"{what}: two of its layers are one module")
    for layer in here:
        setattr(layer, _NAMED, True)
    return layers


def layout_here(layer: nn.Module) -> Layout:
    """What a decoder layer returns, by its source.

    Where the source does not show it and the layer was named by hand, a pair counts as two halves
    of the stream, and the start-up check tells whether it is so.
    """
    layout = layout_of(type(layer))
    return "fused" if layout == "unknown" and hasattr(layer, _NAMED) else layout


def _is_elsewhere(layer: nn.Module) -> bool:
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(layer, PPMissingLayer)


def _has_mixer(layer: nn.Module) -> bool:
    """Whether a module is or holds an attention or state-space layer."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return any(isinstance(module, AttentionLayerBase) for module in layer.modules())


def split_output(
    layer: nn.Module, output: Any, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read a decoder layer's output as the two halves of the residual stream."""
    if isinstance(output, tuple) and len(output) == 2:
        hidden, residual = as_rows(output[0]), output[1]
    else:
        hidden, residual = as_rows(output), None
    if hidden is not None:
        if residual is None or layout == "stale":
            return hidden, None
        added = as_rows(residual)
        if added is not None and added.shape == hidden.shape and layout == "fused":
            return hidden, added
    raise UnsupportedError(
        f"inspect_lens does not know the output of {type(layer).__name__}: {_describe(output)}, "
        f"and its source reads as {layout!r}; known are a (tokens, hidden) tensor, (hidden, None), "
        f"and (hidden, residual) where the source shows whether their sum is the stream; {_HINT}"
    )


def as_rows(value: Any) -> torch.Tensor | None:
    """A value as (tokens, hidden), sharing its memory; None when it is something else.

    Models that vLLM takes over from transformers keep a batch axis of one.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() == 2:
            return value
        if value.dim() == 3 and value.shape[0] == 1:
            return value[0]
    return None


def _describe(output: Any) -> str:
    if isinstance(output, tuple):
        return "(" + ", ".join(_describe(item) for item in output) + ")"
    if isinstance(output, torch.Tensor):
        return f"{output.dim()}-dimensional tensor"
    return type(output).__name__


def block_module(block: nn.Module, site: Site) -> nn.Module:
    """Find the module of a block whose output is a site."""
    children = dict(block.named_children())
    if site == "attn_out":
        found = {name: child for name, child in children.items() if _has_mixer(child)}
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
        if not _has_mixer(child) and _has_weights(child)
    }
    modules = [child for child in found.values() if not _is_linear(child)]
    if len(modules) == 1:
        return modules[0]
    # A feed-forward part without a module of its own, as in OPT: two projections, of which
    # the last one ends it.
    ends = [child for child in found.values() if _is_row_parallel(child)]
    if not modules and len(ends) == 1:
        return ends[0]
    raise _unclear(block, site, "a feed-forward or mixture-of-experts module", found)


def _decoder_attention(block: nn.Module, *, or_latent: bool = False) -> Any:
    """The one softmax attention layer of a block, vLLM's own; None where there is none, or more."""
    # One with latent attention is given no keys per head, so it is left out unless it is asked for.
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    def is_wanted(module: nn.Module) -> bool:
        is_latent = isinstance(module, AttentionLayerBase) and hasattr(module, "kv_lora_rank")
        return isinstance(module, Attention) or (or_latent and is_latent)

    found = [
        module
        for module in block.modules()
        if is_wanted(module) and getattr(module, "attn_type", "decoder") == "decoder"
    ]
    return found[0] if len(found) == 1 else None


def _projections(part: nn.Module) -> list[nn.Module]:
    """Linear layers of a block's part that end it: their inputs are split over ranks."""
    # Of one under LoRA it is the wrapper, which is what is called.
    found = [m for m in part.modules() if _is_row_parallel(m)]
    wrapped = {id(_base(m)) for m in found if _base(m) is not m}
    return [m for m in found if id(m) not in wrapped]


def check_reduced(block: nn.Module, module: nn.Module, site: Site) -> None:
    """Refuse an attention module that leaves its sum over tensor-parallel ranks to others.

    What a feed-forward module leaves open shows in its values; see the start-up check.
    """
    for name, part in module.named_modules():
        if _is_row_parallel(part) and not getattr(_base(part), "reduce_results", True):
            raise UnsupportedError(
                f"INSPECT_LENS_SITES: {site} of {type(block).__name__} with tensor parallelism: "
                f"{type(module).__name__}.{name} returns one rank's share of a sum that the block "
                f"completes later; {_SITE_HINT}, or use one GPU per stage"
            )


def _written_argument(module: nn.Module) -> int | None:
    """Index of the argument `output` that some modules write into instead of returning it."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index("output") if "output" in names else None


def module_output(module: nn.Module, written: Any, output: Any, site: Site) -> torch.Tensor:
    """Read what a block's module returned."""
    found = written if output is None else output
    if isinstance(found, tuple) and found and all(item is None for item in found[1:]):
        found = found[0]
    rows = as_rows(found)
    if rows is not None:
        return rows
    raise UnsupportedError(
        f"INSPECT_LENS_SITES: {site}: inspect_lens does not know the output of "
        f"{type(module).__name__}: {_describe(output)}; known are a (tokens, hidden) tensor, a "
        f"tuple of it and None, and an argument 'output'; {_SITE_HINT}"
    )


class BlockInput:
    """Reads the residual stream from the arguments of a block's forward, by their names."""

    def __init__(self, block: nn.Module) -> None:
        self._block = type(block).__name__
        self._names = list(inspect.signature(block.forward).parameters)
        if "hidden_states" not in self._names:
            raise UnsupportedError(
                f"INSPECT_LENS_SITES: resid_pre: {self._block}.forward takes "
                f"{', '.join(self._names)}, and inspect_lens reads hidden_states and residual; "
                f"{_SITE_HINT}"
            )

    def read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self._argument("hidden_states", args, kwargs)
        residual = self._argument("residual", args, kwargs)
        rows, added = as_rows(hidden), as_rows(residual)
        if rows is not None and residual is None:
            return rows, None
        if rows is not None and added is not None and added.shape == rows.shape:
            return rows, added
        raise UnsupportedError(
            f"INSPECT_LENS_SITES: resid_pre: {self._block} is called with hidden_states="
            f"{_describe(hidden)} and residual={_describe(residual)}; known are "
            f"(tokens, hidden) tensors, and None for residual; {_SITE_HINT}"
        )

    def replace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One call with other values for some arguments."""
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

    is_attention = isinstance(module, AttentionLayerBase) and not isinstance(module, MambaBase)
    return is_attention and not any(map(_is_row_parallel, module.modules()))


def has_states(model: nn.Module) -> bool:
    """Whether layers keep a state per sequence, as state-space models do, that can be zeroed."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    found = [module for module in model.modules() if isinstance(module, MambaBase)]
    return bool(found) and not any(getattr(module, "use_replayssm", False) for module in found)


def _has_weights(module: nn.Module) -> bool:
    """Whether a module is or holds linear or expert layers."""
    # Their parameters may have been packed away, but each has its way to multiply by them.
    return any(getattr(m, "quant_method", None) is not None for m in module.modules())


def _base(module: nn.Module) -> nn.Module:
    """The linear layer inside a LoRA wrapper, or the module itself."""
    base = getattr(module, "base_layer", module)
    return base if isinstance(base, nn.Module) else module


def _is_linear(module: nn.Module) -> bool:
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
        f"{wanted}; found: {names or 'none'}; {_SITE_HINT}"
    )


Rows = tuple[torch.Tensor, torch.Tensor | None]
"""What a tap gets: rows, and the other half of the stream where it has two."""


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
    index = _written_argument(module)

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
            f"it; {_SITE_HINT}"
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
                f"{_describe(tuple(given))}; known are one or two (tokens, hidden) tensors; "
                f"{_SITE_HINT}"
            )
        return rows, added

    return Place(module, read, True)


_ARGUMENTS: Mapping[Site, tuple[int, str]] = {"q": (0, "query"), "k": (1, "key"), "v": (2, "value")}
"""Arguments of vLLM's attention layer."""


def _attention_input(site: Site, block: nn.Module, width: int) -> Place:
    module = _decoder_attention(block)
    if module is None:
        raise _missing(block, site, "softmax attention with keys of its own")
    index, name = _ARGUMENTS[site]

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> Rows:
        given = kwargs.get(name, args[index] if index < len(args) else None)
        return _flat(given, width, module, site), None

    return Place(module, read, True)


def _projected(site: Site, block: nn.Module, width: int) -> Place:
    if site == "z" and _decoder_attention(block, or_latent=True) is None:
        raise _missing(block, site, "softmax attention")
    part = block_module(block, "attn_out" if site == "z" else "mlp_out")
    found = _projections(part)
    if len(found) != 1:
        what = "output projection" if site == "z" else "down projection of its own"
        raise _missing(block, site, f"one {what}")
    module = found[0]

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> Rows:
        first = next(iter((*args, *kwargs.values())), None)
        return _flat(first, width, module, site), None

    return Place(module, read, True)


def _router_logits(block: nn.Module, width: int) -> Place:
    part = block_module(block, "mlp_out")
    # Names of experts' own layers have the experts in them, and these may be as wide.
    found = [
        module
        for name, module in part.named_modules()
        if _is_linear(module) and getattr(module, "output_size", 0) == width
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
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else _describe(value)
    raise UnsupportedError(
        f"INSPECT_LENS_SITES: {site}: {type(module).__name__} has {shape} in the place of rows "
        f"of {width} numbers, which the model's configuration says; {_SITE_HINT}"
    )


def _check_in_a_row(value: torch.Tensor, module: nn.Module, site: Site) -> None:
    """Refuse rows whose numbers do not lie behind one another: an edit would reach a copy alone."""
    wanted = 1
    for size, stride in reversed([*zip(value.shape[1:], value.stride()[1:], strict=True)]):
        if size != 1 and stride != wanted:
            raise UnsupportedError(
                f"INSPECT_LENS_SITES: {site}: {type(module).__name__} has {tuple(value.shape[1:])} "
                f"numbers of a token, which lie {value.stride()[1:]} apart in memory and not "
                f"behind one another, so that an edit would reach a copy of them; {_SITE_HINT}"
            )
        wanted *= size


def _missing(block: nn.Module, site: Site, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"INSPECT_LENS_SITES: {site}: {type(block).__name__} has not {what}; {_SITE_HINT}"
    )


logger = logging.getLogger("vllm.inspect_lens")


def attention_facts(
    blocks: Sequence[nn.Module | None], n_kv_heads: int
) -> dict[int, dict[str, Any]]:
    """Read the attention layers of a worker; all tensor-parallel ranks have to, together."""
    found = {}
    for layer, block in enumerate(blocks):
        module = None if block is None else _decoder_attention(block)
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
