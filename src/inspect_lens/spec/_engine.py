"""What an engine has and bears: sites, layers, width, and the tensors that it can use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

from pydantic import BeforeValidator, ValidationInfo

from inspect_lens.errors import SpecError, UnsupportedError

from ._tensor import JudgeShape
from ._values import Value

__all__ = [
    "BLOCK_SITES",
    "RESID_POST",
    "SITES",
    "SITE_TABLE",
    "EngineFacts",
    "Numerics",
    "Site",
    "SiteInfo",
    "SiteWidth",
    "TapPoint",
    "TensorLimits",
    "in_site_order",
    "result_name",
    "rows_for",
    "tap_order",
    "tap_point",
    "tap_points",
]

Site = Literal[
    "resid_pre",
    "q",
    "k",
    "v",
    "z",
    "attn_out",
    "resid_mid",
    "router_logits",
    "mlp_hidden",
    "mlp_out",
    "resid_post",
]
"""Where a row comes from; `SITE_TABLE` says what each of them is."""

RESID_POST: Site = "resid_post"
"""The residual stream after a layer, the default site."""


class SiteInfo(NamedTuple):
    """What is known of a site without a model."""

    what: str
    """What a row is."""
    is_wide: bool = True
    """Whether its rows are as wide as the residual stream. Edits act at any site; steering
    vectors, probes and gates only where this is so."""
    is_sharded: bool = False
    """Whether each tensor-parallel rank has a part of the row."""
    choice: str = ""
    """Field of an edit that names parts of a row: `heads`, `neurons`, `experts`, or none."""


SITE_TABLE: Mapping[Site, SiteInfo] = MappingProxyType(
    {
        "resid_pre": SiteInfo("residual stream before the block"),
        "q": SiteInfo("queries of all heads, after rotary embedding", False, True, "heads"),
        "k": SiteInfo("keys of all key heads, after rotary embedding", False, True, "heads"),
        "v": SiteInfo("values of all key heads", False, True, "heads"),
        "z": SiteInfo("results of all heads, before the output projection", False, True, "heads"),
        "attn_out": SiteInfo("output of the attention (or state-space) module"),
        "resid_mid": SiteInfo("residual stream between attention and feed-forward"),
        "router_logits": SiteInfo(
            "logits of a router, one for each expert", False, False, "experts"
        ),
        "mlp_hidden": SiteInfo("neurons: the input of the down projection", False, True, "neurons"),
        "mlp_out": SiteInfo("output of the feed-forward module, or of the experts"),
        "resid_post": SiteInfo("residual stream after the block"),
    }
)
"""All sites, in the order in which a block computes them."""

SITES: tuple[Site, ...] = tuple(SITE_TABLE)
"""Names of all sites, in the order in which a block computes them."""

BLOCK_SITES: tuple[Site, ...] = ("resid_pre", "attn_out", "mlp_out", "resid_post")
"""Sites that every supported model has, or nearly so: those of `INSPECT_LENS_SITES=all`."""


class SiteWidth(NamedTuple):
    """How wide the rows of a site are in one model."""

    site: Site
    width: int
    """Numbers of a row, over all ranks."""
    shards: int = 1
    """Equal parts, in order, that different tensor-parallel ranks have; 1: each rank has it all."""
    heads: int = 0
    """Heads of a row, one behind the other; 0: it has none."""


class TapPoint(NamedTuple):
    """One place in the model that has, or may have, a tap."""

    site: Site
    layer: int
    """0-based global layer number."""


def tap_point(site: Site, layer: int) -> TapPoint:
    """The tap that serves a site.

    The stream before a block is the stream after the block below it, so only the first
    block needs a tap for `resid_pre`.
    """
    if site == "resid_pre" and layer > 0:
        return TapPoint("resid_post", layer - 1)
    return TapPoint(site, layer)


def tap_points(sites: Iterable[Site], layers: Iterable[int]) -> tuple[TapPoint, ...]:
    """The taps that serve some sites of some layers."""
    at = tuple(layers)
    return tuple(sorted({tap_point(site, layer) for site in sites for layer in at}, key=tap_order))


def tap_order(tap: TapPoint) -> tuple[int, int]:
    """Key that sorts taps in the order in which a forward pass meets them."""
    return tap.layer, SITES.index(tap.site)


def in_site_order(sites: Iterable[Site]) -> tuple[Site, ...]:
    """Put sites in the order of a block."""
    named = set(sites)
    return tuple(site for site in SITES if site in named)


def result_name(site: Site) -> str:
    """Name of a site's tensor among the activations of a result."""
    return "residual_stream" if site == RESID_POST else site


_METHODS: Final = {
    **dict.fromkeys(("awq", "awq_marlin"), "auto_awq"),
    **dict.fromkeys(("gptq", "gptq_marlin"), "auto_gptq"),
    "fp8_per_tensor": "fp8",
}
"""vLLM's other names of the same weights."""
_DTYPES: Final = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
"""vLLM's other names of the same dtypes."""


def _dtype(name: Any) -> Any:
    """One name for each dtype; what is no text is for the field to refuse."""
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    return _DTYPES.get(plain, plain) if isinstance(plain, str) else plain


def _method(name: Any) -> Any:
    return _METHODS.get(name, name) if isinstance(name, str) else name


class Numerics(Value):
    """What decides a model's activations beside its weights and its tokens.

    A threshold keeps its rate only for scores with the same numerics, because bfloat16 rounds
    differently from float32, quantised weights are other weights, a quantised cache has other keys
    and values, and kernels change from release to release. Where vLLM has several names for one
    thing, as `awq` and `auto_awq`, they become one here.

    Example:
        ```python
        from inspect_lens.spec import Numerics

        made = Numerics(engine="vllm 0.32.0", dtype="bfloat16")
        here = Numerics(engine="vllm 0.32.0", dtype="float16")
        assert made.differences(here) == ("dtype float16 instead of bfloat16",)
        ```
    """

    engine: str = ""
    """Library that runs the model, with its version: `vllm 0.32.0`."""
    dtype: Annotated[str, BeforeValidator(_dtype)] = ""
    """Data type of the residual stream: `bfloat16`."""
    quantization: Annotated[str | None, BeforeValidator(_method)] = None
    """Method by which the weights were quantised, as the engine names it; None: none, or not known
    where `dtype` is empty."""
    kv_cache_dtype: Annotated[str | None, BeforeValidator(_dtype)] = None
    """Data type of keys and values in the engine's cache, as the engine names it: `fp8`; None: not
    known."""

    def differences(self, here: Numerics) -> tuple[str, ...]:
        """In what other numerics differ from these, as `dtype float16 instead of bfloat16`.

        What one side does not tell is left out.
        """
        names = ("engine", "dtype", "kv_cache_dtype")
        pairs = [(name, getattr(here, name), getattr(self, name)) for name in names]
        if here.dtype and self.dtype:
            now, then = here.quantization or "none", self.quantization or "none"
            pairs.append(("quantization", now, then))
        told = [(name, now, then) for name, now, then in pairs if now and then]
        return tuple(f"{name} {now} instead of {then}" for name, now, then in told if now != then)

    def unlike(self, others: Mapping[str, Numerics | None], *, name: str) -> tuple[str, ...]:
        """How a set that these computed differs from other sets, a sentence for each difference.

        Args:
            others: what computed the other sets, by their names; None: not known.
            name: of the set.
        """
        found: dict[tuple[str, ...], list[str]] = {}
        for other, known in others.items():
            if known and (differs := known.differences(self)):
                found.setdefault(differs, []).append(repr(other))
        return tuple(
            f"{name!r} was computed with {' and '.join(differs)}, unlike {' and '.join(names)}, so "
            "what differs between them may come from that; collect all of them with one engine."
            for differs, names in found.items()
        )


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts of one engine; equal in the front-end and in its workers."""

    model: str
    """Model name or path that the engine was started with."""
    n_layers: int
    """Decoder layers of the model."""
    hidden: int
    """Width of the residual stream."""
    dtype: str
    """dtype of the residual stream, as `float32`, `float16` or `bfloat16`."""
    layers: tuple[int, ...]
    """Layers that were asked to be served, ascending (INSPECT_LENS_LAYERS)."""
    sites: tuple[Site, ...]
    """Sites that were asked to be served, in the order of a block (INSPECT_LENS_SITES)."""
    taps: tuple[TapPoint, ...]
    """Taps of the engine, in the order in which a forward pass meets them: those that serve
    `sites` at `layers`. On a pipeline each stage has those of its layers."""
    max_step_tokens: int
    """Tokens that one step of the engine can hold."""
    ring_rows: int
    """Rows, as wide as the stream, that the capture buffer holds: one for a token at a tap, and
    more where a site is wider."""
    bank_rows: int
    """Vectors that the steering table holds for all running requests together."""
    vllm_version: str
    """Version of vLLM."""
    least_step_tokens: int = 0
    """Tokens to which a step can be cut so that its rows fit the capture buffer; 0: as many as
    `max_step_tokens`, so that it cannot be."""
    ring_row_bytes: int = 0
    """Bytes of INSPECT_LENS_RING_BYTES that a row of the capture buffer takes; 0: not known."""
    is_speculative: bool = False
    """Whether a step may feed draft tokens that are rejected afterwards."""
    allows_code: bool = False
    """Whether requests may bring functions to run (INSPECT_LENS_ALLOW_CODE)."""
    has_latent_attention: bool = False
    """Whether attention keeps no keys per head (MLA)."""
    widths: tuple[SiteWidth, ...] = ()
    """Of the sites that are not as wide as the stream, or that ranks share."""
    ranks: int = 1
    """Tensor-parallel ranks."""
    vocab: int = 0
    """Tokens of the model's vocabulary; 0: not known."""
    no_steering: str = ""
    """Why the engine's requests must not be steered, or empty where they may be."""
    quantization: str | None = None
    """How the weights were quantised, as vLLM names it; None: not at all."""
    kv_cache_dtype: str | None = None
    """Of keys and values in vLLM's cache, as vLLM names it; None: not known."""
    placeholders: frozenset[int] = frozenset()
    """Tokens that only stand where an image, a video or audio is put."""

    @cached_property
    def numerics(self) -> Numerics:
        """What a threshold that acts in this engine should have been set with."""
        return Numerics(
            engine=f"vllm {self.vllm_version}",
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @cached_property
    def _tapped(self) -> frozenset[TapPoint]:
        return frozenset(self.taps)

    def has_tap(self, tap: TapPoint) -> bool:
        """Whether the engine has a tap."""
        return tap in self._tapped

    @cached_property
    def _widths(self) -> dict[Site, SiteWidth]:
        return {width.site: width for width in self.widths}

    def width_of(self, site: Site) -> SiteWidth:
        """How wide the rows of a site are."""
        return self._widths.get(site) or SiteWidth(site, self.hidden)

    def rows_of(self, taps: Iterable[TapPoint]) -> int:
        """Rows of the capture buffer, as wide as the stream, that a token takes at some taps."""
        return sum(rows_for(self.width_of(tap.site), self.hidden) for tap in taps)


def rows_for(width: SiteWidth, hidden: int) -> int:
    """Rows of the capture buffer that a token of one rank takes at a site."""
    return -(-(width.width // width.shards) // hidden)


_KEY = "inspect_lens_limits"
WEIGHT_BYTES: Final[dict[str, tuple[int, str]]] = {
    "probe": (1 << 28, f"a probe has {1 << 28} at most; use fewer units or heads"),
    "lens": (
        1 << 30,
        f"a lens that a client sends has {1 << 30} at most; store it as float16, leave out layers, "
        "or register it at the server's start with INSPECT_LENS_REGISTER",
    ),
    "autoencoder": (
        1 << 30,
        f"an autoencoder that a client sends has {1 << 30} at most; store it as float16, or "
        "register it at the server's start with INSPECT_LENS_REGISTER",
    ),
}
"""Of one tensor: the most bytes, and what to say of more. An operator's lens comes from a file."""


class TensorLimits:
    """What an engine can use of the tensors of one request, which are counted together.

    A kilobyte of text unpacks to gigabytes. So shapes are judged as they are declared.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._model, self._hidden = facts.model, facts.hidden
        self._n_layers, self._rows = facts.n_layers, facts.bank_rows
        self._n_asked = 0

    @cached_property
    def _widths(self) -> dict[Site, int]:
        return {width.site: width.width for width in self._facts.widths}

    @property
    def context(self) -> dict[str, TensorLimits]:
        """What pydantic hands to the validators of a model."""
        return {_KEY: self}

    def judge_edit(
        self, shape: tuple[int, ...], itemsize: int, *, site: object = None, is_part: bool = False
    ) -> None:
        """Judge the declared shape of a tensor of an edit, whose last axis is the width."""
        width = self._widths.get(cast("Site", site), self._hidden)
        found = shape[-1] if shape else 0
        if not (0 < found <= width if is_part else found == width):
            if width == self._hidden:
                self._judge_width(shape)
            raise SpecError(
                f"width {found} in shape {shape}; {site} of {self._model} is {width} wide"
            )
        self._n_asked += math.prod(shape[:-1]) * -(-width // self._hidden)
        if self._n_asked > self._rows:
            raise full_table(self._n_asked, self._rows)

    def judge_numbers(self, shape: tuple[int, ...], itemsize: int, *, most: int) -> None:
        """Judge the declared shape of a tensor of an edit that has a number for each direction."""
        if (n := math.prod(shape)) > most * self._n_layers:
            raise SpecError(f"shape {shape} has {n} numbers; {most} at most for each layer")

    def edit_judge(self, site: object, *, is_part: bool) -> JudgeShape:
        """What judges the tensors of an edit; see `judge_edit`."""
        info = SITE_TABLE.get(cast("Site", site)) if isinstance(site, str) else None
        if info is not None and not info.is_wide and site not in self._widths:
            raise UnsupportedError(
                f"this engine has no taps at {site}, so nothing is known of its width; start it "
                "with the site in INSPECT_LENS_SITES"
            )
        key = site if isinstance(site, str) else None
        return partial(self.judge_edit, site=key, is_part=is_part)

    def judge_weights(self, shape: tuple[int, ...], itemsize: int, *, axes: str, what: str) -> None:
        """Judge the declared shape of a tensor of a probe or a lens."""
        if len(shape) != len(axes) and (what != "probe" or math.prod(shape) != 1):
            raise SpecError(f"shape {shape}; it needs {len(axes)} axes")
        if len(shape) == len(axes):
            if axes.startswith("l") and shape[0] > self._n_layers:
                raise SpecError(
                    f"shape {shape} has {shape[0]} layers; {self._model} has {self._n_layers}"
                )
            for i, axis in enumerate(axes):
                if axis == "h":
                    self._judge_width(shape[: i + 1])
        most, way = WEIGHT_BYTES[what]
        if (n_bytes := math.prod(shape) * itemsize) > most:
            raise SpecError(f"shape {shape} has {n_bytes} bytes; a tensor of {way}")

    def _judge_width(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] != self._hidden:
            raise SpecError(
                f"width {shape[-1] if shape else 0} in shape {shape}; the residual stream of "
                f"{self._model} is {self._hidden} wide"
            )


def full_table(n: int, rows: int) -> UnsupportedError:
    """What is said where edits need more vectors than the steering table holds."""
    return UnsupportedError(
        f"{n} vectors and the steering table has {rows} rows; edit fewer positions or layers, or "
        "raise INSPECT_LENS_BANK_BYTES"
    )


def limits_of(info: ValidationInfo) -> TensorLimits | None:
    """Limits that a model is validated under, if any."""
    context = info.context
    return context.get(_KEY) if isinstance(context, dict) else None
